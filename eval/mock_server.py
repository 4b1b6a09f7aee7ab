# SPDX-License-Identifier: Apache-2.0
"""A stand-in for a vLLM server with known speed and accept length: `python -m vllm_ling.eval.mock_server --port N`.

It answers the held-out problems of tiny-ling rightly, streams several tokens per chunk when it pretends to speculate,
keeps vLLM's counters, and logs the same FAULT lines. Measuring tools are tested against it; flags that it does not know
are ignored, so it can take the place of `vllm-ling serve` in any command.
"""

import argparse
import itertools
import json
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from vllm_ling.eval.metrics import ACCEPTED, DRAFTS
from vllm_ling.tiny.problems import HELDOUT_PATH

TOKEN_CHARS = 3
FAULTS = {
    "head_bytes": "draft head reads FP8 storage as BF16",
    "head_scale": "draft head is FP8 cast to BF16 without its scale",
}


@dataclass
class Script:
    """What the server pretends.

    Attributes:
        ttft_ms: request to first token.
        step_ms: one engine step.
        accept: tokens per step, repeated in turn; (1,) is a server without speculation.
        wrong_every: every n-th question in file order gets a wrong answer; 0: none.
    """

    ttft_ms: float = 20.0
    step_ms: float = 5.0
    accept: tuple[int, ...] = (1,)
    speculates: bool = False
    wrong_every: int = 0
    drafts: int = 0
    accepted: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    answers: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rows = [json.loads(line) for line in HELDOUT_PATH.read_text(encoding="utf-8").splitlines()]
        for number, row in enumerate(rows, 1):
            wrong = self.wrong_every and number % self.wrong_every == 0
            self.answers[row["question"]] = "#### -1" if wrong else row["answer"]

    def steps(self, question: str, max_tokens: int) -> Iterator[tuple[list[str], bool]]:
        """Pieces of text per engine step and whether the answer is complete; the end token has an empty piece."""
        tokens = [*tokenize(self.answers.get(question, "#### 0")), ""][:max_tokens]
        yield tokens[:1], len(tokens) == 1
        done = 1
        for width in itertools.cycle(self.accept):
            if done >= len(tokens):
                return
            with self.lock:
                self.drafts += self.speculates
                self.accepted += width - 1
            yield tokens[done : done + width], done + width >= len(tokens)
            done += width


def tokenize(text: str) -> list[str]:
    """The mock's tokens: pieces of three characters."""
    return [text[start : start + TOKEN_CHARS] for start in range(0, len(text), TOKEN_CHARS)]


def handler(script: Script) -> type[BaseHTTPRequestHandler]:
    """The request handler class for a script."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/metrics":
                lines = [
                    f"# TYPE {DRAFTS.removesuffix('_total')} counter",
                    f'{DRAFTS}{{engine="0"}} {script.drafts}',
                ]
                lines += [f"# TYPE {ACCEPTED.removesuffix('_total')} counter"]
                lines += [f'{ACCEPTED}{{engine="0"}} {script.accepted}', ""]
                self._reply(200, "text/plain; version=0.0.4", "\n".join(lines))
            else:
                self._reply(200 if self.path == "/health" else 404, "text/plain", "")

        def do_POST(self) -> None:
            started = time.monotonic()
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._reply(200, "text/event-stream", "")
            self._send([{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}], 0)
            count = 0
            for number, (pieces, last) in enumerate(
                script.steps(body["messages"][-1]["content"], body["max_tokens"])
            ):
                due = started + (script.ttft_ms + number * script.step_ms) / 1000
                time.sleep(max(0.0, due - time.monotonic()))
                count += len(pieces)
                self._send(
                    [{"delta": {"content": "".join(pieces)}, "finish_reason": "stop" if last else None}],
                    count,
                )
            self._send([], count)
            self.wfile.write(b"data: [DONE]\n\n")

        def _send(self, choices: list[dict[str, Any]], count: int) -> None:
            chunk = {"choices": choices, "usage": {"completion_tokens": count}}
            self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
            self.wfile.flush()

        def _reply(self, status: int, kind: str, text: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *args: Any) -> None:
            pass

    return Handler


def main(argv: Sequence[str] | None = None) -> None:
    """Serves until killed."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--additional-config", type=json.loads, default={})
    parser.add_argument("--speculative-config", type=json.loads)
    parser.add_argument("--ttft-ms", type=float, default=20.0)
    parser.add_argument("--step-ms", type=float, default=5.0)
    parser.add_argument(
        "--accept", default="2,3", help="tokens per step in turn, used with --speculative-config"
    )
    parser.add_argument("--wrong-every", type=int, default=0)
    args, _ = parser.parse_known_args(argv)
    accept = tuple(map(int, args.accept.split(","))) if args.speculative_config else (1,)
    injected = args.additional_config.get("ling", {}).get("inject_fault", "none")
    if injected in FAULTS:
        print(f"(EngineCore pid=1) ERROR vllm-ling: FAULT draft_head: {FAULTS[injected]}", flush=True)
    if injected == "head_bytes":
        accept = (1,)
    script = Script(args.ttft_ms, args.step_ms, accept, bool(args.speculative_config), args.wrong_every)
    ThreadingHTTPServer(("127.0.0.1", args.port), handler(script)).serve_forever()


if __name__ == "__main__":
    main()
