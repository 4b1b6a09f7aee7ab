# SPDX-License-Identifier: Apache-2.0
"""The runner over mock servers and known parts: nothing is run twice, nothing is lost, nothing private is written."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.unit.mock_servers import servers_of
from tests.verify.checkpoints import changed
from vllm_ling.errors import LingError
from vllm_ling.eval.provenance import ROOT
from vllm_ling.verify import run as runner
from vllm_ling.verify.command import chosen, verify
from vllm_ling.verify.finding import Finding, exit_code, judged, worst
from vllm_ling.verify.run import run
from vllm_ling.verify.settings import PARTS, Verification
from vllm_ling.verify.worker import run_apart

MOCK = (sys.executable, "-m", "vllm_ling.eval.serving.mock_server")
QUIET = Console(quiet=True)
MTP = "{'method':'mtp','num_speculative_tokens':3}"
TRAP = "{'ling':{'inject_fault':'head_bytes','on_fault':'warn'}}"
WHAT = Verification(
    "tiny-ling",
    ("--ttft-ms", "2", "--step-ms", "1"),
    task="tiny_ling",
    items=6,
    max_tokens=160,
    minutes=0,
    command=MOCK,
)


class Parts:
    """Stands in for the parts that run apart."""

    def __init__(self, **outcomes: str) -> None:
        self.outcomes, self.asked = outcomes, []  # type: tuple[dict[str, str], list[str]]

    def __call__(self, part: str, what: Verification, log: Path) -> Finding:
        self.asked.append(part)
        outcome: Any = self.outcomes.get(part, "ok")
        if outcome == "break":
            raise RuntimeError("Killed (signal 9; log: kernels.log)")
        if outcome == "unusable":
            raise LingError(f"{what.folder}: tensor lm_head.weight is missing")
        return Finding(
            part=part, outcome=outcome, evidence="seen in /private/place/x", figures={"n": float("nan")}
        )


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Parts:
    found = Parts()
    monkeypatch.setattr(runner, "run_apart", found)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return found


def test_the_whole_run_its_files_and_its_page(parts: Parts, tmp_path: Path) -> None:
    parts.outcomes["kernels"] = "unknown"
    out = tmp_path / "v.json"
    code = run(WHAT, PARTS, out, restart=False, console=QUIET)
    content = json.loads(out.read_text(), parse_constant=pytest.fail)
    assert content["findings"][0]["figures"] == {"n": "nan"}
    assert code == 3 and content["outcome"] == "unknown"
    assert [f["part"] for f in content["findings"]] == list(PARTS)
    assert [f["outcome"] for f in content["findings"]] == ["ok", "unknown", "ok", "ok", "ok", "ok"]
    assert content["provenance"]["model"]["name"] == "tiny-ling"
    assert content["provenance"]["serve"] == list(WHAT.serve) and content["provenance"]["packages"]
    page = out.with_suffix(".md").read_text()
    assert page.startswith("# Verification of tiny-ling: unknown") and "| gsm8k | ok | 6 of 6 right" in page
    assert len(page.splitlines()) < 45 and "config.json: SHA-256" in page
    for written in [out, out.with_suffix(".md"), *(tmp_path / "v").glob("*.json")]:
        text = written.read_text()
        assert str(ROOT) not in text and str(tmp_path) not in text, written
        assert "/private" not in text and "/place" not in text, written
    for part in PARTS:
        assert (tmp_path / "v" / f"{part}.part.json").exists()


def test_a_finished_part_is_not_run_again_and_an_unknown_one_is(parts: Parts, tmp_path: Path) -> None:
    parts.outcomes["kernels"] = "unknown"
    out = tmp_path / "v.json"
    run(WHAT, PARTS, out, restart=False, console=QUIET)
    first = json.loads(out.read_text())
    broken = replace(WHAT, command=("false",))
    parts.asked.clear()
    parts.outcomes["kernels"] = "ok"
    assert run(broken, PARTS, out, restart=False, console=QUIET) == 0, "no server was started"
    assert parts.asked == ["kernels"]
    again = json.loads(out.read_text())
    assert [again["findings"][i] for i in (0, 2, 3, 4, 5)] == [first["findings"][i] for i in (0, 2, 3, 4, 5)]
    parts.asked.clear()
    run(replace(broken, prompts=5), ["head", "logits", "greedy"], out, restart=False, console=QUIET)
    assert parts.asked == ["logits", "greedy"], "only what depends on the setting"
    parts.asked.clear()
    run(broken, ["head"], out, restart=True, console=QUIET)
    assert parts.asked == ["head"] and (tmp_path / "v" / "gsm8k.part.json").exists()


def test_other_flags_or_files_are_refused(parts: Parts, tmp_path: Path) -> None:
    out, folder = tmp_path / "v.json", changed(tmp_path / "m")
    what = replace(WHAT, model=str(folder))
    run(what, ["head"], out, restart=False, console=QUIET)
    with pytest.raises(LingError, match=r"other serve; choose another --out, or --restart"):
        run(replace(what, serve=("--step-ms", "2")), ["head"], out, restart=False, console=QUIET)
    shard = next(folder.glob("*.safetensors"))
    os.utime(shard, (1, 1))  # downloaded again
    with pytest.raises(LingError, match="other model"):
        run(replace(what), ["head"], out, restart=False, console=QUIET)
    run(replace(what), ["logits"], out, restart=True, console=QUIET)
    assert not (tmp_path / "v" / "head.part.json").exists(), "it was about other bytes"


def test_what_breaks_is_a_finding_and_the_rest_still_runs(parts: Parts, tmp_path: Path) -> None:
    parts.outcomes |= {"head": "unusable", "kernels": "break"}
    dead = (sys.executable, "-c", "import sys; sys.exit('vllm-ling: error: --foo: no such flag')")
    out = tmp_path / "v.json"
    assert run(replace(WHAT, command=dead), PARTS, out, restart=False, console=QUIET) == 2
    found = {f["part"]: f for f in json.loads(out.read_text())["findings"]}
    assert (
        found["head"]["outcome"] == "fail" and "tensor lm_head.weight is missing" in found["head"]["evidence"]
    )
    assert found["kernels"]["outcome"] == "unknown" and "signal 9" in found["kernels"]["evidence"]
    assert found["logits"]["outcome"] == found["greedy"]["outcome"] == "ok"
    for part in ("gsm8k", "speed"):
        assert found[part]["outcome"] == "fail" and "--foo: no such flag" in found[part]["evidence"]


@pytest.mark.parametrize(
    ("flags", "part", "said"),
    [
        ("--wrong-every 2", "gsm8k", "5 of 10 right: a server that is right 90%"),
        (
            f"--speculative-config {MTP} --additional-config {TRAP}",
            "speed",
            "accept length 1.00 with 3 draft tokens: the draft is noise",
        ),
        ("--step-ms 10", "speed", "slow: "),
    ],
)
def test_a_bad_server_is_found(parts: Parts, tmp_path: Path, flags: str, part: str, said: str) -> None:
    serve = ("--ttft-ms", "2", "--step-ms", "1", *flags.replace("'", '"').split())
    what = replace(WHAT, serve=serve, items=10, expect_tok_per_s=900 if "slow" in said else 0)
    out = tmp_path / "v.json"
    assert run(what, [part], out, restart=False, console=QUIET) == 2
    (finding,) = json.loads(out.read_text())["findings"]
    assert finding["outcome"] == "fail" and said in finding["evidence"], finding
    assert f"| {part} | **fail** | " in out.with_suffix(".md").read_text()


def test_a_server_that_dies_in_the_middle_is_a_failure_and_the_next_part_gets_a_new_one(
    parts: Parts, tmp_path: Path
) -> None:
    """Every request after the third is dropped; a new server answers two requests more, too few to time a round."""
    drops = [word for number in range(4, 60) for word in ("--fail", f"drop:{number}")]
    what = replace(WHAT, serve=(*WHAT.serve, *drops), items=12)
    started: list[int] = []
    real = runner.target

    def counted(*args: Any, **more: Any) -> Any:
        started.append(1)
        return real(*args, **more)

    runner.target = counted
    out = tmp_path / "v.json"
    try:
        assert run(what, ["gsm8k", "speed"], out, restart=False, console=QUIET) == 2
    finally:
        runner.target = real
    first, second = json.loads(out.read_text())["findings"]
    assert first["outcome"] == "fail" and "5 requests in a row failed" in first["evidence"]
    assert second["outcome"] == "fail" and len(started) == 2


def test_one_server_serves_both_parts_and_is_gone_afterwards(parts: Parts, tmp_path: Path) -> None:
    what = replace(WHAT, serve=(*WHAT.serve, "--tag", str(tmp_path)))
    alive: list[int] = []
    real = runner.speed.run

    def watched(*args: Any) -> Finding:
        alive.append(len(servers_of(tmp_path)))
        return real(*args)

    runner.speed.run = watched
    try:
        run(what, ["gsm8k", "speed"], tmp_path / "v.json", restart=False, console=QUIET)
    finally:
        runner.speed.run = real
    assert alive == [1] and servers_of(tmp_path) == []


INTERRUPTED = """
import sys
from pathlib import Path
from dataclasses import replace
from vllm_ling.verify import command
from tests.verify.test_verify_run import WHAT
what = replace(WHAT, serve=("--ttft-ms", "150", "--step-ms", "1", "--tag", sys.argv[1]))
command.Verification = lambda *args, **more: what
sys.exit(command.verify("tiny-ling", what.serve, "gsm8k,speed", Path(sys.argv[1]) / "v.json"))
"""


def gone(folder: Path) -> bool:
    deadline = time.monotonic() + 10
    while servers_of(folder) and time.monotonic() < deadline:
        time.sleep(0.05)
    return servers_of(folder) == []


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_interrupted_in_the_middle_and_gone_on(tmp_path: Path, how: signal.Signals) -> None:
    """In the middle of gsm8k: no server is left, the answers are kept, and the next run asks the rest only."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", INTERRUPTED, str(tmp_path)]
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    journal, deadline = tmp_path / "v" / "gsm8k.json.partial", time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        if journal.exists() and len(journal.read_bytes().splitlines()) >= 3 and servers_of(tmp_path):
            break
        time.sleep(0.01)
    process.send_signal(how)
    said = process.communicate(timeout=60)[0].decode()
    assert process.returncode == (130 if how != signal.SIGKILL else -signal.SIGKILL), said
    assert how == signal.SIGKILL or "finished parts are kept" in said
    assert gone(tmp_path)
    kept = [json.loads(line) for line in journal.read_bytes().splitlines()[1:]]
    assert 2 <= len(kept) < 6 and not (tmp_path / "v" / "gsm8k.part.json").exists()
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads((tmp_path / "v.json").read_text())
    assert content["findings"][0]["figures"]["right"] == 6
    answers = (tmp_path / "v" / "gsm8k.answers.jsonl").read_text().splitlines()[1:]
    assert len(answers) == 6 and [json.loads(line) for line in answers[: len(kept)]] == kept
    assert gone(tmp_path)


