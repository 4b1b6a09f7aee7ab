# SPDX-License-Identifier: Apache-2.0
"""Ablation: stages, the check that a server is what its stage says, the table, and the whole run over mock servers."""

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
from vllm_ling.errors import LingError
from vllm_ling.eval.ablation.page import SCHEMA_VERSION, markdown
from vllm_ling.eval.ablation.run import Ablation, StageFiles, run
from vllm_ling.eval.ablation.stages import AblationStage, not_its_drafts, not_what_it_says, plan
from vllm_ling.eval.ablation.table import Row, as_data, rows
from vllm_ling.eval.files import write_json
from vllm_ling.eval.provenance import ROOT
from vllm_ling.eval.report.result_file import Item, ResultFile, load, make
from vllm_ling.eval.runs.gsm8k import Gsm8k
from vllm_ling.eval.runs.synthetic import Synthetic
from vllm_ling.eval.serving.served import Served

MOCK = (sys.executable, "-m", "vllm_ling.eval.serving.mock_server")
FOUR = ["baseline", "moe", "head", "mtp"]


def test_stages_add_up() -> None:
    stages = plan(FOUR, {}, gpu=True)
    assert [stage.options for stage in stages] == [
        {"lm_head": "bf16", "moe": "stock", "linear": "stock"},
        {"lm_head": "bf16", "moe": "ling", "linear": "ling"},
        {"lm_head": "fp8", "moe": "ling", "linear": "ling"},
        {"lm_head": "fp8", "moe": "ling", "linear": "ling"},
    ]
    assert [stage.speculates for stage in stages] == [False, False, False, True]
    assert plan(["baseline"], {}, gpu=False)[0].options["moe"] == "reference"


def test_flags_of_a_stage_and_stages_of_ones_own() -> None:
    stages = plan(
        ["stock", "baseline", "mtp5"],
        {
            "mtp5": """--speculative-config '{"method": "mtp", "num_speculative_tokens": 5}'""",
            "stock": "--x 1",
        },
        gpu=True,
    )
    assert stages[0].stock and stages[0].serve_flags() == ["--x", "1"]
    assert stages[0].env() == {"VLLM_LING_DISABLE": "1"} and stages[1].env() == {}
    assert json.loads(stages[2].serve_flags()[-1])["num_speculative_tokens"] == 5


def test_stages_after_stock_start_from_the_baseline() -> None:
    """Else the head would be FP8 from the first stage on, and its own stage would add nothing."""
    stock, moe, head, mtp = plan(["stock", "moe", "head", "mtp"], {}, gpu=True, accept_length=2.68)
    assert stock.options == {} and stock.stock
    assert [moe, head] == plan(FOUR, {}, gpu=True)[1:3]
    assert mtp.accept_length == 2.68 and moe.accept_length is None
    drafts = json.loads(mtp.serve_flags()[-1])
    assert drafts["rejection_sample_method"] == "synthetic" and drafts["synthetic_acceptance_length"] == 2.68
    assert "synthetic" not in str(plan(FOUR, {}, gpu=True)[-1].serve_flags())
    with pytest.raises(LingError, match=r"--accept-length 4\.5: .* between 1 and 4"):
        plan(FOUR, {}, gpu=True, accept_length=4.5)


@pytest.mark.parametrize(
    ("accept", "counted", "rounds", "said"),
    [
        (None, 1.0, 600, None),
        (None, None, 0, "no draft was counted"),
        (2.68, 2.6, 600, None),
        (2.68, 1.0, 600, "1.00 was counted, and 2.68 was asked for"),
        (2.68, 3.6, 600, "3.60 was counted"),
    ],
)
def test_drafts_that_are_not_the_stages_are_found(
    accept: float | None, counted: float | None, rounds: int, said: str | None
) -> None:
    problem = not_its_drafts(replace(MTP, accept_length=accept), counted, rounds)
    assert problem is None if said is None else problem is not None and said in problem


def test_drafts_of_a_stage_that_has_none_are_found() -> None:
    moe = plan(FOUR, {}, gpu=True)[1]
    assert not_its_drafts(moe, None, 0) is None
    assert "drafts were counted" in str(not_its_drafts(moe, 2.0, 9))
    assert not_its_drafts(replace(moe, flags=("--speculative-config", "{}")), 2.0, 9) is None


