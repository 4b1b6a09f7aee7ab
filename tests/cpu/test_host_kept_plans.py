# SPDX-License-Identifier: Apache-2.0
"""Steps that keep their attention plans leave the same bytes to the graphs as vLLM's building in every step.

The builders and both model states are vLLM's own, on CPU tensors; only the MLA builder is a stand-in.
"""

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder

from tests.cpu.v2_plans import BLOCKS, GROUPS, REQUESTS, Bench, MlaBuilder, gdn_builder, stock
from vllm_ling.decode import captured
from vllm_ling.host import model_state
from vllm_ling.host.kept_plans import LazyPlans, key_of
from vllm_ling.host.model_state import LingModelState
from vllm_ling.host.plans_check import PlansCheck
from vllm_ling.status import STATUS


@pytest.fixture(autouse=True)
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Graphs of our attention for up to four sequences of up to four tokens."""
    for record in ("choices", "proofs", "faults"):
        monkeypatch.setattr(STATUS, record, {})
    captured.forget()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    ours = built(True)
    for sequences in range(1, REQUESTS + 1):
        for tokens in range(1, 5):
            captured.preparing(sequences * tokens, sequences)
            captured.note("target", sequences * tokens, ours)
    yield
    captured.forget()


def built(alone: bool) -> Any:
    return SimpleNamespace(body=SimpleNamespace(attends_alone=lambda _: alone))


def walk(monkeypatch: pytest.MonkeyPatch, drafts: int, seed: int, steps: int = 150) -> tuple[int, list[str]]:
    """Both states through the same random life of a server; how many steps kept plans, and what differed."""
    rng = random.Random(seed)
    benches = [Bench(monkeypatch, cls, drafts) for cls in (stock(), LingModelState)]
    slots, lengths, kept, wrong = [0, 2], {0: 9, 2: 5}, 0, []
    for bench in benches:
        for slot in slots:
            bench.add(slot)
    for step in range(steps):
        event = rng.random()
        if event < 0.06:  # a request leaves and another one takes a slot
            slot, other = rng.choice(slots), rng.randrange(REQUESTS)
            slots.remove(slot)
            slots.append(other) if other not in slots else slots.append(slot)
            lengths[slots[-1]] = 3
            for bench in benches:
                bench.add(slots[-1])
        elif event < 0.12 and len(slots) > 1:
            slots.pop()
        elif event < 0.16:
            rng.shuffle(slots)
        elif event < 0.22:  # a block of MLA's cache is full
            slot = rng.choice(slots)
            if benches[0].tables.num_blocks.np[0, slot] < BLOCKS:
                for bench in benches:
                    bench.append(slot, 0)
        tokens, others = [drafts + 1] * len(slots), {}
        if event > 0.97:  # a graph is captured, which stages other numbers
            others = {"capture": True}
        elif event > 0.94:
            others = {"mode": CUDAGraphMode.NONE}
        elif event > 0.85:
            others = {"padded": min(REQUESTS, len(slots) + 1)}
        for slot in slots:
            number = rng.randint(1, drafts + 1)
            lengths[slot] += number
            for bench in benches:
                bench.accept(slot, number)
        scheduled = [drafts] * len(slots) if drafts else None
        plans = [b.step(slots, tokens, scheduled, [lengths[s] for s in slots], **others) for b in benches]
        kept += isinstance(plans[1], LazyPlans)
        theirs, ours = (bench.read_by_graphs() for bench in benches)
        wrong += [f"{step}: {name}" for name in theirs if not torch.equal(theirs[name], ours[name])]
        if rng.random() < 0.2 and "capture" not in others:  # somebody looks at the plans after all
            mine, stocks = plans[1]["layer1"], plans[0]["layer1"]
            for name, value in vars(stocks).items():
                if isinstance(value, torch.Tensor):
                    assert torch.equal(value, getattr(mine, name)), name
    return kept, wrong


@pytest.mark.parametrize("drafts", [0, 1, 3])
@pytest.mark.parametrize("seed", range(3))
def test_graphs_find_what_vllm_would_have_left(
    drafts: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, wrong = walk(monkeypatch, drafts, seed)
    assert wrong == []
    assert kept > 40
    assert {choice.choice for choice in STATUS.choices.values()} == {"new batches"}
    assert not STATUS.faults and "kept_plans" in STATUS.proofs


BLIND = ("blocks", "slots", "arrivals", "other steps", "accepted")


def blinded(blind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are kept where they must not be."""
    if blind in ("blocks", "slots"):
        place = {"slots": 2, "blocks": 5}[blind]

        def key(*arguments: Any) -> Any:
            found = key_of(*arguments)
            return found and (*found[:place], *found[place + 1 :])

        monkeypatch.setattr(model_state, "key_of", key)
        monkeypatch.setattr(LingModelState, "add_request", stock().add_request)
    elif blind == "arrivals":
        monkeypatch.setattr(LingModelState, "add_request", stock().add_request)
    elif blind == "accepted":
        monkeypatch.setattr(model_state, "accepted", lambda *_: ([], ""))
    else:
        original = LingModelState.prepare_attn

        def remembering(state: Any, *arguments: Any, **named: Any) -> Any:
            last = state._last
            plans = original(state, *arguments, **named)
            state._last = state._last or last
            return plans

        monkeypatch.setattr(LingModelState, "prepare_attn", remembering)


