# SPDX-License-Identifier: Apache-2.0
"""Kernels compile for every target without a GPU, within its limits, and the cache gives back what was built."""

import dataclasses
import os
import threading
from pathlib import Path

import pytest

from vllm_ling.quant import decode_moe, fp8_gemv, jit
from vllm_ling.quant.decode_moe import MoEShape
from vllm_ling.quant.fp8_gemv import GemvShape
from vllm_ling.quant.jit import Gpu
from vllm_ling.quant.tune import GPUS as CARDS

GPUS = {name: CARDS[name] for name in ("h200", "gb10", "rtx-pro-6000")}  # an H100's kernels are the H200's
FLASH = MoEShape(hidden=2560, intermediate=768, experts=512, top_k=8, groups=8, top_groups=4)
TINY = MoEShape(hidden=256, intermediate=128, experts=32, top_k=4, groups=4, top_groups=2)
GEMV: dict[str, int | str] = {
    "K": 256,
    "TOKENS": 1,
    "GRID": 132,
    "WARPS": 8,
    "KSPLIT": 1,
    "STAGES": 2,
    "ROW_SCALES": 1,
    "ARGMAX": 0,
    "PROLOGUE": 0,
    "SECOND": 1 << 30,
    "THIRD": 1 << 30,
    "USE_PDL": 1,
    "SHARED_BYTES": 48 * 1024,
    "EXCHANGE_BYTES": 128 + 16 * 132,
}


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("shape", [FLASH, TINY], ids=["flash", "tiny"])
def test_moe_compiles_within_the_limits(gpu: Gpu, shape: MoEShape, tokens: int) -> None:
    """The kernel asserts at compile time that the planned buffers are large enough; 4 tokens (k = 3) fit every card."""
    plan = decode_moe.plan(shape, tokens, gpu)
    assert plan is not None and plan.shared_bytes <= gpu.shared_bytes
    binary = jit.compile_source("moe_block.cu", decode_moe.defines(shape, plan, pdl=True), gpu.arch)
    assert binary[:4] == b"\x7fELF"


def test_moe_refuses_a_gpu_without_room() -> None:
    assert decode_moe.plan(FLASH, 8, GPUS["gb10"]) is None
    assert decode_moe.plan(FLASH, 8, GPUS["h200"]) is not None


@pytest.mark.parametrize("name", ["scratch_bytes", "shared_bytes"])
def test_buffers_too_small_do_not_compile(name: str) -> None:
    plan = decode_moe.plan(TINY, 1, GPUS["h200"])
    assert plan is not None
    short = dataclasses.replace(plan, **{name: getattr(plan, name) - 512})
    with pytest.raises(jit.CompileError, match=r"decode_moe\.py"):
        jit.compile_source("moe_block.cu", decode_moe.defines(TINY, short, pdl=False), "sm_90a")


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
@pytest.mark.parametrize(
    "shape",
    [GemvShape(20480, 2560, False), GemvShape(157184, 2560, True, argmax=True), GemvShape(2560, 4096, False)],
    ids=["block scales", "argmax", "split k"],
)
def test_gemv_compiles_within_the_limits(gpu: Gpu, shape: GemvShape) -> None:
    plan = fp8_gemv.plan(shape, 4, gpu)
    assert plan is not None and plan.shared_bytes <= gpu.shared_bytes
    binary = jit.compile_source("fp8_gemv.cu", fp8_gemv.defines(shape, plan, pdl=True), gpu.arch)
    assert binary[:4] == b"\x7fELF"


@pytest.mark.parametrize(
    ("shape", "most"), [(GemvShape(157184, 2560, True), 1.02), (GemvShape(20480, 2560, False), 1.05)]
)
def test_gemv_plan_balances_the_sms(shape: GemvShape, most: float) -> None:
    """The busiest SM reads at most a few percent more than the average one."""
    plan = fp8_gemv.plan(shape, 1, GPUS["h200"])
    assert plan is not None
    tiles, blocks = -(-shape.rows // 16), shape.k // 128
    rounds = -(-tiles // (plan.ctas * (plan.warps // plan.ksplit)))
    busiest = rounds * plan.warps * -(-blocks // plan.ksplit)
    assert busiest <= most * tiles * blocks / plan.ctas


def test_compiler_errors_carry_the_log() -> None:
    with pytest.raises(jit.CompileError, match=r"fp8_gemv\.cu.*K"):
        jit.compile_source("fp8_gemv.cu", {}, "sm_90a")


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"hidden": 2600}, "hidden size 2600"),
        ({"intermediate": 100}, "intermediate size 100"),
        ({"experts": 100}, "100 experts"),
        ({"groups": 3}, "3 groups of 512 experts"),
        ({"top_k": 16}, "top-16 routing"),
        ({"experts": 64, "groups": 32, "top_groups": 3}, "top-8 routing of 3 groups of 2 experts"),
    ],
)
def test_unsupported_shapes_have_a_reason(change: dict[str, int], word: str) -> None:
    assert decode_moe.unsupported(FLASH) is None and decode_moe.unsupported(TINY) is None
    reason = decode_moe.unsupported(dataclasses.replace(FLASH, **change))
    assert reason is not None and word in reason


def test_second_build_comes_from_the_cache(tmp_path: Path) -> None:
    first, second = (jit.build("fp8_gemv.cu", GEMV, "sm_90a", tmp_path) for _ in range(2))
    assert (first.origin, second.origin) == ("compiled", "cache") and first.cubin == second.cubin
    other = jit.build("fp8_gemv.cu", GEMV | {"WARPS": 4}, "sm_90a", tmp_path)
    assert other.origin == "compiled" and other.cubin != first.cubin
    assert len(list(tmp_path.iterdir())) == 2, "temporary files are left over"


@pytest.mark.parametrize("damage", ["empty", "truncated", "flipped", "foreign key"])
def test_damaged_entry_is_rebuilt(tmp_path: Path, damage: str) -> None:
    good = jit.build("fp8_gemv.cu", GEMV, "sm_90a", tmp_path)
    (entry,) = tmp_path.iterdir()
    data = entry.read_bytes()
    entry.write_bytes(
        {
            "empty": b"",
            "truncated": data[:-100],
            "flipped": data[:-1] + bytes([data[-1] ^ 1]),
            "foreign key": data.replace(b'"key": "', b'"key": "0', 1),
        }[damage]
    )
    again = jit.build("fp8_gemv.cu", GEMV, "sm_90a", tmp_path)
    assert again.origin == "compiled" and again.cubin == good.cubin
    assert jit.build("fp8_gemv.cu", GEMV, "sm_90a", tmp_path).origin == "cache"


def test_unwritable_cache_is_done_without(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    built = jit.build("fp8_gemv.cu", GEMV, "sm_90a", blocked / "cache")
    assert built.cubin and built.origin.startswith("compiled (cache: ")


def test_two_builders_at_once(tmp_path: Path) -> None:
    results: list[jit.Built] = []
    threads = [
        threading.Thread(target=lambda: results.append(jit.build("fp8_gemv.cu", GEMV, "sm_90a", tmp_path)))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 2 and results[0].cubin == results[1].cubin
    assert [path for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VLLM_LING_CACHE_DIR", str(tmp_path))
    assert jit.default_cache() == tmp_path / f"v{jit.CACHE_VERSION}"
    monkeypatch.delenv("VLLM_LING_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", os.fspath(tmp_path))
    assert jit.default_cache().is_relative_to(tmp_path)
