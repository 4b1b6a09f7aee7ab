# SPDX-License-Identifier: Apache-2.0
"""ling.moe=auto on a GPU at flash's shape: it measures while the model is built, within its time, and remembers."""

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


def test_auto_measures_within_its_time_and_remembers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setenv("VLLM_LING_CACHE_DIR", str(cache))
    import torch

    from vllm_ling.bench.engine import inside, model_folder, start
    from vllm_ling.quant import moe_verdict
    from vllm_ling.status import STATUS

    # Two dense layers and four MoE layers of 1.6 GB, one of them clamped as in the published model.
    model = model_folder(tmp_path, "flash", 6)
    config = json.loads((model / "config.json").read_text())
    config["expert_swiglu_limit_list"] = [0, 0, 0, 7, 0, 0]
    (model / "config.json").write_text(json.dumps(config))
    llm: Any = start(model, {"moe": "auto"}, enforce_eager=True)

    (first,) = moe_verdict._VERDICTS.values()
    print("\n" + "\n".join(moe_verdict.table(first)))
    figures = {row.backend: row.us for row in first.rows if row.us}
    assert {"ling", "humming", "marlin"} <= set(figures), first
    assert all(0 < us < 1e4 for times in figures.values() for us in times.values())
    assert first.seconds < 10 and first.layers >= 2
    best = first.best
    assert best is not None
    for what in ("moe mxfp4", "moe mxfp4 clamped"):
        assert STATUS.choices[what].reason.startswith(f"auto measured {best.backend} fastest")
    expected = "HUMMING" if best.backend in ("ling", "humming") else best.backend.upper()
    assert STATUS.choices["moe backend"].choice == expected
    print({what: (choice.choice, choice.reason) for what, choice in STATUS.choices.items() if "moe" in what})
    if best.backend == "ling":  # decided, and compared with vLLM's path, at the profiling run
        assert STATUS.choices["moe decode"].choice == "ling", STATUS.choices["moe decode"].reason
        assert "moe_decode" in STATUS.proofs

    def again(model: Any) -> tuple[Any, float, int]:
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

        layer = next(module for module in model.modules() if isinstance(module, RoutedExperts))
        moe_verdict._VERDICTS.clear()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before, began = torch.cuda.memory_reserved(), time.monotonic()
        with set_current_vllm_config(llm.llm_engine.vllm_config):
            verdict = moe_verdict.verdict_for(layer)
        return verdict, time.monotonic() - began, torch.cuda.memory_reserved() - before

    cached, seconds, _ = inside(llm, again)
    assert cached.origin == "cache" and seconds < 1, (cached.origin, seconds)
    assert cached.rows == first.rows

    # Everything is compiled by now, so that the whole time counts; the verdict alone is forgotten.
    for path in cache.rglob("moe-auto-*.json"):
        path.unlink()
    fresh, seconds, kept = inside(llm, again)
    print("\n".join(moe_verdict.table(fresh)), f"\nin all {seconds:.1f} s, {kept >> 20} MiB kept")
    assert fresh.origin == "measured" and seconds < 10
    assert {"ling", "humming", "marlin"} <= {row.backend for row in fresh.rows if row.us}, fresh
    assert kept < 64 << 20, "the measurement must give its memory back"
    shutil.rmtree(cache)
