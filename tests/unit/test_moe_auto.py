# SPDX-License-Identifier: Apache-2.0
"""What ling.moe=auto makes of measured times: the choice, backends left out, time limits, and the verdict on disk."""

import errno
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from vllm_ling.errors import LingError
from vllm_ling.quant import moe_auto
from vllm_ling.quant.moe_auto import (
    BUDGET_S,
    CANDIDATES,
    MEASURED,
    NEVER,
    WARM_UP_S,
    WEIGHTS,
    AutoFacts,
    Clock,
    LeftOut,
    Row,
    Verdict,
    decide,
    load,
    not_measured,
    store,
    survey,
    table,
    verdict_key,
)
from vllm_ling.quant.moe_policy import MoEFacts, measures

H200 = {
    "humming": {1: 70.0, 4: 95.0},
    "ling": {1: 20.9, 4: 44.0},
    "marlin": {1: 68.0, 4: 120.0},
}


def run(times: Mapping[str, Mapping[int, float]]) -> Callable[[str], Mapping[int, float]]:
    def timed(backend: str) -> Mapping[int, float]:
        if backend not in times:
            raise LeftOut("kernel does not support silu activation")
        return times[backend]

    return timed


def verdict(times: Mapping[str, Mapping[int, float]], **facts: object) -> Verdict:
    return survey(run(times), AutoFacts(**facts), Clock())  # type: ignore[arg-type]


def reasons(found: Verdict) -> dict[str, str]:
    return {row.backend: row.reason for row in found.rows if not row.us}


@pytest.mark.parametrize(
    ("times", "backend", "decodes"),
    [
        (H200, "humming", True),
        (H200 | {"ling": {1: 90.0, 4: 99.0}}, "humming", False),
        # 78 + 0.4 x 60 = 102 beats 70 + 0.4 x 95 = 108 although a single token is slower.
        ({"humming": {1: 70.0, 4: 95.0}, "marlin": {1: 78.0, 4: 60.0}}, "marlin", False),
        ({"b12x": {1: 1.0, 4: 1.0}, **H200}, "b12x", False),
        ({"humming": {1: 70.0, 4: 95.0}}, "humming", False),
    ],
)
def test_the_smallest_weighted_sum_is_taken(
    times: Mapping[str, Mapping[int, float]], backend: str, decodes: bool
) -> None:
    chosen, ours, reason = decide(verdict(times), fallback="auto: vLLM's own choice")
    assert (chosen, ours) == (backend, decodes)
    assert reason.startswith(f"{MEASURED} {'ling' if decodes else backend} fastest")
    for name, us in times.items():
        assert f"{name} {us[1]:.1f}/{us[4]:.1f}" in reason


def test_weights_cover_decode_and_verification() -> None:
    assert set(WEIGHTS) == {1, 4}


def test_every_backend_is_in_the_table_with_figures_or_a_reason() -> None:
    found = replace(verdict(H200), layers=3)
    lines = "\n".join(table(found))
    for name in (*CANDIDATES, *NEVER):
        assert f"moe auto: {name}" in lines
    assert "ling: 20.9 us at 1, 44.0 us at 4, weighted 38.5" in lines
    assert "triton left out: kernel does not support silu activation" in lines
    assert "rotating over 3 layers" in lines


def test_a_candidate_that_fails_is_left_out_with_its_reason() -> None:
    def broken(backend: str) -> Mapping[int, float]:
        if backend == "humming":
            raise RuntimeError("no kernel image\n  is available")
        if backend == "ling":
            raise LingError("cannot apply the clamp")
        if backend == "marlin":
            raise KeyError
        return {1: 5.0}  # a time is missing

    found = survey(broken, AutoFacts(), Clock())
    assert found.best is None and found.lasting
    said = reasons(found)
    assert said["humming"] == "RuntimeError (no kernel image is available)"
    assert said["ling"] == "cannot apply the clamp", (
        "a log reader takes 'LingError: ...' for the server's own"
    )
    assert said["marlin"] == "KeyError"
    assert said["triton"].startswith("KeyError")
    choice, decodes, reason = decide(found, fallback="auto: vLLM's own choice")
    assert (choice, decodes) == ("stock", False)
    assert reason.startswith("auto: vLLM's own choice; nothing could be measured: humming: RuntimeError")


