# SPDX-License-Identifier: Apache-2.0
"""load_strictly: every tensor consumed, every part filled, dtypes that fit; otherwise one error naming the tensor."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from vllm_ling.errors import LingError
from vllm_ling.models.naming import target_name
from vllm_ling.models.strict_loading import load_strictly

EXPERTS = 2


class Model(torch.nn.Module):
    """Three kinds of parameter: whole, merged and per expert."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_hidden_layers=1, num_nextn_predict_layers=1, num_experts=EXPERTS)
        self.quant_config = None
        self.loads: list[Any] = []
        for name, dtype in (
            ("lm_head.weight", torch.bfloat16),
            ("model.layers.0.mlp.gate_up_proj.weight", torch.float8_e4m3fn),
            ("model.layers.0.mlp.gate_up_proj.weight_scale_inv", torch.float8_e8m0fnu),
            ("model.layers.0.mlp.experts.routed_experts.w13_weight", torch.uint8),
            ("model.layers.0.mlp.experts.routed_experts.w2_weight", torch.uint8),
        ):
            self._add(name, dtype)

    def _add(self, name: str, dtype: torch.dtype) -> None:
        module: torch.nn.Module = self
        *path, leaf = name.split(".")
        for part in path:
            if part not in module._modules:
                module.add_module(part, torch.nn.Module())
            module = module._modules[part]  # type: ignore[assignment]
        param = Parameter(torch.zeros(4, 4).to(dtype), requires_grad=False)
        param.weight_loader = lambda p, tensor, *shard, **kw: self.loads.append((name, *shard, *kw.values()))  # type: ignore[attr-defined]
        module.register_parameter(leaf, param)


def checkpoint() -> dict[str, torch.Tensor]:
    fp8, scale = torch.zeros(2, 4).to(torch.float8_e4m3fn), torch.ones(1, 4).to(torch.float8_e8m0fnu)
    tensors = {
        "lm_head.weight": torch.zeros(4, 4, dtype=torch.bfloat16),
        "model.layers.1.eh_proj.weight": torch.zeros(1),
        **{f"model.layers.0.mlp.{p}_proj.weight": fp8 for p in ("gate", "up")},
        **{f"model.layers.0.mlp.{p}_proj.weight_scale_inv": scale for p in ("gate", "up")},
    }
    for expert in range(EXPERTS):
        for projection in ("gate", "up", "down"):
            tensors[f"model.layers.0.mlp.experts.{expert}.{projection}_proj.weight"] = torch.zeros(
                2, 2
            ).byte()
    return tensors


def load(tensors: dict[str, torch.Tensor]) -> Model:
    model = Model()
    load_strictly(model, tensors.items(), target_name(model.config), "model")
    return model


def test_complete_checkpoint_loads() -> None:
    model = load(checkpoint())
    assert ("model.layers.0.mlp.gate_up_proj.weight", 1) in model.loads
    w13 = "model.layers.0.mlp.experts.routed_experts.w13_weight"
    assert (w13, w13, 1, "w3") in model.loads
    assert len(model.loads) == 5 + 3 * EXPERTS


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        ("model.layers.0.mlp.bias", torch.zeros(1), ["model.layers.0.mlp.bias", "no parameter"]),
        ("lm_head.weight_scale", torch.zeros(4), ["lm_head.weight_scale", "no parameter"]),
        (
            "lm_head.weight",
            torch.zeros(4, 4).to(torch.float8_e4m3fn),
            ["lm_head.weight", "scale would be dropped"],
        ),
        (
            "model.layers.0.mlp.gate_proj.weight",
            torch.zeros(2, 4, dtype=torch.bfloat16),
            ["gate_proj.weight", "bfloat16", "modules_to_not_convert"],
        ),
        (
            "model.layers.0.mlp.experts.0.up_proj.weight",
            torch.zeros(2, 2),
            ["experts.0.up_proj", "float32", "uint8"],
        ),
        ("model.layers.0.mlp.experts.2.bias", torch.zeros(1), ["experts.2.bias", "no parameter"]),
    ],
)
def test_tensor_that_does_not_fit_is_named(name: str, tensor: torch.Tensor, words: list[str]) -> None:
    with pytest.raises(LingError) as caught:
        load({**checkpoint(), name: tensor})
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    ("gone", "words"),
    [
        ("lm_head.weight", ["lm_head.weight", "nothing in the checkpoint"]),
        ("model.layers.0.mlp.up_proj.weight_scale_inv", ["gate_up_proj.weight_scale_inv (part 1, 1 of 2"]),
        ("model.layers.0.mlp.experts.1.up_proj.weight", ["w13_weight (expert 1 w3, 1 of 4"]),
        ("model.layers.0.mlp.experts.0.down_proj.weight", ["w2_weight (expert 0 w2"]),
    ],
)
def test_hole_is_named(gone: str, words: list[str]) -> None:
    tensors = checkpoint()
    del tensors[gone]
    with pytest.raises(LingError) as caught:
        load(tensors)
    assert all(word in str(caught.value) for word in words), caught.value


def test_twice_is_an_error() -> None:
    model = Model()
    twice = [*checkpoint().items(), ("lm_head.weight", torch.zeros(4, 4, dtype=torch.bfloat16))]
    with pytest.raises(LingError, match=r"lm_head\.weight.*twice"):
        load_strictly(model, twice, target_name(model.config), "model")