@pytest.mark.parametrize(
    ("names", "extra", "said"),
    [
        ([], {}, "name at least one"),
        (["baseline", "typo"], {}, "unknown stage typo"),
        (["moe", "moe"], {}, "moe is there twice"),
        (["moe"], {"head": "--x"}, "no such stage"),
        (["moe"], {"moe": "'unclosed"}, "--flags moe"),
        (["moe", ".."], {"..": "--x"}, "'..' names a folder"),
        (["a/b"], {"a/b": "--x"}, "'a/b' names a folder"),
    ],
)
def test_bad_stages_are_named(names: list[str], extra: dict[str, str], said: str) -> None:
    with pytest.raises(LingError, match=said):
        plan(names, extra, gpu=True)


def served(
    choices: dict[str, str] | None, proofs: tuple[str, ...] = (), faults: dict[str, str] | None = None
) -> Served:
    return Served(
        "u",
        "m",
        None,
        None,
        plugin=choices is not None,
        choices=choices or {},
        proofs=dict.fromkeys(proofs, ""),
        faults=faults or {},
    )


FP8_LING = {"lm_head": "fp8_online", "moe mxfp4": "humming", "moe decode": "ling", "linear 512 x 128": "ling"}
MTP = plan(FOUR, {}, gpu=True)[-1]


@pytest.mark.parametrize(
    ("stage", "found", "said"),
    [
        (MTP, served(FP8_LING, ("draft_head",)), None),
        (MTP, served(FP8_LING), "no proof of the draft head"),
        (MTP, served({**FP8_LING, "lm_head": "bf16"}, ("draft_head",)), "lm_head=fp8 was asked for"),
        (MTP, served({**FP8_LING, "moe decode": "stock"}, ("draft_head",)), "moe=ling was asked for"),
        (MTP, served({**FP8_LING, "linear 512 x 128": "stock"}, ("draft_head",)), "linear=ling"),
        (MTP, served(FP8_LING, ("draft_head",), {"draft_head_nan": "row 3"}), "draft_head_nan: row 3"),
        (MTP, served(None), "not active"),
        (AblationStage("stock", stock=True), served(None), None),
        (AblationStage("stock", stock=True), served({}), "active although"),
        (AblationStage("b", {"moe": "reference"}), served({"moe mxfp4": "torch"}), "moe=reference"),
        (AblationStage("b", {"moe": "ling"}), served({"moe mxfp4 clamped": "torch"}), None),
        (AblationStage("b", {"moe": "ling"}), served({}), "nothing of the experts"),
    ],
)
def test_a_stage_that_is_not_what_it_says_is_found(
    stage: AblationStage, found: Served, said: str | None
) -> None:
    problem = not_what_it_says(stage, found)
    assert problem is None if said is None else problem is not None and said in problem


def ablation(names: list[str], extra: dict[str, str], tag: str = "", rounds: int = 1) -> Ablation:
    """On mock servers, whose speed the stages' flags set; `tag` stands in their command lines."""
    common = ["tiny-ling", "--ttft-ms", "20", "--tag", tag]
    return Ablation(
        plan(names, extra, gpu=False),
        common,
        Gsm8k(task="tiny_ling", limit=6, max_tokens=96),
        [Synthetic(None, isl=24, osl=25, requests=1, repeats=2)],
        env={"PYTHONPATH": str(ROOT)},
        command=MOCK,
        rounds=rounds,
    )


# The mock's draft is surer of random tokens than of text: 4 tokens a step for the load, 2 for the questions.
SPEEDS = {"baseline": "--step-ms 12", "moe": "--step-ms 8", "mtp": "--step-ms 9 --accept 3"}


def content(table: list[Row], **changes: Any) -> dict[str, Any]:
    """What the command writes, as far as the page reads it."""
    data = {"base": table[0].stage.name, "margin": 0.05, "random_weights": None, "failures": {}}
    stages = json.loads(json.dumps(as_data(table)))
    return {"schema_version": SCHEMA_VERSION, "stages": stages, **data, **changes}


