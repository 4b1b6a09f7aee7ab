# SPDX-License-Identifier: Apache-2.0
"""The fused path's kernels compile for every target without a GPU, within its limits; what they refuse has a reason."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from vllm_ling.decode import kda_step, mla_attention, mla_prepare
from vllm_ling.decode.kda_step import KdaShape, KdaStep
from vllm_ling.decode.mla_prepare import MlaPrepare, MlaShape
from vllm_ling.decode.shapes import fused_shapes
from vllm_ling.quant import fp8_gemv, jit
from vllm_ling.quant.fp8_gemv import GemvShape
from vllm_ling.quant.jit import Gpu
from vllm_ling.quant.tune import GPUS as CARDS
from vllm_ling.roofline.models import model_shape

GPUS = {name: CARDS[name] for name in ("h200", "gb10", "rtx-pro-6000")}  # an H100's kernels are the H200's
FLASH = fused_shapes(model_shape("flash"))
PROLOGUES = {f"{s.prologue} {s.rows}": s for s in FLASH.gemv if s.prologue != "none"}
ELF = b"\x7fELF"


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
@pytest.mark.parametrize("tokens", [1, 4])
def test_kda_step_compiles(gpu: Gpu, tokens: int) -> None:
    """Its shared memory is static: ptxas refuses more than 48 KB."""
    plan = kda_step.plan(FLASH.kda, tokens, gpu)
    assert plan is not None and plan.tokens == tokens
    assert jit.compile_source("kda_step.cu", kda_step.defines(FLASH.kda, plan, True), gpu.arch)[:4] == ELF


def test_the_unbounded_gate_is_another_kernel() -> None:
    plan = kda_step.plan(FLASH.kda, 1, GPUS["h200"])
    assert plan is not None
    safe, free = (
        jit.compile_source("kda_step.cu", kda_step.defines(KdaShape(32, 2560, gate), plan, True), "sm_90a")
        for gate in (True, False)
    )
    assert safe != free


def test_kda_step_needs_clusters() -> None:
    assert kda_step.plan(FLASH.kda, 1, Gpu("sm_89a", 128, 99 * 1024)) is None
    assert kda_step.plan(FLASH.kda, 1, Gpu("sm_100a", 148, 227 * 1024)) is not None


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
def test_mla_prepare_compiles(gpu: Gpu) -> None:
    """One kernel for any number of tokens."""
    assert mla_prepare.unsupported(FLASH.mla) is None
    assert jit.compile_source("mla_prepare.cu", mla_prepare.defines(FLASH.mla, True), gpu.arch)[:4] == ELF


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
@pytest.mark.parametrize("heads", [8, 32])
def test_mla_attention_compiles_within_the_limits(gpu: Gpu, heads: int) -> None:
    """The kernels assert at compile time that the planned shared memory is large enough."""
    shape = dataclasses.replace(FLASH.mla, heads=heads)
    found = list(mla_attention.jobs(shape, gpu))
    assert len({str(constants) for _, _, constants in found}) == 1 + 2 * 2 * 4
    for label, source, constants in found:
        assert constants is not None and int(constants["SHARED_BYTES"]) <= gpu.shared_bytes, label
        assert jit.compile_source(source, constants, gpu.arch)[:4] == ELF


def test_mla_attention_asserts_its_sizes() -> None:
    whole = mla_attention.attend_plan(FLASH.mla, GPUS["h200"])
    plan = mla_attention.plan(FLASH.mla, 4, GPUS["h200"])
    assert whole is not None and plan is not None and whole.stages == 4
    short = dataclasses.replace(whole, shared_bytes=whole.shared_bytes - 256)
    with pytest.raises(jit.CompileError, match=r"mla_attention\.py"):
        jit.compile_source(
            "mla_attend.cu", mla_attention.defines(FLASH.mla, "mla_attend.cu", True, short, True), "sm_90a"
        )
    short_plan = dataclasses.replace(plan, absorb_bytes=40_000, merge_bytes=40_000)
    for source in ("mla_absorb.cu", "mla_merge.cu"):
        with pytest.raises(jit.CompileError, match=r"mla_attention\.py"):
            constants = mla_attention.defines(FLASH.mla, source, True, short_plan, True)
            jit.compile_source(source, constants, "sm_90a")


def test_mla_attention_refuses_what_it_cannot_serve() -> None:
    h200 = GPUS["h200"]
    assert "40 heads" in (mla_attention.unsupported(dataclasses.replace(FLASH.mla, heads=40)) or "")
    assert mla_attention.plan(FLASH.mla, 1, Gpu("sm_89a", 128, 99 * 1024)) is None, "no clusters"
    assert mla_attention.attend_plan(FLASH.mla, Gpu("sm_90a", 132, 64 * 1024)) is None
    plans = [mla_attention.plan(FLASH.mla, tokens, h200) for tokens in mla_attention.TOKEN_COUNTS]
    assert [p and p.splits for p in plans] == [132, 66, 33, 16]


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("shape", PROLOGUES.values(), ids=PROLOGUES)
def test_gemv_prologues_compile_within_the_limits(gpu: Gpu, shape: GemvShape, tokens: int) -> None:
    """The kernel asserts at compile time that the planned shared memory is large enough."""
    plan = fp8_gemv.plan(shape, tokens, gpu)
    assert plan is not None and plan.shared_bytes <= gpu.shared_bytes
    assert jit.compile_source("fp8_gemv.cu", fp8_gemv.defines(shape, plan, True), gpu.arch)[:4] == ELF


def test_the_norm_needs_room_for_its_sums() -> None:
    """Planned as if there were no norm, the buffers are too small."""
    shape = GemvShape(20480, 2560, False, prologue="norm")
    plan = fp8_gemv.plan(shape, 4, GPUS["h200"])
    assert plan is not None
    short = dataclasses.replace(plan, shared_bytes=plan.shared_bytes - 4 * 4 * 2560 // 128)
    with pytest.raises(jit.CompileError, match=r"fp8_gemv\.py"):
        jit.compile_source("fp8_gemv.cu", fp8_gemv.defines(shape, short, True), "sm_90a")


def test_a_card_without_room_for_eight_rows_of_the_dense_mlp_keeps_four() -> None:
    shape = GemvShape(2560, 6144, False, prologue="swiglu")
    assert fp8_gemv.plan(shape, 8, GPUS["gb10"]) is None
    assert fp8_gemv.plan(shape, 4, GPUS["gb10"]) is not None


def test_parts_begin_at_tiles() -> None:
    plan = fp8_gemv.plan(FLASH.gemv[0], 1, GPUS["h200"])
    assert plan is not None
    found = fp8_gemv.defines(FLASH.gemv[0], plan, True)
    assert (found["SECOND"], found["THIRD"], found["PROLOGUE"]) == (768, 1024, 1)


@pytest.mark.parametrize(
    "parts",
    [(128, 120), (128, 64), (64, 64, 64, 64), (248, 8), (256, 16)],
    ids=["no tiles", "wrong sum", "four", "half a tile", "too many rows"],
)
def test_unsuitable_parts_have_a_reason(parts: tuple[int, ...]) -> None:
    shape = GemvShape(256, 256, False, parts=parts)
    assert "up to three multiples of 16 with the sum 256" in (fp8_gemv.unsupported(shape) or "")
    assert fp8_gemv.unsupported(dataclasses.replace(shape, parts=(128, 64, 64))) is None


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"rope": 32}, "rotary dimension 32"),
        ({"nope": 96}, "query dimension 96"),
        ({"latent": 448}, "latent dimension 448"),
        ({"heads": 30}, "30 heads"),
        ({"hidden": 2688}, "hidden size 2688"),
    ],
)
def test_unsupported_mla_has_a_reason_and_does_not_compile(
    change: dict[str, Any], word: str, tmp_path: Path
) -> None:
    shape = dataclasses.replace(FLASH.mla, **change)
    with pytest.raises(ValueError, match=word):
        MlaPrepare(shape, GPUS["h200"], tmp_path)
    assert not list(tmp_path.iterdir())
    with pytest.raises(jit.CompileError, match=r"mla_prepare\.py: shape"):
        jit.compile_source("mla_prepare.cu", mla_prepare.defines(shape, True), "sm_90a")


def test_projected_rows_are_queries_then_latent_and_key() -> None:
    assert MlaShape(4, 256, nope=64, rope=64, latent=128).projected == (512, 192)


def test_unsupported_kda_has_a_reason(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="hidden size 641 is odd"):
        KdaStep(KdaShape(4, 641), GPUS["h200"], tmp_path)
    with pytest.raises(ValueError, match="too few"):
        KdaStep(KdaShape(4, 640), Gpu("sm_89a", 128, 99 * 1024), tmp_path)
    assert not list(tmp_path.iterdir())
