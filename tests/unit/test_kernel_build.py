# SPDX-License-Identifier: Apache-2.0
"""Kernels compile for every target without a GPU, within its limits, and the cache gives back what was built."""

import os
import threading
from pathlib import Path

import pytest

from vllm_ling.quant import jit
from vllm_ling.quant.decode_moe import MoEShape, defines, gate_up_shared_bytes, unsupported

FLASH = MoEShape(hidden=2560, intermediate=768, experts=512, top_k=8, groups=8, top_groups=4)
TINY = MoEShape(hidden=256, intermediate=128, experts=32, top_k=4, groups=4, top_groups=2)
GEMV: dict[str, int | str] = {"K": 256, "TOKENS": 1, "WARPS": 8, "ROW_SCALES": 1, "ARGMAX": 0, "USE_PDL": 1}


@pytest.mark.parametrize("arch", ["sm_90a", "sm_120a", "sm_121a"])
@pytest.mark.parametrize("shape", [FLASH, TINY], ids=["flash", "tiny"])
def test_moe_compiles(arch: str, shape: MoEShape) -> None:
    for source in ("moe_decode.cu", "router.cu"):
        assert jit.compile_source(source, defines(shape, 8, pdl=True), arch)[:4] == b"\x7fELF"
    # GB10 and RTX PRO 6000 give a block 99 KB of shared memory, Hopper 227 KB.
    assert gate_up_shared_bytes(shape, 8) <= 99 * 1024


@pytest.mark.parametrize("arch", ["sm_90a", "sm_120a", "sm_121a"])
@pytest.mark.parametrize("variant", [{"ROW_SCALES": 0}, {"ARGMAX": 1}], ids=["block scales", "argmax"])
def test_gemv_compiles(arch: str, variant: dict[str, int]) -> None:
    assert (
        jit.compile_source("fp8_gemv.cu", GEMV | {"K": 2560, "TOKENS": 8} | variant, arch)[:4] == b"\x7fELF"
    )


def test_compiler_errors_carry_the_log() -> None:
    with pytest.raises(jit.CompileError, match=r"fp8_gemv\.cu.*K"):
        jit.compile_source("fp8_gemv.cu", {}, "sm_90a")


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"hidden": 2600}, "hidden size 2600"),
        ({"intermediate": 100}, "intermediate size 100"),
        ({"experts": 100}, "100 experts"),
        ({"groups": 3}, "3 expert groups"),
    ],
)
def test_unsupported_shapes_have_a_reason(change: dict[str, int], word: str) -> None:
    assert unsupported(FLASH) is None and unsupported(TINY) is None
    reason = unsupported(MoEShape(**{**FLASH.__dict__, **change}))
    assert reason is not None and word in reason


def test_second_build_comes_from_the_cache(tmp_path: Path) -> None:
    first, second = (jit.build("fp8_gemv.cu", GEMV, "sm_90a", tmp_path) for _ in range(2))
    assert (first.origin, second.origin) == ("compiled", "cache") and first.cubin == second.cubin
    other = jit.build("fp8_gemv.cu", GEMV | {"TOKENS": 2}, "sm_90a", tmp_path)
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