@pytest.mark.clock
def test_the_whole_ablation_over_mock_servers(tmp_path: Path) -> None:
    what = ablation(["baseline", "moe", "mtp"], SPEEDS, rounds=2)
    found = run(what, tmp_path, restart=False, console=Console(quiet=True))
    table = rows(found, 0.05, "baseline")
    base, moe, mtp = table
    assert base.real is not None and moe.real is not None and mtp.real is not None
    assert moe.real_gain is not None and mtp.real_gain is not None and base.real_gain is not None
    assert base.real_gain.total == 1.0
    for row, step, accept in ((base, 12, 1), (moe, 8, 1), (mtp, 9, 3)):
        (load_row,) = row.loads
        assert row.real is not None and row.real.summary.accuracy == 1.0
        assert row.real.summary.tok_per_s == pytest.approx(accept * 1000 / step, rel=0.25)
        assert load_row.load == "random tokens 24/25"
        assert load_row.tok_per_s == pytest.approx(accept * 1000 / step, rel=0.25)
        assert row.server["plugin"] and "clocks" in row.server
    assert mtp.real.summary.accept_length == pytest.approx(3, rel=0.01)
    assert mtp.real_gain.accept_length == pytest.approx(3, rel=0.01)
    assert mtp.real_gain.step_time == pytest.approx(12 / 9, rel=0.3)
    text = markdown(content(table))
    assert "| mtp |" in text and "mtp: gap: random tokens 24/25 promised" in text
    assert "baseline: gap" not in text, "it is what the others are compared with"
    assert "| tiny_ling tok/s |" in text and "3.00 (100%, 100%, 0%)" in text
    assert "accuracy INCONCLUSIVE against baseline, margin 5.00%:" in text, "six items prove nothing"
    assert "requests failed" not in text
    assert "no difference found" in text and "equal" not in text
    assert [row["name"] for row in as_data(table)] == ["baseline", "moe", "mtp"]
    # The second round ran in the other order.
    dates = [
        load(tmp_path / name / "random-2.json").provenance["date"] for name in ("mtp", "moe", "baseline")
    ]
    assert dates == sorted(dates)
    json.dumps(as_data(table))


def test_nothing_is_measured_twice_and_other_settings_are_refused(tmp_path: Path) -> None:
    what = ablation(["baseline"], {"baseline": "--step-ms 2"})
    console = Console(quiet=True)
    (first,) = run(what, tmp_path, restart=False, console=console)
    broken = replace(what, command=("false",))
    (again,) = run(broken, tmp_path, restart=False, console=console)
    assert again.gsm8k == first.gsm8k, "no server was started"
    other = replace(what, questions=Gsm8k(task="tiny_ling", limit=7))
    with pytest.raises(LingError, match=r"other questions.*--restart"):
        run(other, tmp_path, restart=False, console=console)


@pytest.mark.parametrize(
    ("names", "flags", "said"),
    [
        (["head"], "--pretend lm_head=bf16", "lm_head=fp8 was asked for"),
        (["mtp"], "--accept 1", None),
        (["baseline"], """--speculative-config '{"method": "mtp"}' --step-ms 1""", None),
    ],
)
def test_a_lying_server_ends_the_ablation(
    tmp_path: Path, names: list[str], flags: str, said: str | None
) -> None:
    what = ablation(names, {names[0]: flags})
    console = Console(quiet=True)
    if said is None:
        assert isinstance(run(what, tmp_path, restart=False, console=console)[0], StageFiles)
        return
    with pytest.raises(LingError, match=said):
        run(what, tmp_path, restart=False, console=console)


def result(folder: Path, data: str, latencies: list[float | None]) -> ResultFile:
    """A result of items of ten tokens, those without a latency failed; written to `folder`, both workloads."""
    items = [
        Item(id=f"0.{number}", correct=None, error="gone")
        if latency is None
        else Item(id=f"0.{number}", correct=None, output_tokens=10, ttft_s=0.1, latency_s=latency)
        for number, latency in enumerate(latencies)
    ]
    found = make({"data_sha256": data, "workload": "gsm8k"}, items)
    for name in ("gsm8k", "random-1"):
        write_json(folder / f"{name}.json", found.model_dump())
    write_json(folder / "server.json", {"vllm": "0", "plugin": False, "choices": {}, "proofs": {}})
    return found


