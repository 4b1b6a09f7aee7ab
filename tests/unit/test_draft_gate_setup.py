# SPDX-License-Identifier: Apache-2.0
"""Where the draft gate goes into vLLM: what it refuses, and which CUDA graphs it gets captured."""

import importlib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu import cudagraph_utils

from vllm_ling import compat
from vllm_ling.errors import LingError
from vllm_ling.spec_decode import gate_graphs, gate_setup
from vllm_ling.spec_decode.gate_setup import CPU_WORKER, WORKER, GateFacts, refuse
from vllm_ling.status import STATUS

SOUND = GateFacts(method="mtp")


@pytest.mark.parametrize(
    "facts",
    [
        SOUND,
        replace(SOUND, asynchronous=False),
        replace(SOUND, v2=True, graphs=True),
        replace(SOUND, worker=WORKER),
        replace(SOUND, worker=CPU_WORKER),
    ],
)
def test_sound_settings_pass(facts: GateFacts) -> None:
    refuse(facts)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"method": None}, "nothing drafts"),
        ({"method": "ngram"}, "nothing drafts"),
        ({"ranks": 2}, "2 ranks"),
        ({"asynchronous": True}, "--async-scheduling"),
        ({"worker": "my.Worker"}, "--worker-cls my.Worker"),
        ({"graphs": True}, "the V1 model runner has CUDA graphs for"),
        ({"sampling": "probabilistic"}, "draft_sample_method probabilistic"),
        ({"local_argmax": True}, "use_local_argmax_reduction"),
        ({"own_schedule": True}, "num_speculative_tokens_per_batch_size"),
    ],
)
def test_refusals_name_the_setting(change: dict[str, Any], words: str) -> None:
    with pytest.raises(LingError, match=f"ling.draft_gate: .*{words}"):
        refuse(replace(SOUND, **change))


def config(gate: str = "bytes", **changes: Any) -> Any:
    """As much of a vLLM config as the gate looks at."""
    facts = {"v2": True, "eager": False, "mode": None, "seqs": 1, "asynchronous": None} | changes
    return SimpleNamespace(
        additional_config={"ling": {"draft_gate": gate}},
        use_v2_model_runner=facts["v2"],
        speculative_config=SimpleNamespace(
            method="mtp",
            num_speculative_tokens=3,
            draft_sample_method="greedy",
            use_local_argmax_reduction=False,
            num_speculative_tokens_per_batch_size=None,
        ),
        parallel_config=SimpleNamespace(world_size=1, data_parallel_size=1, worker_cls="auto"),
        scheduler_config=SimpleNamespace(async_scheduling=facts["asynchronous"], max_num_seqs=facts["seqs"]),
        compilation_config=SimpleNamespace(cudagraph_mode=facts["mode"]),
        model_config=SimpleNamespace(enforce_eager=facts["eager"], model="tiny-ling"),
    )


def test_off_touches_nothing() -> None:
    untouched, given = config("off"), config("off")
    gate_setup.set_up(given, cpu=False)
    assert given == untouched


@pytest.mark.parametrize("again", [1, 2])
def test_set_up_is_the_same_when_the_config_is_checked_again(again: int) -> None:
    given = config(seqs=4)
    for _ in range(again):
        gate_setup.set_up(given, cpu=False)
    assert given.scheduler_config.async_scheduling is False
    assert given.parallel_config.worker_cls == WORKER
    assert given.speculative_config.num_speculative_tokens_per_batch_size == [(1, 4, 3)]


@pytest.mark.parametrize(
    ("changes", "cpu", "worker"),
    [
        ({"eager": True}, False, WORKER),
        ({"v2": False}, True, CPU_WORKER),
        ({"mode": CUDAGraphMode.NONE}, False, WORKER),
    ],
)
def test_without_graphs_no_further_lengths_are_captured(
    changes: dict[str, Any], cpu: bool, worker: str
) -> None:
    given = config(**changes)
    gate_setup.set_up(given, cpu=cpu)
    assert given.parallel_config.worker_cls == worker
    assert given.speculative_config.num_speculative_tokens_per_batch_size is None


def test_a_schedule_of_the_users_own_is_refused() -> None:
    given = config()
    given.speculative_config.num_speculative_tokens_per_batch_size = [(1, 8, 2)]
    with pytest.raises(LingError, match="per_batch_size"):
        gate_setup.set_up(given, cpu=False)


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts vLLM's tables back after the test, and spares it a process group."""
    for name in gate_graphs._READERS:
        module = importlib.import_module(name)
        monkeypatch.setattr(module, gate_graphs._NAME, getattr(module, gate_graphs._NAME))
    rank = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    monkeypatch.setattr(cudagraph_utils, "get_pp_group", lambda: rank)
    platform = SimpleNamespace(get_global_graph_pool=lambda: None)
    monkeypatch.setattr(cudagraph_utils, "current_platform", platform)


def manager(seqs: int, k: int, schedule: Any, sizes: list[int]) -> Any:
    """vLLM's own, with the graphs it would capture taken for captured."""
    speculative = SimpleNamespace(
        uses_dynamic_speculative_decoding=lambda: schedule is not None,
        num_speculative_tokens_per_batch_size=schedule,
    )
    vllm_config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=seqs),
        compilation_config=SimpleNamespace(
            cudagraph_capture_sizes=sizes, max_cudagraph_capture_size=max(sizes)
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, data_parallel_size=1),
        cache_config=SimpleNamespace(use_kda_recoverssm=False),
        speculative_config=speculative,
        num_speculative_tokens=k,
    )
    found = cudagraph_utils.CudaGraphManager(vllm_config, "cpu", CUDAGraphMode.FULL_DECODE_ONLY, k + 1)
    found._graphs_captured = True
    return found


