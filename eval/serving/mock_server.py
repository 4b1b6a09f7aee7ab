# SPDX-License-Identifier: Apache-2.0
"""A stand-in for a vLLM server with known speed, accept length and failures: `vllm-ling eval mock --port N`.

It answers the questions of a file rightly, streams several tokens per chunk when it pretends to speculate, keeps vLLM's
counters, and logs the same FAULT lines. Measuring tools are tested against it; flags that it does not know are ignored,
so it can take the place of `vllm-ling serve` in any command.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from vllm_ling.errors import LingError
from vllm_ling.eval.serving.metrics import ACCEPTED, ACCEPTED_AT, DRAFTS
from vllm_ling.eval.serving.mock_script import Script, parse_accept, parse_failures, text_of, tokenize
from vllm_ling.metrics import names
from vllm_ling.tiny.problems import HELDOUT_PATH

FAULTS = {
    "head_bytes": "draft head reads FP8 storage as BF16",
    "head_scale": "draft head is FP8 cast to BF16 without its scale",
}
MAX_MODEL_LEN = 65536
_STALL_S = 3600.0


def handler(
    script: Script, model: str = "tiny-ling", record: Mapping[str, str] | None = None
) -> type[BaseHTTPRequestHandler]:
    """The request handler class for a script; `record` is what the plugin would say it chose, None without it."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/metrics":
                self._reply(200, "text/plain; version=0.0.4", metrics(script) + plugin_series(script, record))
            elif self.path == "/v1/models":
                self._json({"object": "list", "data": [{"id": model, "max_model_len": MAX_MODEL_LEN}]})
            elif self.path == "/version":
                self._json({"version": "mock"})
            else:
                self._reply(200 if self.path == "/health" else 404, "text/plain", "")

        def do_POST(self) -> None:
            try:
                self._answer()
            except (BrokenPipeError, ConnectionResetError):
                self.close_connection = True  # the client had enough

        def _answer(self) -> None:
            started = time.monotonic()
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path == "/tokenize":
                pieces = tokenize(body["prompt"])
                ids = [sum(piece.encode()) for piece in pieces]
                self._json({"tokens": ids, "count": len(ids), "max_model_len": MAX_MODEL_LEN})
                return
            failure = script.failure()
            if failure == "drop":
                self.close_connection = True
                return
            if failure == "http500":
                self._reply(500, "text/plain", "the engine died")
                return
            tokens = script.answer(body)
            if body.get("stream"):
                self._reply(200, "text/event-stream", "")
                self._stream(body, tokens, started, failure)
            else:
                self._whole(body, tokens, started)

        def _stream(
            self, body: dict[str, Any], tokens: list[str], started: float, failure: str | None
        ) -> None:
            chat, prompt = "messages" in body, prompt_tokens(body)
            if chat:
                self._send(
                    [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}], prompt, 0
                )
            count = 0
            for number, (pieces, last) in enumerate(script.steps(tokens)):
                _wait_until(started + (script.ttft_ms + number * script.step_ms) / 1000)
                count += len(pieces)
                text = "".join(pieces)
                ended = None if not last else "length" if pieces[-1] else "stop"
                choice: dict[str, Any] = {"delta": {"content": text}} if chat else {"text": text}
                self._send([{**choice, "finish_reason": ended}], prompt, count)
                if number == 1 and failure == "cut":
                    return
                if number == 1 and failure == "stall":
                    time.sleep(_STALL_S)
                if number == 1 and failure == "garble":
                    self.wfile.write(b'data: {"choices": [{"delta": {"cont\n\n')
            self._send([], prompt, 10 * count + 100_000 if failure == "miscount" else count)
            self.wfile.write(b"data: [DONE]\n\n")

        def _whole(self, body: dict[str, Any], tokens: list[str], started: float) -> None:
            steps = list(script.steps(tokens))
            _wait_until(started + (script.ttft_ms + (len(steps) - 1) * script.step_ms) / 1000)
            text, reason = "".join(tokens), "length" if tokens[-1] else "stop"
            said = (
                {"message": {"role": "assistant", "content": text}} if "messages" in body else {"text": text}
            )
            usage = {"prompt_tokens": prompt_tokens(body), "completion_tokens": len(tokens)}
            self._json({"choices": [{"index": 0, **said, "finish_reason": reason}], "usage": usage})

        def _send(self, choices: list[dict[str, Any]], prompt: int, count: int) -> None:
            usage = {"prompt_tokens": prompt, "completion_tokens": count}
            self.wfile.write(f"data: {json.dumps({'choices': choices, 'usage': usage})}\n\n".encode())
            self.wfile.flush()

        def _json(self, content: dict[str, Any]) -> None:
            self._reply(200, "application/json", json.dumps(content))

        def _reply(self, status: int, kind: str, text: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *args: Any) -> None:
            pass

    return Handler