@pytest.mark.parametrize("blind", BLIND)
def test_these_tests_see_what_a_key_forgets(blind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    blinded(blind, monkeypatch)
    monkeypatch.setattr(PlansCheck, "due", lambda _: False)
    assert any(walk(monkeypatch, 3, seed, 300)[1] for seed in range(3))


@pytest.mark.parametrize("blind", BLIND)
def test_the_comparison_while_serving_sees_it_too_and_ends_the_keeping(
    blind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    blinded(blind, monkeypatch)
    monkeypatch.setattr(PlansCheck, "due", lambda _: True)
    kept, wrong = walk(monkeypatch, 3, 0, 300)
    assert "of an earlier one" in STATUS.faults["kept_plans"] and says("of an earlier one")
    assert (kept, wrong) == (0, []), "a compared step has vLLM's own plans"


def test_kept_steps_are_compared_at_growing_distances() -> None:
    check = PlansCheck()
    found = [step for step in range(1, 20001) if check.due()]
    assert found == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 12288, 16384]


def same_step(bench: Bench, drafts: int = 0, **others: Any) -> Any:
    return bench.step([1], [drafts + 1], [drafts] if drafts else None, [100], **others)


def ready(monkeypatch: pytest.MonkeyPatch, drafts: int = 0) -> Bench:
    monkeypatch.setattr(PlansCheck, "due", lambda _: False)
    bench = Bench(monkeypatch, LingModelState, drafts)
    bench.add(1)
    return bench


def says(word: str) -> bool:
    return any(word in f"{c.what} {c.reason}" and c.choice == "every step" for c in STATUS.choices.values())


def test_only_graphs_of_our_attention_alone_do_without_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = ready(monkeypatch)
    captured.note("target", 0, None)  # another size
    captured.preparing(1, 1)
    captured.note("target", 1, built(False))
    assert not any(isinstance(same_step(bench), LazyPlans) for _ in range(3))
    assert says("no graph of the target")
    captured.note("target", 1, built(True))
    same_step(bench)
    assert isinstance(same_step(bench), LazyPlans)


def test_a_draft_that_reads_the_plan_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = ready(monkeypatch, 3)
    captured.preparing(4, 1)
    captured.note("draft", 4, None)
    assert not any(isinstance(same_step(bench, 3), LazyPlans) for _ in range(3))
    assert says("the draft's first step")
    captured.note("draft", 4, built(True))
    same_step(bench, 3)
    assert isinstance(same_step(bench, 3), LazyPlans)


def test_outside_a_capture_nothing_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    captured.forget()
    captured.preparing(1, 1)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    captured.note("target", 1, built(True))
    assert captured.problem((1, 1))


class Derived(GDNAttentionMetadataBuilder):
    """As Kimi's."""


@pytest.mark.parametrize(
    "case", ["an MLA plan holds copies", "not vLLM's own", "is not known", "lies outside"]
)
def test_plans_of_another_make_are_built_in_every_step(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = ready(monkeypatch)
    if case == "an MLA plan holds copies":
        monkeypatch.setattr(MlaBuilder, "copies", True)
    elif case == "not vLLM's own":
        bench.groups[2][0].metadata_builders = [gdn_builder(0, Derived)]
    elif case == "is not known":
        monkeypatch.setattr(MlaBuilder, "build", lambda *_: SimpleNamespace())
    else:
        for (group,) in bench.groups[1:]:
            vars(group.metadata_builders[0])["use_full_cuda_graph"] = False
    assert not any(isinstance(same_step(bench), LazyPlans) for _ in range(3))
    assert says(case)


@pytest.mark.parametrize(
    ("case", "word"),
    [("connector", "a KV connector"), ("ranks", "one GPU"), ("recover", "RecoverSSM")],
)
def test_servers_of_another_kind_keep_vllms_way(
    case: str, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = ready(monkeypatch)
    state: Any = bench.state
    if case == "connector":
        state.vllm_config.kv_transfer_config = object()
    elif case == "ranks":
        state.vllm_config.parallel_config.tensor_parallel_size = 2
    else:
        state.recoverssm = object()
    assert word in state._plans_problem()


def test_new_block_tables_forget_the_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = ready(monkeypatch)
    same_step(bench)
    bench.state.initialize_kv_cache(bench.kv, bench.tables)
    assert not isinstance(same_step(bench), LazyPlans)


def batch(lengths: list[int]) -> Any:
    index = torch.arange(len(lengths)).numpy()
    return SimpleNamespace(
        has_prefill=False,
        max_query_len=None,
        dcp_local_seq_lens=None,
        idx_mapping_np=index,
        num_draft_tokens_per_req=None,
        num_scheduled_tokens=index,
        num_reqs=len(lengths),
        num_tokens_after_padding=len(lengths),
        num_reqs_after_padding=len(lengths),
        seq_lens_cpu_upper_bound=torch.tensor(lengths, dtype=torch.int32),
    )


def test_where_states_move_between_blocks_their_column_counts() -> None:
    blocks = torch.zeros(GROUPS, REQUESTS, dtype=torch.int32).numpy()

    def key(*lengths: int) -> Any:
        return key_of(batch(list(lengths)), blocks, 64, 8)

    assert key(40, 100) == key(64, 128) != key(64, 192)
    assert key(40, 100) is not None and key(128, 128) is not None
    for near in range(65, 73):  # the GPU's own length may still lie in the block before
        assert key(40, near) is None
    assert key(73) is not None
    assert key(3) == key(64), "nothing lies before the first block"
    assert key_of(batch([65]), blocks, 0, 8) == key_of(batch([40]), blocks, 0, 8)


@pytest.mark.parametrize("field", ["has_prefill", "max_query_len", "dcp_local_seq_lens", "pcp"])
def test_batches_of_another_kind_have_no_key(field: str) -> None:
    given = batch([5])
    vars(given)[field] = 3
    assert key_of(given, torch.zeros(GROUPS, REQUESTS).numpy(), 0, 8) is None


def test_lazy_plans_are_a_dict_built_once() -> None:
    looks = (
        lambda plans: plans["a"] == 1,
        lambda plans: plans.get("a") == 1 and plans.get("c", 5) == 5,
        lambda plans: "a" in plans and "c" not in plans,
        lambda plans: list(plans) == ["a", "b"],
        lambda plans: len(plans) == 2 and bool(plans),
        lambda plans: list(plans.keys()) == ["a", "b"],
        lambda plans: list(plans.values()) == [1, 2],
        lambda plans: dict(plans.items()) == {"a": 1, "b": 2},
        lambda plans: dict(plans) == {"a": 1, "b": 2},
        lambda plans: {**plans} == {"a": 1, "b": 2},
    )
    for look in looks:
        calls: list[int] = []
        plans = LazyPlans(lambda: calls.append(1) or {"a": 1, "b": 2})  # type: ignore[func-returns-value]  # noqa: B023
        assert isinstance(plans, dict) and calls == []
        assert look(plans) and look(plans) and calls == [1]
