# SPDX-License-Identifier: Apache-2.0
"""Weight loading that cannot be silent: every tensor consumed, every part of every parameter filled, dtypes that fit.

vLLM's own loaders skip unknown names, cast FP8 bytes into BF16 parameters (and back) without their scales, and leave
scales uninitialized when nothing fills them. Each of those is an error here.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.models.bailing_moe_v3 import _maybe_pad_block_fp8_shared_expert_checkpoint_tensor
from vllm.model_executor.models.utils import is_pp_missing_parameter

from vllm_ling.errors import LingError
from vllm_ling.models.naming import MERGED, Place, Target

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_SOURCES: dict[torch.dtype, tuple[torch.dtype, ...]] = {
    torch.bfloat16: _FLOATS,
    torch.float16: _FLOATS,
    torch.float32: _FLOATS,
    torch.float8_e4m3fn: (torch.float8_e4m3fn,),
    torch.float8_e8m0fnu: (torch.float8_e8m0fnu, torch.float32, torch.uint8),
    torch.uint8: (torch.uint8, torch.float8_e8m0fnu),
    torch.int32: (torch.int32,),
    torch.int64: (torch.int64, torch.int32),
}


def load_strictly(
    model: nn.Module,
    weights: Iterable[tuple[str, torch.Tensor]],
    find: Callable[[str, Any], Place],
    what: str,
) -> set[str]:
    """Loads checkpoint tensors into `model` and returns the names of the parameters it filled.

    Args:
        weights: (official name, tensor) pairs; tensors may be lazily mapped from disk.
        find: places a name, see `naming`.
        what: the model's role, for messages.

    Raises:
        LingError: for a tensor nobody consumes, a source dtype that does not fit, a tensor read twice, a parameter or
            part of one that nothing filled.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    filled: dict[str, set[Any]] = {}
    for name, tensor in weights:
        target = find(name, parameters)
        if target == "elsewhere" or "rotary_emb.inv_freq" in name:
            continue
        if target is None:
            if is_pp_missing_parameter(name.replace(".attention.", ".self_attn."), model):
                continue
            raise LingError(
                f"{name}: the checkpoint holds this tensor, but the {what} has no parameter for it"
            )
        param = parameters[target.name]
        _check_dtype(name, tensor, target.name, param)
        parts = filled.setdefault(target.name, set())
        if target.shard in parts:
            raise LingError(f"{name}: the checkpoint holds this tensor twice")
        parts.add(target.shard)
        _load(model, name, tensor, target, param)
    _check_complete(model, parameters, filled, what)
    return set(filled)


def _check_dtype(name: str, tensor: torch.Tensor, parameter: str, param: Any) -> None:
    allowed = getattr(param, "ling_source_dtypes", None) or _SOURCES.get(param.dtype)
    if allowed is None or tensor.dtype in allowed:
        return
    hint = ""
    if tensor.dtype == torch.float8_e4m3fn:
        hint = "; its scale would be dropped"
    elif param.dtype == torch.float8_e4m3fn:
        hint = "; is the module missing from quantization_config.modules_to_not_convert?"
    raise LingError(
        f"{name}: stored as {_short(tensor.dtype)}, but {parameter} holds {_short(param.dtype)}{hint}"
    )


def _load(model: Any, name: str, tensor: torch.Tensor, target: Target, param: Any) -> None:
    tensor = _maybe_pad_block_fp8_shared_expert_checkpoint_tensor(
        model.quant_config, model.config, name, tensor
    )
    if tensor.dtype == torch.uint8 and param.dtype == torch.float8_e8m0fnu:
        tensor = tensor.view(torch.float8_e8m0fnu)
    loader = getattr(param, "weight_loader", default_weight_loader)
    try:
        if target.shard is None:
            loader(param, tensor)
        elif isinstance(target.shard, int):
            loader(param, tensor, target.shard)
        else:
            expert, shard = target.shard
            loader(param, tensor, target.name, expert_id=expert, shard_id=shard)
    except LingError:
        raise
    except (AssertionError, RuntimeError, ValueError) as error:
        reason = str(error) or type(error).__name__
        raise LingError(
            f"{name} {list(tensor.shape)} does not fit {target.name} {list(param.shape)}: {reason}"
        ) from error


def _check_complete(model: Any, parameters: dict[str, Any], filled: dict[str, set[Any]], what: str) -> None:
    missing = []
    # A parameter may be reachable under several names (the router's bias is); one filled name is enough.
    done = {id(parameters[name]) for name in filled}
    for name, param in parameters.items():
        alias = name not in filled and id(param) in done
        if alias or getattr(param, "ling_computed", False) or is_pp_missing_parameter(name, model):
            continue
        expected = _expected_parts(name, model.config.num_experts)
        lost = expected - filled.get(name, set())
        if lost:
            missing.append(_missing(name, lost, expected))
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise LingError(f"{missing[0]}: nothing in the checkpoint fills this parameter of the {what}{more}")


def _expected_parts(name: str, experts: int) -> set[Any]:
    if ".experts." in name:
        shards = ("w1", "w3") if ".w13_" in name else ("w2",)
        return {(expert, shard) for expert in range(experts) for shard in shards}
    component = name.split(".")[-2]
    merged = {index for parameter, _, index in MERGED if parameter == component}
    return merged or {None}


def _missing(name: str, lost: set[Any], expected: set[Any]) -> str:
    if lost == expected:
        return name
    part = min(lost, key=str)
    described = f"expert {part[0]} {part[1]}" if isinstance(part, tuple) else f"part {part}"
    return f"{name} ({described}, {len(lost)} of {len(expected)} parts)"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