def test_a_request_that_failed_in_one_stage_does_not_change_the_gain(tmp_path: Path) -> None:
    """The long item failed in the second stage, which is twice as fast on the two others."""
    what = ablation(["baseline", "moe"], {})
    result(tmp_path / "baseline", "d", [1.1, 2.1, 40.1])
    result(tmp_path / "moe", "d", [0.6, 1.1, None])
    table = rows(run(what, tmp_path, restart=False, console=Console(quiet=True)), 0.05, "baseline")
    assert table[1].real_gain is not None and table[1].real_gain.total == pytest.approx(3.2 / 1.7)
    assert "moe: 2 requests failed; they are in no figure" in markdown(content(table))


def test_stages_over_different_data_are_not_compared(tmp_path: Path) -> None:
    result(tmp_path / "baseline", "one", [1.1])
    result(tmp_path / "moe", "other", [1.1])
    with pytest.raises(LingError, match=r"--data or --text was changed between the stages"):
        run(ablation(["baseline", "moe"], {}), tmp_path, restart=False, console=Console(quiet=True))


def test_synthetic_loads_only_and_stages_that_come_later(tmp_path: Path) -> None:
    """A second call with more stages measures those alone, and the page has both loads and no questions."""
    text = tmp_path / "book.txt"
    text.write_text("".join(f"{number} apples, " for number in range(400)))
    loads = [Synthetic(one, isl=24, osl=25, requests=1, repeats=2) for one in (text, None)]
    first = replace(ablation(["baseline"], {"baseline": SPEEDS["baseline"]}), questions=None, loads=loads)
    quiet = Console(quiet=True)
    run(first, tmp_path / "out", restart=False, console=quiet)
    dates = {path: path.stat().st_mtime_ns for path in (tmp_path / "out" / "baseline").iterdir()}
    two = {name: SPEEDS[name] for name in ("baseline", "mtp")}
    both = replace(ablation(["baseline", "mtp"], two), questions=None, loads=loads)
    found = run(both, tmp_path / "out", restart=False, console=quiet)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out" / "baseline").iterdir()} == dates
    table = rows(found, 0.05, "baseline")
    assert [row.real for row in table] == [None, None]
    assert [one.load for one in table[1].loads] == ["text 24/25", "random tokens 24/25"]
    gained = table[1].loads[0].gain
    assert gained is not None and gained.accept_length == pytest.approx(3, rel=0.01)
    shown = markdown(content(table))
    assert "| stage | text 24/25 tok/s (spread) | TPOT ms | TTFT ms | accept length | gain |" in shown
    assert "accuracy" not in shown and "gap" not in shown
    changed = replace(both, stages=[replace(both.stages[1], options={"moe": "ling"})])
    with pytest.raises(LingError, match="other stages"):
        run(changed, tmp_path / "out", restart=False, console=quiet)


def test_a_stage_that_fails_does_not_end_the_others_where_asked(tmp_path: Path) -> None:
    """The first stage lies: nothing can be compared with it, and the page says why."""
    flags = {"head": "--pretend lm_head=bf16", "mtp": "--accept 3 --pretend lm_head=fp8_online"}
    what = replace(ablation(["head", "mtp"], flags), questions=None)
    failures: dict[str, str] = {}
    found = run(what, tmp_path, restart=False, console=Console(quiet=True), failures=failures)
    assert [one.stage.name for one in found] == ["mtp"] and "lm_head=fp8 was asked for" in failures["head"]
    table = rows(found, 0.05, "head")
    assert table[0].loads[0].gain is None and table[0].loads[0].tok_per_s is not None
    assert "head: FAILED, so it is not in the table: stage head: ling.lm_head" in markdown(
        content(table, failures=failures, base="head")
    )