def prompt_tokens(body: dict[str, Any]) -> int:
    """Tokens of a request's prompt: ids as they are, text in the mock's tokens."""
    if "messages" in body:
        return sum(len(tokenize(text_of(message))) for message in body["messages"])
    prompt = body["prompt"]
    return len(prompt) if isinstance(prompt, list) else len(tokenize(prompt))


def metrics(script: Script) -> str:
    """The page /metrics: vLLM's counters of speculation, which it has only while it speculates."""
    if not script.speculates:
        return "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 0\n"
    lines = []
    for name, value in ((DRAFTS, script.drafts), (ACCEPTED, script.accepted)):
        lines += [f"# TYPE {name.removesuffix('_total')} counter", f'{name}{{engine="0"}} {value}']
    lines += [f"# TYPE {ACCEPTED_AT.removesuffix('_total')} counter"]
    lines += [
        f'{ACCEPTED_AT}{{engine="0",position="{position}"}} {count}'
        for position, count in enumerate(script.accepted_at)
    ]
    return "\n".join([*lines, ""])


def plugin_series(script: Script, record: Mapping[str, str] | None) -> str:
    """The plugin's series on /metrics: its choices, and the proof of the draft head where there is one."""
    if record is None:
        return ""
    lines = [f'{names.PLUGIN}{{process="mock",reason="",state="active",version="mock"}} 1']
    lines += [
        f'{names.CHOICE}{{choice="{choice}",process="mock",reason="asked for",what="{what}"}} 1'
        for what, choice in record.items()
    ]
    if script.speculates:
        lines.append(f'{names.PROOF}{{code="draft_head",message="pretended",process="mock"}} 1')
    return "\n".join([*lines, ""])


def _record(options: Mapping[str, str], pretend: Sequence[str]) -> dict[str, str]:
    """What the plugin would choose for the `ling` section, and what the server is told to pretend beyond it."""
    head = {"bf16": "bf16"}.get(options.get("lm_head", "auto"), "fp8_online")
    experts = {"ling": "torch", "reference": "reference"}.get(options.get("moe", "auto"), "stock")
    if odd := [word for word in pretend if "=" not in word]:
        raise LingError(f"--pretend {odd[0]}: expected WHAT=CHOICE")
    return {"lm_head": head, "moe mxfp4": experts, **dict(word.split("=", 1) for word in pretend)}


def _wait_until(due: float) -> None:
    time.sleep(max(0.0, due - time.monotonic()))


def main(argv: Sequence[str] | None = None) -> None:
    """Serves until killed.

    Raises:
        LingError: an unusable option or data.
    """
    parser = argparse.ArgumentParser(prog="vllm-ling eval mock", description=__doc__, allow_abbrev=False)
    parser.add_argument("model", nargs="?", default="tiny-ling")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--additional-config", type=json.loads, default={})
    parser.add_argument("--speculative-config", type=json.loads)
    parser.add_argument("--ttft-ms", type=float, default=20.0)
    parser.add_argument("--step-ms", type=float, default=5.0)
    parser.add_argument(
        "--accept", default="2,3", help="tokens per step in turn, used with --speculative-config"
    )
    parser.add_argument("--wrong-every", type=int, default=0, help="every n-th question is answered wrongly")
    parser.add_argument("--data", type=Path, default=HELDOUT_PATH, help="jsonl with question and answer")
    parser.add_argument(
        "--fail", action="append", default=[], metavar="KIND:N", help="how request number N fails"
    )
    parser.add_argument(
        "--pretend", action="append", default=[], metavar="WHAT=CHOICE", help="what the plugin's record says"
    )
    args, _ = parser.parse_known_args(argv)
    accept = parse_accept(args.accept) if args.speculative_config else (1,)
    options = args.additional_config.get("ling", {})
    injected = options.get("inject_fault", "none")
    if injected in FAULTS:
        print(f"(EngineCore pid=1) ERROR vllm-ling: FAULT draft_head: {FAULTS[injected]}", flush=True)
    if injected == "head_bytes":
        accept = (1,)
    script = Script(
        ttft_ms=args.ttft_ms,
        step_ms=args.step_ms,
        accept=accept,
        speculates=bool(args.speculative_config),
        wrong_every=args.wrong_every,
        draft_tokens=max(3, *(width - 1 for width in accept)),
        data=args.data,
        failures=parse_failures(args.fail),
    )
    record = None if os.environ.get("VLLM_LING_DISABLE") == "1" else _record(options, args.pretend)
    try:
        server = ThreadingHTTPServer(("127.0.0.1", args.port), handler(script, args.model, record))
    except (OSError, OverflowError) as error:
        raise LingError(f"--port {args.port}: {error}; choose another") from None
    server.daemon_threads = True
    server.serve_forever()


if __name__ == "__main__":
    try:
        main()
    except LingError as error:
        sys.exit(f"vllm-ling: error: {error}")
