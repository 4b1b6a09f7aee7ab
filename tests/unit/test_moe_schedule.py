# SPDX-License-Identifier: Apache-2.0
"""Every part of a sum that a CTA of the MoE kernel waits for is stored by exactly one CTA, or a launch would never end.

The kernel's own formulas, for every number of distinct experts: the compiler works them out, so no GPU is needed.
"""

import dataclasses
import shutil
from pathlib import Path

import pytest

from vllm_ling.quant import decode_moe, jit
from vllm_ling.quant.decode_moe import MoEShape
from vllm_ling.quant.jit import Gpu
from vllm_ling.quant.tune import GPUS as CARDS

GPUS = {name: CARDS[name] for name in ("h200", "gb10", "rtx-pro-6000")} | {
    "30 SMs": Gpu("sm_90a", 30, 227 * 1024)
}
SHAPES = {
    "flash": MoEShape(hidden=2560, intermediate=768, experts=512, top_k=8, groups=8, top_groups=4),
    "flash tp2": MoEShape(hidden=2560, intermediate=384, experts=512, top_k=8, groups=8, top_groups=4),
    "tiny": MoEShape(hidden=256, intermediate=128, experts=32, top_k=4, groups=4, top_groups=2),
    "odd": MoEShape(hidden=640, intermediate=384, experts=96, top_k=6, groups=3, top_groups=2),
    "wide shared": MoEShape(
        hidden=1024, intermediate=256, experts=64, top_k=15, groups=1, top_groups=1, shared_intermediate=512
    ),
}

# `silent`: a CTA that stores nothing, or -1. Loops of writers are as in moe_block.cu and moe_shared.cuh.
CHECK = r"""
#include "moe_work.cuh"
#include "moe_shared.cuh"
__device__ constexpr bool routed(int unique, int silent) {
  Split split(unique);
  Work any(unique, unique, split, 0);
  int stored = 0, waited = 0, up = 0, down = 0;
  for (int cta = 0; cta < GRID; cta++) {
    Work work(unique, unique, split, cta);
    if (work.up != up || work.down != down) return false;  // neither twice nor never
    up = work.up_end, down = work.down_end;
    if (cta == silent) continue;
    for (int unit = work.up / UP_STEPS; unit * UP_STEPS < work.up_end; unit++, stored++) {
      int part = cta - work.first_up(unit);
      if (part < 0 || part >= work.count_up(unit) || part >= work.up_parts) return false;
    }
    for (int unit = work.row.of(work.down); unit * (int)work.row.d < work.down_end; unit++, stored++) {
      int part = cta - work.first_down(unit);
      if (part < 0 || part >= work.count_down(unit) || part >= DOWN_PARTS) return false;
    }
  }
  for (int unit = 0; unit < unique * UP_UNITS; unit++) waited += any.count_up(unit);
  for (int unit = 0; unit < DOWN_UNITS; unit++) waited += any.count_down(unit);
  return up == Work::up_steps(unique) && down == Work::down_steps(unique) && stored == waited &&
         unique * BLOCKS * any.up_parts <= most_up_parts() * BLOCKS;
}
template <int K, int TILES, int QUOTA>
__device__ constexpr bool shared(int silent) {
  constexpr int ITEMS = K / 128;
  int stored = 0, waited = 0;
  for (int cta = 0; cta < GRID; cta++) {
    int begin = cta * QUOTA, end = begin + QUOTA < TILES * ITEMS ? begin + QUOTA : TILES * ITEMS;
    for (int tile = begin / ITEMS; cta != silent && begin < end && tile <= (end - 1) / ITEMS; tile++, stored++) {
      int part = cta - first_part<ITEMS, QUOTA>(tile);
      if (part < 0 || part >= shared_parts<ITEMS, QUOTA>(tile) || part >= SHARED_PARTS) return false;
    }
  }
  for (int tile = 0; tile < TILES; tile++) waited += shared_parts<ITEMS, QUOTA>(tile);
  return stored == waited;
}
__device__ constexpr bool all_routed() {
  for (int unique = 0; unique <= MAX_UNIQUE; unique++)
    if (!routed(unique, -1)) return false;
  return true;
}
static_assert(all_routed(), "routed experts");
static_assert(shared<HIDDEN, SHARED_UP_TILES, SHARED_UP_QUOTA>(-1), "gate_up of the shared expert");
static_assert(shared<SHARED_INTER, SHARED_DOWN_TILES, SHARED_DOWN_QUOTA>(-1), "down of the shared expert");
static_assert((ROUTING_CTAS - 1) * ROWS_PER_CTA < EXPERTS && ROUTING_CTAS * ROWS_PER_CTA >= EXPERTS, "logits");
static_assert(ROUTING_CTAS <= GRID, "CTAs with logits");
static_assert(!routed(MAX_UNIQUE, 0) && !shared<HIDDEN, SHARED_UP_TILES, SHARED_UP_QUOTA>(0) &&
              !shared<SHARED_INTER, SHARED_DOWN_TILES, SHARED_DOWN_QUOTA>(0), "a silent CTA is noticed");
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for header in jit._FOLDER.glob("*.cuh"):
        shutil.copy(header, tmp_path)
    (tmp_path / "check.cu").write_text(CHECK)
    monkeypatch.setattr(jit, "_FOLDER", tmp_path)
    return tmp_path


@pytest.mark.parametrize("tokens", decode_moe.TOKEN_COUNTS)
@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_what_is_waited_for_is_stored(shape: MoEShape, gpu: Gpu, tokens: int, folder: Path) -> None:
    roomy = dataclasses.replace(
        gpu, shared_bytes=1 << 20
    )  # the schedule of 8 tokens, even where they do not fit
    plan = decode_moe.plan(shape, tokens, roomy)
    assert plan is not None
    jit.compile_source("check.cu", decode_moe.defines(shape, plan, pdl=False), gpu.arch)