def test_an_unsupported_shape_leaves_only_our_kernel_out() -> None:
    found = verdict(H200, ling_problem="16 experts: not a multiple of 32 up to 1024")
    assert reasons(found)["ling"].startswith("16 experts")
    assert decide(found, "")[:2] == ("humming", False)
    assert found.lasting, "the shape will be the same at the next start"


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (AutoFacts(ranks=2), ("2 parallel ranks", "ling is left out")),
        (AutoFacts(sleep_mode=True), ("--enable-sleep-mode",)),
        (AutoFacts(activations="VLLM_MARLIN_INPUT_DTYPE"), ("VLLM_MARLIN_INPUT_DTYPE",)),
    ],
)
def test_where_nothing_is_measured_the_reason_says_so(facts: AutoFacts, words: tuple[str, ...]) -> None:
    note = not_measured(facts)
    choice, decodes, reason = decide(Verdict((), note=note), fallback="auto: vLLM's own choice")
    assert (choice, decodes) == ("stock", False)
    assert all(word in reason for word in words) and reason.startswith("auto: vLLM's own choice; ")
    assert not_measured(AutoFacts()) == ""


@pytest.mark.parametrize(
    ("option", "facts", "expected"),
    [
        ("auto", MoEFacts("mxfp4", "cuda", False, "auto"), True),
        ("auto", MoEFacts("mxfp4", "cuda", True, "auto"), True),
        ("auto", MoEFacts("mxfp4", "cuda", False, "marlin"), False),
        ("auto", MoEFacts("mxfp4", "cpu", False, "auto"), False),
        ("auto", MoEFacts("mxfp4", "other", False, "auto"), False),
        ("auto", MoEFacts("fp8", "cuda", False, "auto"), False),
        ("auto", MoEFacts("int4", "cuda", False, "auto"), False),
        ("ling", MoEFacts("mxfp4", "cuda", False, "auto"), False),
        ("stock", MoEFacts("mxfp4", "cuda", False, "auto"), False),
        ("humming", MoEFacts("mxfp4", "cuda", False, "auto"), False),
        ("reference", MoEFacts("mxfp4", "cuda", False, "auto"), False),
    ],
)
def test_only_auto_without_a_backend_measures(option: str, facts: MoEFacts, expected: bool) -> None:
    assert measures(option, facts) is expected


