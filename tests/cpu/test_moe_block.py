# SPDX-License-Identifier: Apache-2.0
"""The MoE decode path's decision, on tensors in Humming's shapes with a torch stand-in for the kernel.

It takes over only when everything fits and agrees with vLLM's path, and says why when it does not.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_ling.models import moe_block
from vllm_ling.models.moe_block import LingMoE, MoEGroup
from vllm_ling.quant.decode_moe import MoEShape
from vllm_ling.quant.layout import to_fragment_scales, to_fragments
from vllm_ling.quant.moe_decode import decode_shape, decode_weights
from vllm_ling.quant.moe_reference import moe_reference
from vllm_ling.status import STATUS

SHAPE = MoEShape(256, 128, 32, 4, 4, 2, shared_intermediate=128)


class Kernel:
    """What MoEDecoder promises, in fp32 torch."""

    max_tokens = 8
    shape = SHAPE

    def __init__(self, *_: Any) -> None: ...

    def __call__(self, x: Any, w: Any, out: Any, scaling: float, limit: float, shared_limit: float) -> Any:
        return out.copy_(moe_reference(SHAPE, x, w, scaling, limit, shared_limit))


def linear(rows: int, k: int) -> SimpleNamespace:
    weight = (torch.randn(rows, k, dtype=torch.float32) * 40).to(torch.float8_e4m3fn)
    return SimpleNamespace(weight=weight, weight_scale_inv=torch.full((rows // 128, k // 128), 2.0**-11))


def block() -> Any:
    """A block as vLLM leaves it after loading: parameters flattened as Humming flattens them."""
    s = SHAPE
    codes = [torch.randint(0, 256, (s.experts, *size), dtype=torch.uint8) for size in ((256, 128), (256, 64))]
    scales = [torch.randint(117, 122, (s.experts, *size), dtype=torch.uint8) for size in ((256, 8), (256, 4))]
    experts = SimpleNamespace(
        ling_decode=True,
        humming_configs={},
        input_schemas={"w13": SimpleNamespace(a_dtype=SimpleNamespace(num_bits=16))},
        moe_config=SimpleNamespace(
            intermediate_size=128,
            moe_parallel_config=SimpleNamespace(tp_size=1, dp_size=1, use_ep=False),
        ),
        w13_weight=to_fragments(codes[0]).view(s.experts, s.hidden // 16, -1),
        w13_weight_scale=to_fragment_scales(scales[0]).view(s.experts, s.hidden // 32, -1),
        w2_weight=to_fragments(codes[1]).view(s.experts, s.intermediate // 16, -1),
        w2_weight_scale=to_fragment_scales(scales[1]).view(s.experts, s.intermediate // 32, -1),
    )
    made: Any = LingMoE.__new__(LingMoE)
    torch.nn.Module.__init__(made)
    object.__setattr__(made, "experts", SimpleNamespace(routed_experts=experts))
    made.hidden_size, made.num_experts, made.top_k = s.hidden, s.experts, s.top_k
    made.routed_scaling_factor, made.ling_groups, made.ling_name = 2.5, (4, 2), "layer.ling"
    made.expert_swiglu_limit = made.share_expert_swiglu_limit = None
    object.__setattr__(
        made, "shared_experts", SimpleNamespace(gate_up_proj=linear(256, 256), down_proj=linear(256, 128))
    )
    gate = torch.randn(s.experts, s.hidden, dtype=torch.float32) * 0.02
    bias = torch.randn(s.experts, dtype=torch.float32) * 0.01
    object.__setattr__(made, "gate", SimpleNamespace(weight=gate, expert_bias=bias))
    made.ling_group = MoEGroup()
    made.ling_group.blocks.append(made)
    return made


def by_reference(made: Any, x: torch.Tensor) -> torch.Tensor:
    weights, reason = decode_weights(made, SHAPE)
    assert weights is not None, reason
    return moe_reference(SHAPE, x, weights, 2.5, 0.0, 0.0).bfloat16()


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(moe_block, "MoEDecoder", Kernel)
    monkeypatch.setattr(moe_block, "gpu_of", lambda device: None)
    monkeypatch.setattr(moe_block, "_DECODERS", {})
    for record in (STATUS.choices, STATUS.faults, STATUS.proofs):
        record.clear()


def decide(made: Any, tokens: int = 2) -> tuple[bool, str]:
    x = torch.randn(tokens, SHAPE.hidden, dtype=torch.float32).bfloat16()
    usable = made.ling_group.usable(x)
    return usable, STATUS.choices["moe decode"].reason


def test_takes_over_after_agreeing(monkeypatch: pytest.MonkeyPatch) -> None:
    made = block()
    monkeypatch.setattr(LingMoE, "stock", by_reference)
    assert decide(made) == (True, "ling.moe=ling: up to 8 tokens in one launch")
    assert "moe_decode" in STATUS.proofs
    assert not made.ling_group.usable(torch.zeros(9, SHAPE.hidden, dtype=torch.bfloat16)), (
        "9 tokens are too many"
    )
    assert not made.ling_group.usable(torch.zeros(1, SHAPE.hidden, dtype=torch.float16))


@pytest.mark.parametrize("wrong", ["half", "nan", "zero"])
def test_disagreement_is_a_fault_and_leaves_vllm(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    made = block()
    factor = {"half": 0.5, "nan": float("nan"), "zero": 0.0}[wrong]
    monkeypatch.setattr(LingMoE, "stock", lambda self, x: by_reference(self, x) * factor)
    usable, reason = decide(made)
    assert not usable and "disagrees" in reason and "moe_decode" in STATUS.faults


@pytest.mark.parametrize("tokens", [1, 2, 4, 8])
def test_every_token_count_is_compared(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    """Each is a kernel of its own."""

    class Wrong(Kernel):
        def __call__(self, x: Any, *rest: Any) -> Any:
            out = super().__call__(x, *rest)
            return out.mul_(2) if len(x) == tokens else out

    made = block()
    monkeypatch.setattr(LingMoE, "stock", by_reference)
    monkeypatch.setattr(moe_block, "MoEDecoder", Wrong)
    usable, reason = decide(made)
    assert not usable and "disagrees" in reason and "1.000" in STATUS.faults["moe_decode"]


def test_a_kernel_that_cannot_be_built_leaves_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Kernel):
        def __init__(self, *_: Any) -> None:
            raise RuntimeError("no nvrtc here")

    monkeypatch.setattr(moe_block, "MoEDecoder", Broken)
    assert decide(block()) == (False, "RuntimeError: no nvrtc here")


def test_nothing_is_decided_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    made = block()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not made.ling_group.usable(torch.zeros(1, SHAPE.hidden, dtype=torch.bfloat16))
    assert "moe decode" not in STATUS.choices and not made.ling_group.decided


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda b: setattr(b.experts.routed_experts.moe_config.moe_parallel_config, "tp_size", 2), "one GPU"),
        (lambda b: delattr(b.experts.routed_experts, "humming_configs"), "Humming's layout"),
        (
            lambda b: setattr(b.experts.routed_experts.input_schemas["w13"].a_dtype, "num_bits", 8),
            "W4A8",
        ),
        (lambda b: setattr(b, "hidden_size", 200), "hidden size 200"),
        (
            lambda b: setattr(b.experts.routed_experts, "w2_weight", torch.zeros(3, dtype=torch.int32)),
            "w2 has (3,)",
        ),
        (
            lambda b: setattr(b.shared_experts.down_proj, "weight_scale_inv", torch.ones(7, 7)),
            "shared expert w2: the scales are (7, 7)",
        ),
        (
            lambda b: setattr(b.shared_experts.gate_up_proj, "weight", torch.zeros(256, 256)),
            "not contiguous E4M3",
        ),
        (lambda b: setattr(b.gate, "expert_bias", b.gate.expert_bias.bfloat16()), "router: bias"),
    ],
)
def test_whatever_does_not_fit_has_a_reason(change: Any, word: str) -> None:
    made = block()
    change(made)
    usable, reason = decide(made)
    assert not usable and word in reason


def test_views_not_copies() -> None:
    made = block()
    shape, _ = decode_shape(made)
    assert shape == SHAPE
    weights, _ = decode_weights(made, SHAPE)
    experts = made.experts.routed_experts
    assert weights is not None
    assert weights.w13.data_ptr() == experts.w13_weight.data_ptr()
    assert weights.s2.data_ptr() == experts.w2_weight_scale.data_ptr()
    assert weights.shared_w13 is made.shared_experts.gate_up_proj.weight


def test_a_reload_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    made = block()
    monkeypatch.setattr(LingMoE, "stock", by_reference)
    decide(made)
    x = torch.randn(2, SHAPE.hidden, dtype=torch.float32).bfloat16()
    before = made.decode(x)
    made.experts.routed_experts.w13_weight = made.experts.routed_experts.w13_weight.flip(0).contiguous()
    after = made.decode(x)
    assert not torch.equal(before, after) and torch.equal(after, by_reference(made, x))
