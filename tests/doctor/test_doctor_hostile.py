# SPDX-License-Identifier: Apache-2.0
"""Input made to hurt: bounded memory and time, a clear finding, nothing executed, nothing echoed raw."""

import json
import os
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import pytest

from tests.doctor.evidence import CONFIG, GPU_LOG, STATIC, but
from tests.doctor.faults.common import huge_header
from vllm_ling.checkpoint.headers import INDEX
from vllm_ling.doctor.facts import log, log_lines
from vllm_ling.doctor.facts.flags import read_flags
from vllm_ling.doctor.facts.log import read_log
from vllm_ling.doctor.facts.store import Facts
from vllm_ling.doctor.registry import run_checks
from vllm_ling.doctor.text import clean


def outcomes(facts: Facts) -> dict[str, str]:
    return {finding.check: finding.outcome for finding in run_checks(facts)[0]}


def read(path: Path) -> Facts:
    facts = Facts()
    read_log(facts, path)
    return facts


def test_two_gigabytes_of_log(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    start, end = GPU_LOG.rsplit("\n", 3)[0], "\n".join(GPU_LOG.splitlines()[-2:])
    path.write_text(start + "\n")
    with path.open("r+b") as file:  # a hole: two gigabytes that take no disk
        file.truncate(2 << 30)
        file.seek(0, os.SEEK_END)
        file.write(f"\n{end}\n".encode())
    tracemalloc.start()
    started = time.monotonic()
    facts = read(path)
    took, (_, peak) = time.monotonic() - started, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert took < 10
    assert peak < 64 << 20
    assert facts["recent.accept_length"] == pytest.approx(2.68)
    assert facts["log.skipped_bytes"] > 1 << 30


def test_millions_of_ordinary_lines(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    noise = (
        '(APIServer pid=1) INFO:     127.0.0.1:55908 - "POST /v1/chat/completions HTTP/1.1" 200 OK\n'
        * 400_000
    )
    path.write_text(GPU_LOG + noise)
    started = time.monotonic()
    assert outcomes(read(path))["plugin_active"] == "ok"
    assert time.monotonic() - started < 10


def test_one_endless_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "server.log"
    path.write_text("non-default args: {" + "'a': [" * 3_000_000 + "\n" + GPU_LOG)
    started = time.monotonic()
    assert outcomes(read(path))["plugin_active"] == "ok"
    assert time.monotonic() - started < 10


@pytest.mark.parametrize(
    "piece", ["Mean acceptance length: 1, ", "SpeculativeConfig(", "Error: ", "vllm-ling: a "]
)
def test_lines_that_would_make_patterns_slow(piece: str, tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    line = "Initializing a V1 LLM engine (v0.33.0) with config: " if piece.startswith("Spec") else ""
    path.write_text(GPU_LOG + (line + piece * (60_000 // len(piece)) + "\n") * 20)
    started = time.monotonic()
    assert outcomes(read(path))["plugin_active"] == "ok"
    assert time.monotonic() - started < 10


def test_a_log_that_takes_too_long_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "_MOST_S", 0.0)
    path = tmp_path / "server.log"
    path.write_text(GPU_LOG)
    assert "not read to its end in 0 s" in read(path)["problem.log"]


@pytest.mark.parametrize(
    ("content", "problem"),
    [(b"\x7fELF\0\0\0\n" * 5000, "binary"), (b"", "empty"), (bytes(range(256)) * 4096, "binary")],
)
def test_not_a_log(content: bytes, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_bytes(content)
    facts = read(path)
    found = outcomes(facts)
    assert problem in facts["problem.log"]
    assert set(found.values()) == {"unknown"}


@pytest.mark.parametrize(
    ("said", "damaged"),
    [
        ("num_spec_tokens=3", "num_spec_tokens=" + "9" * 5000),
        ("num_spec_tokens=3", "num_spec_tokens=9999999999"),
        ("40.00x", "1.2.3x"),
        ("1,310,720 tokens", ",,, tokens"),
        ("0.780, 0.540", "0.7.80, 0.5.40"),
        ("Accepted: 336", "Accepted: " + "9" * 5000),
        ("Drafted: 600", "Drafted: " + "9" * 5000),
        ("Running: 1", "Running: " + "9" * 4500),
        ("non-default args: {", "non-default args: {'a': " + "-" * 30_000 + "1, "),
        ("non-default args: {", "non-default args: {'a': " + "[" * 30_000),
    ],
)
def test_a_damaged_line_takes_only_its_own_facts(said: str, damaged: str, tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    assert said in GPU_LOG
    path.write_text(GPU_LOG.replace(said, damaged))
    tracemalloc.start()
    found = outcomes(read(path))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 64 << 20
    assert found["plugin_active"] == "ok" and "unknown" in found.values()
    assert not {"fail", "warn"} & set(found.values())


@pytest.mark.parametrize("prefix", ["", "vllm-1  | ", "Dec 01 10:00:00 spark vllm[123]: "])
def test_colours_and_prefixes_hide_nothing(prefix: str, tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    coloured = GPU_LOG.replace(" INFO ", " \x1b[32mINFO\x1b[0m ").replace("(", "\x1b[0;36m(\x1b[0m")
    path.write_text("".join(f"{prefix}{line}\x1b[0m\r\n" for line in coloured.splitlines()))
    facts, plain = read(path), tmp_path / "plain.log"
    plain.write_text(GPU_LOG)
    assert outcomes(facts) == outcomes(read(plain))
    assert facts["record.choices"] == read(plain)["record.choices"]


def test_the_last_start_counts_wherever_it_stands(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    gap = 40 << 20
    path.write_text(GPU_LOG.replace("enforce_eager=False", "enforce_eager=True"))
    for text in (GPU_LOG, "later\n"):
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size + gap)
            file.seek(0, os.SEEK_END)
            file.write(b"\n" + text.encode())
    facts = read(path)
    assert facts["engine.enforce_eager"] is False and outcomes(facts)["graphs_on"] == "ok"
    assert facts["serve.k"] == 3


def test_a_start_beyond_the_search_is_not_guessed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_lines, "SEARCH", 8 << 20)
    path = tmp_path / "server.log"
    path.write_text(GPU_LOG)
    with path.open("r+b") as file:
        file.truncate(48 << 20)
        file.seek(0, os.SEEK_END)
        file.write(b"\nlater\n" * 100)
    facts = read(path)
    assert "no start of a vLLM server" in facts["problem.log"]
    assert "plugin.state" not in facts


def test_a_folder_or_nothing_as_a_log(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent", Path("/dev/zero")):
        assert "cannot be read" in read(path)["problem.log"]


def test_arguments_in_a_log_are_data(tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    path = tmp_path / "server.log"
    path.write_text(
        f"INFO non-default args: {{'model': __import__('os').mkdir({str(mark)!r})}}\n"
        + GPU_LOG.split("\n", 1)[1]
    )
    facts = read(path)
    assert not mark.exists()
    assert "serve.enforce_eager" not in facts
    assert facts["serve.k"] == 3


def test_terminal_escapes_are_never_shown(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    evil = "\x1b]0;owned\x07\x1b[2J\u202efaked\u009b31m"
    path.write_text(
        GPU_LOG.replace(
            "PROOF ok: draft_head: the draft's", f"FAULT draft_head_{evil}not_shared: {evil}"
        ).replace("PROOF ok: head_probe: top-1", f"FAULT head_probe: {evil} top-1")
    )
    for more in ((), ("--all",), ("--json",)):
        result = subprocess.run(
            [sys.executable, "-m", "vllm_ling.cli", "doctor", "--log", str(path), *more],
            capture_output=True,
            timeout=60,
        )
        shown = result.stdout.decode()
        assert result.returncode == 2
        assert "owned" in shown
        assert not set(shown) & set("\x1b\x07\x9b\u202e")


def test_a_log_of_an_unknown_version_gives_no_verdicts(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_text(GPU_LOG.replace("(v0.33.0)", "(v9.9.9)"))
    assert set(outcomes(read(path)).values()) <= {"unknown", "ok"}
    assert outcomes(read(path))["plugin_active"] == "unknown"


def test_a_header_of_two_to_the_63(tmp_path: Path) -> None:
    tracemalloc.start()
    found = outcomes(but(STATIC, files=huge_header).facts(tmp_path))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 64 << 20
    assert found["checkpoint_complete"] == "fail"
    assert found["exclusions_match"] == found["sources_readable"] == "unknown"


@pytest.mark.parametrize(
    "text", ["{", "[]", '"x"', "null", "[" * 100_000, "\xff\xfe", '{"architectures": 3}']
)
def test_damaged_config(text: str, tmp_path: Path) -> None:
    found = outcomes(but(STATIC, files=lambda f: (f / "config.json").write_text(text)).facts(tmp_path))
    assert found["checkpoint_complete"] in ("fail", "unknown")
    assert found["clamp_lists"] == "unknown"


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "*.safetensors", INDEX])
def test_a_pipe_in_place_of_a_file_is_not_waited_for(name: str, tmp_path: Path) -> None:
    def pipe(folder: Path) -> None:
        place = next(folder.glob(name), folder / name)
        place.unlink(missing_ok=True)
        os.mkfifo(place)

    found = outcomes(but(STATIC, files=pipe).facts(tmp_path))
    assert "unknown" in found.values() or "fail" in found.values()


def test_an_index_of_gigabytes_is_not_read(tmp_path: Path) -> None:
    def huge(folder: Path) -> None:
        with (folder / INDEX).open("wb") as file:
            file.truncate(4 << 30)

    assert outcomes(but(STATIC, files=huge).facts(tmp_path))["checkpoint_complete"] == "fail"


@pytest.mark.parametrize(
    "key", ["num_hidden_layers", "num_experts", "vocab_size", "num_nextn_predict_layers", "hidden_size"]
)
@pytest.mark.parametrize("value", [10**9, -1, 10**400, 1.5, "x", None, [1]])
def test_absurd_numbers_in_the_config(key: str, value: object, tmp_path: Path) -> None:
    text = json.dumps({**CONFIG, key: value})
    started = time.monotonic()
    found = outcomes(but(STATIC, files=lambda f: (f / "config.json").write_text(text)).facts(tmp_path))
    assert found["checkpoint_complete"] in ("fail", "unknown")
    assert time.monotonic() - started < 5


@pytest.mark.parametrize(
    "words",
    [
        ["--speculative-config", "{bad"],
        ["--speculative-config", '{"num_speculative_tokens": "x"}'],
        ["--max-num-seqs"],
        ["--additional-config", "[1]"],
        ["--a.b", "1", "--a", "2", "--a.b.c", "3"],
        ["--", "-"],
        ["--gpu-memory-utilization", "?"],
    ],
)
def test_damaged_flags(words: list[str], tmp_path: Path) -> None:
    read_flags(words)
    facts = but(STATIC, words=tuple(words)).facts(tmp_path)
    assert outcomes(facts)["checkpoint_complete"] == "ok"


def test_shown_text_is_one_bounded_line() -> None:
    assert clean("a\n\x1b[31mb\t" + "c" * 10_000).startswith("a ?[31mb c")
    assert len(clean("c" * 10_000)) == 300
    assert json.loads(json.dumps(clean("\ud800"))) == "?"
    assert log_lines.HEAD + log_lines.TAIL <= 64 << 20