def test_results_of_a_server_that_stopped_being_its_stage_are_thrown_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fused path, say, is given up at a later batch: the record before the load knows nothing of it."""
    after = served({"lm_head": "bf16", "moe mxfp4": "torch"}, faults={"target_decode": "disagrees"})
    monkeypatch.setattr("vllm_ling.eval.ablation.run.describe", lambda url, model: after)
    what = replace(ablation(["moe"], {}), questions=None)
    with pytest.raises(LingError, match="after 1 measurements, target_decode: disagrees"):
        run(what, tmp_path, restart=False, console=Console(quiet=True))
    assert (
        not (tmp_path / "moe" / "random-1.json").exists() and not (tmp_path / "moe" / "server.json").exists()
    )


DYING = """
import os, sys
from pathlib import Path
from vllm_ling.eval.serving import mock_server
from vllm_ling.eval.serving.mock_script import Script
died, failure = Path(sys.argv.pop(1)), Script.failure
def once(script):
    found = failure(script)
    if script.requests == 6 and not died.exists():
        died.touch()
        os._exit(1)
    return found
Script.failure = once
mock_server.main()
"""


def test_a_server_that_dies_near_the_end_is_started_anew(tmp_path: Path) -> None:
    """Two items before the end: too few failures in a row for the run to stop by itself."""
    what = replace(
        ablation(["baseline"], {"baseline": "--step-ms 1"}),
        questions=Gsm8k(task="tiny_ling", limit=6, max_tokens=96, retries=0),
        command=(sys.executable, "-c", DYING, str(tmp_path / "died")),
    )
    (found,) = run(what, tmp_path, restart=False, console=Console(quiet=True))
    assert (tmp_path / "died").exists()
    assert found.gsm8k is not None
    assert (found.gsm8k.summary.items, found.gsm8k.summary.transport_errors) == (6, 0)
    assert found.gsm8k.summary.accuracy == 1.0
    answers = (tmp_path / "baseline" / "gsm8k.answers.jsonl").read_text().splitlines()
    assert len(answers) == 1 + 6 + 2, "settings, six items, and the two that had failed once more"
    logs = sorted(path.name for path in (tmp_path / "baseline").glob("server*.log"))
    assert logs == ["server-2.log", "server.log"], "the dead server's log is still there"


KILLED = """
import sys
from pathlib import Path
from rich.console import Console
from tests.unit.test_eval_ablation import ablation
from vllm_ling.eval.ablation.run import run
what = ablation(["baseline", "mtp"], {"baseline": "--step-ms 3", "mtp": "--step-ms 3"}, tag=sys.argv[1])
run(what, Path(sys.argv[1]), restart=False, console=Console(quiet=True))
"""


@pytest.mark.slow
def test_killed_twice_and_gone_on_with_the_same_result(tmp_path: Path) -> None:
    """SIGKILL in the middle of each stage: no item is asked twice, no server is left, the outcome is the same."""
    command = [sys.executable, "-c", KILLED, str(tmp_path / "killed")]
    for stage in ("baseline", "mtp"):
        journal = tmp_path / "killed" / stage / "gsm8k.json.partial"
        process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
        seen = False
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and process.poll() is None:
            if journal.exists() and len(journal.read_bytes().splitlines()) >= 4:
                seen = bool(servers_of(tmp_path / "killed"))
                break
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert seen and journal.exists(), "killed in the middle"
        assert not (journal.parent / "gsm8k.json").exists()
        left = time.monotonic() + 10
        while servers_of(tmp_path / "killed") and time.monotonic() < left:
            time.sleep(0.05)
        assert servers_of(tmp_path / "killed") == []
    what = ablation(
        ["baseline", "mtp"], {"baseline": "--step-ms 3", "mtp": "--step-ms 3"}, tag=str(tmp_path / "killed")
    )
    quiet = Console(quiet=True)
    killed = run(what, tmp_path / "killed", restart=False, console=quiet)
    whole = run(what, tmp_path / "whole", restart=False, console=quiet)
    for one, other in zip(killed, whole, strict=True):
        a, b = one.gsm8k, other.gsm8k
        assert a is not None and b is not None
        assert [(item.id, item.correct, item.output_tokens) for item in a.items] == [
            (item.id, item.correct, item.output_tokens) for item in b.items
        ]
        assert a.summary.accuracy == b.summary.accuracy
        assert a.summary.accept_length == (
            b.summary.accept_length and pytest.approx(b.summary.accept_length, rel=0.02)
        )