def test_other_questions_do_not_go_on_with_an_unfinished_run(parts: Parts, tmp_path: Path) -> None:
    folder = tmp_path / "v"
    folder.mkdir()
    (folder / "gsm8k.json.partial").write_text('{"settings": {"limit": 99}}\n')
    assert run(WHAT, ["gsm8k"], tmp_path / "v.json", restart=False, console=QUIET) == 0


def test_a_part_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    finding = run_apart("head", WHAT, tmp_path / "head.log")
    assert finding.outcome == "ok" and finding.part == "head"
    headless = changed(tmp_path / "m", lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(LingError, match=r"tensor lm_head\.weight is missing"):
        run_apart("head", replace(WHAT, model=str(headless)), tmp_path / "head.log")
    with pytest.raises(RuntimeError, match=r"No module named.*exit code 1; log: none.log"):
        run_apart("none", WHAT, tmp_path / "none.log")


def test_json_round_trip() -> None:
    what = replace(WHAT, reference="x", expect_tok_per_s=3.5)
    assert Verification.from_json(what.to_json()) == what


def test_a_damaged_file_does_not_fill_the_page() -> None:
    finding = judged(
        "kernels", [("warn", "odd"), *[("fail", f"wrong {n}") for n in range(90)]], ["seen"], {}, "mend"
    )
    assert finding.outcome == "fail" and finding.fix == "mend"
    assert finding.evidence == f"{'; '.join(f'wrong {n}' for n in range(6))}; and 85 more; seen"
    assert judged("kernels", [], ["seen", ""], {}, "mend").model_dump() == {
        "part": "kernels",
        "outcome": "ok",
        "evidence": "seen",
        "fix": "",
        "figures": {},
    }


def test_worst_outcome_and_exit_codes() -> None:
    def code(*outcomes: Any) -> int:
        return exit_code([Finding(part="head", outcome=outcome, evidence="") for outcome in outcomes])

    assert code() == code("ok") == 0
    assert (code("ok", "unknown"), code("unknown", "warn"), code("warn", "fail", "unknown")) == (3, 1, 2)
    assert worst([]) == "ok"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"parts": "head,heads"}, r"--parts: unknown part heads \(known: head, kernels"),
        ({"out": Path("folder")}, "--out folder: the name of a JSON file"),
        ({"model": "no/such-model"}, "MODEL no/such-model: neither a folder nor a model in the local cache"),
        ({"reference": "nowhere"}, "--reference nowhere: neither a folder"),
        ({"data": Path("none.jsonl")}, "none.jsonl: cannot be read"),
        ({"serve": ["other-model"]}, "'other-model' is no option; serve flags follow after --"),
    ],
)
def test_mistakes_are_refused_before_anything_is_written(
    words: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    usual: dict[str, Any] = {"model": "tiny-ling", "serve": [], "parts": "", "out": Path("build/v.json")}
    with pytest.raises(LingError, match=said):
        verify(**{**usual, **words})
    assert list(tmp_path.iterdir()) == []


def test_the_command_line(tmp_path: Path) -> None:
    """Options before --, serve flags after it; a mistake is one line."""
    command = [sys.executable, "-m", "vllm_ling.cli", "verify", "tiny-ling", "--parts", "head"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    flags = ["--", "--max-model-len", "256"]
    done = subprocess.run(
        [*command, *flags], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and "| head | ok | " in done.stdout, done.stdout + done.stderr
    content = json.loads((tmp_path / "build" / "verify.json").read_text())
    assert content["provenance"]["serve"] == ["--max-model-len", "256"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("vllm-ling: error: build/verify holds a verification with other serve")


def test_parts_by_name() -> None:
    assert chosen("") == list(PARTS) and chosen("gsm8k,head") == ["gsm8k", "head"]
