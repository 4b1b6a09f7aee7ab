# SPDX-License-Identifier: Apache-2.0
"""ling.moe=auto inside vLLM's model construction: when it measures, on what, and what it leaves behind.

The GPU is played: its facts are made up and the experts run in torch, but blocks, configurations and forward passes are
vLLM's own.
"""

import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_ling.quant import moe, moe_verdict
from vllm_ling.quant.moe_auto import Row, Verdict
from vllm_ling.status import STATUS

FASTEST = Verdict((Row("ling", {1: 20.9, 4: 44.0}), Row("humming", {1: 70.0, 4: 95.0})))


def layer(backend: str = "auto", **parallel: int) -> Any:
    ranks = SimpleNamespace(**({"tp_size": 1, "dp_size": 1, "pcp_size": 1, "ep_size": 1} | parallel))
    config = SimpleNamespace(moe_backend=backend, moe_parallel_config=ranks, swiglu_limit=None)
    return SimpleNamespace(swiglu_limit=None, moe_config=config, layer_name="model.layers.2.mlp.experts")


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The layers that were measured for, on what passes for a GPU."""
    asked: list[str] = []

    def verdict_for(layer: Any) -> Verdict:
        asked.append(layer.layer_name)
        return FASTEST

    monkeypatch.setattr(moe_verdict, "verdict_for", verdict_for)
    monkeypatch.setattr(moe, "current_platform", SimpleNamespace(is_cpu=lambda: False, is_cuda=lambda: True))
    STATUS.choices.clear()
    return asked


def method(monkeypatch: pytest.MonkeyPatch, built: Any, option: str | None, fmt: Any = "mxfp4") -> Any:
    section = {} if option is None else {"moe": option}
    config = SimpleNamespace(additional_config={"ling": section})
    monkeypatch.setattr(moe, "get_current_vllm_config", lambda: config)
    return moe.moe_method(built, fmt, stock=lambda: SimpleNamespace(mxfp4_backend="made"))


@pytest.mark.parametrize("option", [None, "auto"])
def test_auto_measures_and_behaves_like_ling(
    option: str | None, measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    built = layer()
    method(monkeypatch, built, option)
    assert measured == [built.layer_name]
    assert built.ling_decode is True and built.moe_config.moe_backend == "humming"
    choice = STATUS.choices["moe mxfp4"]
    assert choice.choice == "humming" and "ling 20.9/44.0, humming 70.0/95.0" in choice.reason


@pytest.mark.parametrize(
    ("option", "backend", "decodes", "taken"),
    [
        ("auto", "marlin", False, "marlin"),
        ("auto", "humming", False, "humming"),
        ("auto", "flashinfer_cutlass", False, "flashinfer_cutlass"),
        ("ling", "auto", True, "humming"),
        ("humming", "auto", False, "humming"),
        ("marlin", "auto", False, "marlin"),
    ],
)
def test_what_the_user_names_is_not_measured(
    option: str,
    backend: str,
    decodes: bool,
    taken: str,
    measured: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    built = layer(backend)
    method(monkeypatch, built, option)
    assert measured == []
    assert (built.ling_decode, built.moe_config.moe_backend) == (decodes, taken)


def test_nothing_measured_leaves_the_choice_to_vllm(
    measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        moe_verdict, "verdict_for", lambda layer: Verdict((), note="the measurement failed: x")
    )
    built = layer()
    method(monkeypatch, built, "auto")
    assert (built.ling_decode, built.moe_config.moe_backend) == (False, "auto")
    choice = STATUS.choices["moe mxfp4"]
    assert choice.choice == "stock" and choice.reason.endswith("the measurement failed: x")


@pytest.mark.parametrize("fmt", ["fp8", "int4", "bf16"])
def test_other_formats_are_not_measured(
    fmt: str, measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    method(monkeypatch, layer(), "auto", fmt)
    assert measured == []


def test_nothing_is_measured_on_a_cpu(measured: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe, "current_platform", SimpleNamespace(is_cpu=lambda: True, is_cuda=lambda: False))
    monkeypatch.setattr(moe, "TorchMoEMethod", lambda *_, **__: "torch method")
    assert method(monkeypatch, layer(), "auto") == "torch method"
    assert measured == []


SHAPE = {
    "hidden_size": 256,
    "moe_intermediate_size": 128,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "moe_shared_expert_intermediate_size": 128,
    "num_shared_experts": 1,
}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A vLLM configuration that `verdict_for` finds, and a played GPU."""
    model = SimpleNamespace(hf_config=SimpleNamespace(**SHAPE), dtype=torch.bfloat16)
    one = SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_size=1)
    config = SimpleNamespace(
        model_config=model, additional_config=None, lora_config=None, parallel_config=one
    )
    monkeypatch.setattr(moe_verdict, "get_current_vllm_config", lambda: config)
    monkeypatch.setenv("VLLM_LING_CACHE_DIR", str(tmp_path))
    play_gpu(monkeypatch.setattr)
    monkeypatch.setattr(moe_verdict, "_VERDICTS", {})
    return config