class Time:
    """A clock that candidates move."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("warming", [False, True])
def test_nothing_is_started_after_the_time_is_spent(warming: bool) -> None:
    now = Time()
    clock, started = Clock(now), list[str]()

    def slow(backend: str) -> Mapping[int, float]:
        started.append(backend)
        if warming:
            with clock.warm_up():
                now.now += WARM_UP_S / 2
        else:
            now.now += BUDGET_S / 2
        return H200.get(backend, {1: 99.0, 4: 99.0})

    found = survey(slow, AutoFacts(), clock)
    assert started == list(CANDIDATES[:2])
    limit = WARM_UP_S if warming else BUDGET_S
    assert all(f"not started: the {limit:g} s" in reasons(found)[name] for name in CANDIDATES[2:])
    assert found.best is not None and found.best.backend == "ling"
    assert not found.lasting, "the next start may have the time"
    assert (found.seconds, found.warming) == ((0.0, WARM_UP_S) if warming else (BUDGET_S, 0.0))


def test_compilation_does_not_use_up_the_budget() -> None:
    now = Time()
    clock = Clock(now)
    with pytest.raises(LeftOut), clock.warm_up():
        now.now += 50
        raise LeftOut("")
    now.now += 1
    assert (clock.spent, clock.warming, clock.over) == (1.0, 50.0, "")


@pytest.mark.parametrize(
    "error", [LeftOut("too little memory", lasting=False), type("OutOfMemoryError", (RuntimeError,), {})()]
)
def test_want_of_memory_is_not_kept(error: Exception, tmp_path: Path) -> None:
    def crowded(backend: str) -> Mapping[int, float]:
        if backend == "marlin":
            raise error
        return H200["humming"]

    found = store(tmp_path, "key", survey(crowded, AutoFacts(), Clock()))
    assert not found.lasting and "not kept" in found.origin
    assert load(tmp_path, "key") is None and not list(tmp_path.iterdir())


def test_the_cache_gives_back_what_was_measured(tmp_path: Path) -> None:
    key = verdict_key({"gpu": "NVIDIA H200"})
    found = store(tmp_path / "new", key, verdict(H200))
    again = load(tmp_path / "new", key)
    assert found.origin == "measured" and again is not None
    assert again == replace(found, origin="cache")
    assert decide(again, "") == decide(found, "")


@pytest.mark.parametrize(
    "changed",
    [{"gpu": "NVIDIA GB10"}, {"versions": ["0.33.1"]}, {"kernels": ["other"]}, {"shape": {"hidden": 2048}}],
)
def test_other_facts_are_another_key(changed: dict[str, object], tmp_path: Path) -> None:
    facts = {"gpu": "NVIDIA H200", "versions": ["0.33.0"], "kernels": ["k"], "shape": {"hidden": 2560}}
    store(tmp_path, verdict_key(facts), verdict(H200))
    assert load(tmp_path, verdict_key(facts | changed)) is None
    assert load(tmp_path, verdict_key(dict(reversed(facts.items())))) is not None, "order does not matter"


def test_other_weights_are_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    key = verdict_key({})
    monkeypatch.setattr(moe_auto, "WEIGHTS", {1: 1.0, 4: 1.0})
    assert verdict_key({}) != key


def test_a_file_of_another_key_is_not_believed(tmp_path: Path) -> None:
    store(tmp_path, "a" * 64, verdict(H200))
    assert load(tmp_path, "a" * 20 + "b" * 44) is None, "the file's name holds 20 digits only"


@pytest.mark.parametrize("damage", ["cut", "byte", "empty", "content", "folder"])
def test_a_damaged_entry_is_measured_again(damage: str, tmp_path: Path) -> None:
    key = "c" * 64
    store(tmp_path, key, verdict(H200))
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    if damage == "folder":
        path.unlink()
        path.mkdir()
    elif damage == "content":  # well-formed, but not a verdict
        path.unlink()
        assert moe_auto.write_entry(path, key, b'{"rows": [{"backend": "ling"}]}') is None
    else:
        flipped = whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:]
        path.write_bytes({"cut": whole[:-5], "byte": flipped, "empty": b""}[damage])
    assert load(tmp_path, key) is None


def test_a_verdict_without_figures_is_not_believed(tmp_path: Path) -> None:
    for content in (
        b'{"rows": []}',
        b'{"rows": [{"backend": "ling", "us": {"1": 0, "4": 0}, "reason": ""}]}',
        b"[]",
    ):
        path = tmp_path / f"moe-auto-{'d' * 20}.json"
        moe_auto.write_entry(path, "d" * 64, content)
        assert load(tmp_path, "d" * 64) is None


def test_a_read_only_cache_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:  # tests may run as root, whom the file system lets write
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr("tempfile.mkstemp", refuse)
    found = store(tmp_path, "key", verdict(H200))
    assert found.best == Row("ling", {1: 20.9, 4: 44.0}) and "Permission denied" in found.origin


def test_a_cache_that_is_a_file_is_done_without(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "cache: " in store(tmp_path / "file" / "v1", "key", verdict(H200)).origin