@pytest.mark.parametrize("k", [1, 3, 7])
def test_vllm_captures_every_length_for_one_user(k: int, tables: None) -> None:
    schedule, sizes = [(1, 1, k)], [1, 2, 4, 8]
    # The reason for the patch: vLLM's table knows no length but k.
    stock = gate_graphs.covered_lengths([manager(1, k, schedule, sizes)], k)(1)
    assert stock == [k]
    gate_graphs.capture_every_length()
    target = manager(1, k, schedule, sizes)
    assert gate_graphs.covered_lengths([target], k)(1) == list(range(k + 1))
    for length in range(k + 1):
        found = target.dispatch(1, length + 1, length + 1, 0)
        assert (found.num_tokens, found.num_reqs) == (length + 1, 1), "no padding"


def test_of_more_users_those_lengths_that_have_graphs(tables: None) -> None:
    gate_graphs.capture_every_length()
    target = manager(4, 3, [(1, 4, 3)], [1, 2, 4, 8, 12, 16])
    lengths = gate_graphs.covered_lengths([target], 3)
    assert lengths(1) == [0, 1, 2, 3] and lengths(4) == [0, 1, 2, 3]
    for requests in (2, 3):
        found = lengths(requests)
        assert found and 3 in found
    assert lengths(5) is None, "such a batch has no graph of any length"


def test_without_the_schedule_the_graphs_cover_k_only(tables: None) -> None:
    gate_graphs.capture_every_length()
    assert gate_graphs.covered_lengths([manager(1, 3, None, [1, 2, 4])], 3)(1) == [3]


class Steps:
    """A draft's graph manager with graphs for these numbers of steps."""

    def __init__(self, numbers: list[int]) -> None:
        self._numbers = numbers

    def dispatch(self, requests: int, tokens: int, uniform: int, loras: int) -> Any:
        assert requests == tokens and uniform == 1
        return SimpleNamespace(cg_mode=CUDAGraphMode.FULL)

    def specialize_spec_tokens(self, description: Any, number: int) -> Any:
        return SimpleNamespace(cg_mode=CUDAGraphMode.FULL if number in self._numbers else CUDAGraphMode.NONE)


def test_draft_steps_are_those_with_graphs() -> None:
    assert gate_graphs.covered_steps(Steps([2, 4]), 4)(1) == [1, 2, 4]
    assert gate_graphs.covered_steps(Steps([]), 4)(1) is None


def runner(target: Any, prefill: Any, decode: Any, confidence: Any) -> Any:
    drafter = SimpleNamespace(
        model=SimpleNamespace(confidence=confidence),
        prefill_cudagraph_manager=prefill,
        decode_cudagraph_manager=decode,
    )
    target.graphs = {"captured": 1}
    return SimpleNamespace(speculator=drafter, cudagraph_manager=target)


def test_a_gate_without_graphs_for_its_lengths_does_not_run(
    tables: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(STATUS, "choices", {})
    sizes = [1, 2, 4]
    confidence = SimpleNamespace(read=lambda requests, steps: [[0.5] * steps] * requests)
    stock = manager(1, 3, [(1, 1, 3)], sizes)
    assert gate_setup.build(config(), runner(stock, stock, Steps([3]), confidence)) is None
    assert STATUS.choices["draft_gate"].choice == "off" and "[3]" in STATUS.choices["draft_gate"].reason
    gate_graphs.capture_every_length()
    ours = manager(1, 3, [(1, 1, 3)], sizes)
    # The draft's first step sees the batch of the target: both need the graph.
    assert gate_setup.build(config(), runner(ours, stock, Steps([2, 3]), confidence)) is None
    assert gate_setup.build(config(), runner(ours, ours, Steps([2, 3]), confidence)) is not None
    assert STATUS.choices["draft_gate"].choice == "bytes"
    assert "CUDA graphs for 0, 1, 2, 3 draft tokens" in STATUS.choices["draft_gate"].reason


def test_a_draft_that_does_not_tell_how_sure_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(STATUS, "choices", {})
    other = SimpleNamespace(drafter=SimpleNamespace(model=SimpleNamespace()), speculator=None)
    assert gate_setup.build(config(v2=False), other) is None
    assert STATUS.choices["draft_gate"].choice == "off"


def test_the_patch_is_on_record() -> None:
    assert sum(gate_graphs._NAME in entry.what for entry in compat.WORKAROUNDS) == 1


def test_vllms_own_adaptive_verification_cannot_serve_this_model() -> None:
    """It lets lengths on the device differ from those on the host, which backends of recurrent states refuse."""
    from vllm.v1.attention.backends.gdn_attn import GDNAttentionBackend
    from vllm.v1.worker.gpu.attn_utils import get_query_lens_mismatch_unsupported_backend

    groups: Any = [[SimpleNamespace(backend=GDNAttentionBackend, layer_names=["kda"])]]
    assert get_query_lens_mismatch_unsupported_backend(groups) == "GDNAttentionBackend"