def play_gpu(put: Any) -> None:
    facts = {"name": "played", "major": 9, "minor": 0, "L2_cache_size": 1 << 20}
    facts |= {"multi_processor_count": 132, "shared_memory_per_block_optin": 227 * 1024}
    put(torch.cuda, "current_device", lambda: 0)
    put(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**facts))
    put(torch.cuda, "mem_get_info", lambda device: (8 << 30, 8 << 30))
    put(torch.cuda, "synchronize", lambda device: None)


def test_layers_share_a_measurement_and_the_next_start_takes_the_cache(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = []

    def measure(*_: Any) -> Verdict:
        measured.append(1)
        return moe_verdict.store(moe_verdict.default_cache(), _[-1], FASTEST)

    monkeypatch.setattr(moe_verdict, "_measure", measure)
    assert [moe_verdict.verdict_for(layer()).origin for _ in range(3)] == ["measured"] * 3
    moe_verdict._VERDICTS.clear()
    assert moe_verdict.verdict_for(layer()).origin == "cache"
    moe_verdict._VERDICTS.clear()
    server.model_config.hf_config.expert_swiglu_limit_list = [0, 7]
    assert moe_verdict.verdict_for(layer()).origin == "measured", "a clamped model asks more of a backend"
    moe_verdict._VERDICTS.clear()
    monkeypatch.setenv("VLLM_HUMMING_MOE_GEMM_TYPE", "grouped")
    assert moe_verdict.verdict_for(layer()).origin == "measured"
    assert len(measured) == 3


def test_a_failed_measurement_is_not_tried_for_every_layer(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def measure(*_: Any) -> Verdict:
        tried.append(1)
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(moe_verdict, "_measure", measure)
    notes = {moe_verdict.verdict_for(layer()).note for _ in range(3)}
    assert notes == {"the measurement failed: RuntimeError (CUDA error)"} and len(tried) == 1


def test_an_unreadable_configuration_is_no_exception(server: Any) -> None:
    del server.model_config.hf_config.n_group
    assert "n_group" in moe_verdict.verdict_for(layer()).note


@pytest.mark.parametrize("parallel", [{"tp_size": 2}, {"ep_size": 4}, {"dp_size": 2}, {"pcp_size": 2}])
def test_parallel_ranks_measure_nothing(parallel: dict[str, int], server: Any) -> None:
    (ranks,) = parallel.values()
    note = moe_verdict.verdict_for(layer(**parallel)).note
    assert f"{ranks} parallel ranks" in note and "ling is left out" in note


def test_activations_of_8_bits_are_left_to_vllm(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_MARLIN_INPUT_DTYPE", "fp8")
    assert "VLLM_MARLIN_INPUT_DTYPE" in moe_verdict.verdict_for(layer()).note
    monkeypatch.delenv("VLLM_MARLIN_INPUT_DTYPE")
    server.model_config.quantization_config = SimpleNamespace(moe=SimpleNamespace(activation="mxfp8"))
    assert "--quantization-config" in moe_verdict.verdict_for(layer()).note


@pytest.mark.parametrize(
    ("change", "word"),
    [({"num_experts": 16}, "16 experts"), ({"hidden_size": 192}, "hidden size 192"), ({}, "float16")],
)
def test_what_our_kernel_cannot_serve_is_known_before(change: dict[str, int], word: str, server: Any) -> None:
    vars(server.model_config.hf_config).update(change)
    if not change:
        server.model_config.dtype = torch.float16
    assert word in moe_verdict.auto_facts(server, layer()).ling_problem


def _in_a_model(folder: Path) -> dict[str, Any]:
    """Starts vLLM with a played GPU and measures while its model is built. Runs in a process of its own."""
    from vllm_ling.bench.engine import model_folder, start
    from vllm_ling.bench.timing import Timing
    from vllm_ling.quant import moe_measure
    from vllm_ling.quant.moe_torch import TorchMoEMethod

    seen: dict[str, Any] = {"outputs": [], "backends": [], "limits": [], "calls": set()}

    def experts(config: Any) -> Any:
        seen["backends"].append(config.moe_backend)
        seen["limits"].append(config.swiglu_limit)
        if config.moe_backend == "b12x":
            raise ValueError("Mxfp4 MoE backend 'B12X_MXFP4_MXFP8' does not support the deployment")
        made: Any = TorchMoEMethod(config, "mxfp4", None, dequantize_at_load=True)
        made.mxfp4_backend = SimpleNamespace(value=config.moe_backend.upper())
        made.experts_cls = type("MarlinExperts", (), {"is_monolithic": staticmethod(lambda: False)})
        return made

    def time_graph(calls: Any, rounds: int) -> Timing:
        seen["outputs"].append([call().float().square().mean().sqrt().item() for call in calls])
        seen["calls"].add(len(calls))
        return Timing(*[float(len(seen["outputs"]))] * 3)

    real_device = torch.device
    play_gpu(setattr)
    cpu = SimpleNamespace(cuda=torch.cuda, bfloat16=torch.bfloat16, __version__=torch.__version__)
    cpu.device = lambda *_: real_device("cpu")
    vars(moe_verdict)["torch"] = cpu
    vars(moe_measure).update(Mxfp4MoEMethod=experts, time_graph=time_graph)
    vars(moe)["measures"] = lambda option, facts: (option, facts.fmt) == ("auto", "mxfp4")

    def decide(verdict: Verdict, fallback: str) -> tuple[str, bool, str]:
        seen["verdict"] = verdict
        return "torch", False, "played"

    vars(moe)["decide"] = decide
    model = model_folder(folder, "mini", 6)
    config = json.loads((model / "config.json").read_text())
    config["expert_swiglu_limit_list"] = [0, 0, 7, 0, 0, 0]
    (model / "config.json").write_text(json.dumps(config))
    settings = {"dtype": "bfloat16", "max_model_len": 256, "max_num_batched_tokens": 256}
    llm = start(model, {"moe": "auto"}, enforce_eager=True, **settings)
    names = llm.llm_engine.vllm_config.compilation_config.static_forward_context
    seen["registered"] = sorted(name for name in names if name.endswith("experts"))
    seen["calls"] = sorted(seen["calls"])
    return seen


@pytest.mark.slow
def test_blocks_of_a_real_model_are_built_run_and_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_LING_CACHE_DIR", str(tmp_path / "cache"))
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        seen = pool.submit(_in_a_model, tmp_path).result(timeout=300)
    found = seen["verdict"]
    said = {row.backend: row.reason for row in found.rows if not row.us}
    assert [row.backend for row in found.rows if row.us] == ["humming", "marlin", "triton"], said
    assert said["b12x"].startswith("Mxfp4 MoE backend 'B12X_MXFP4_MXFP8' does not support")
    assert said["ling"].startswith("16 experts")
    assert seen["backends"] == [
        name for name in ("humming", "marlin", "triton") for _ in range(found.layers)
    ] + ["b12x"]
    assert set(seen["limits"]) == {None}, "the clamp is ours, not the backend's"
    one, four, *others = seen["outputs"]
    assert seen["calls"] == [12] and len(set(one)) == 12, "every call has its own tokens"
    assert all(0 < value < 100 for value in (*one, *four))
    assert others == [one, four] * 2, "every backend must be timed on the same weights and tokens"
    assert seen["registered"] == [f"model.layers.{index}.mlp.experts" for index in range(1, 6)]
    assert len(list((tmp_path / "cache").rglob("moe-auto-*.json"))) == 1
