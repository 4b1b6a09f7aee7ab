# SPDX-License-Identifier: Apache-2.0
"""LingShape: the dimensions and the storage format that a `config.json` declares, checked for contradictions."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vllm_ling.compat import ARCHITECTURE
from vllm_ling.errors import LingError

Format = Literal["bf16", "fp8", "fp4", "int4"]

# Above any published Ling; keeps a damaged config from asking for a table of a billion tensors.
_MOST = {"num_hidden_layers": 256, "num_nextn_predict_layers": 16, "num_experts": 4096}
_MOST_ELSEWHERE = 2**24
# Variants that a config may name but neither a published Ling nor the model code here has; None: the key is absent.
_FIXED: dict[str, tuple[Any, ...]] = {
    "model_type": ("bailing_hybrid",),
    "no_kda_lora": (True,),
    "mtp_use_kda": (False, None),
    "use_bias": (False, None),
    "hidden_act": ("silu", None),
    "norm_topk_prob": (True, None),
    "score_function": ("sigmoid", None),
}


@dataclass(frozen=True)
class LingShape:
    """Dimensions of one Ling model; names follow `config.json`."""

    fmt: Format
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    intermediate_size: int
    moe_intermediate_size: int
    shared_intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    first_k_dense_replace: int
    layer_group_size: int
    short_conv_kernel_size: int
    num_nextn_predict_layers: int
    mla_gate: str | None
    routed_limits: tuple[float | None, ...]
    shared_limits: tuple[float | None, ...]
    excluded: tuple[str, ...]

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "LingShape":
        """Reads a `config.json` mapping.

        Raises:
            LingError: a key is missing, contradictory or outside what this project serves; names the key.
        """
        architectures = config.get("architectures")
        if not isinstance(architectures, list) or ARCHITECTURE not in architectures:
            raise LingError(f"config.json: architectures {architectures!r} does not hold {ARCHITECTURE}")

        def number(key: str, default: int | None = None, least: int = 1) -> int:
            value = config.get(key, default)
            most = _MOST.get(key, _MOST_ELSEWHERE)
            if type(value) is not int or not least <= value <= most:
                raise LingError(
                    f"config.json: {key} is {value!r}, expected a whole number from {least} to {most}"
                )
            return value

        if config.get("tie_word_embeddings"):
            raise LingError("config.json: tie_word_embeddings is true, but Ling's output head is untied")
        for key, allowed in _FIXED.items():
            if config.get(key) not in allowed:
                raise LingError(
                    f"config.json: {key} is {config.get(key)!r}, only {allowed[0]!r} is supported"
                )
        layers = number("num_hidden_layers")
        shared = number("num_shared_experts", 1) * number(
            "moe_shared_expert_intermediate_size", config.get("moe_intermediate_size")
        )
        fmt, excluded = _format(config.get("quantization_config"))
        q_lora_rank = config.get("q_lora_rank")
        shape = cls(
            fmt=fmt,
            vocab_size=number("vocab_size"),
            hidden_size=number("hidden_size"),
            num_hidden_layers=layers,
            num_attention_heads=number("num_attention_heads"),
            head_dim=number("head_dim", 128),
            q_lora_rank=None if q_lora_rank is None else number("q_lora_rank"),
            kv_lora_rank=number("kv_lora_rank", 512),
            qk_nope_head_dim=number("qk_nope_head_dim", 128),
            qk_rope_head_dim=number("qk_rope_head_dim", 64),
            v_head_dim=number("v_head_dim", 128),
            intermediate_size=number("intermediate_size"),
            moe_intermediate_size=number("moe_intermediate_size"),
            shared_intermediate_size=shared,
            num_experts=number("num_experts"),
            num_experts_per_tok=number("num_experts_per_tok"),
            n_group=number("n_group", 1),
            topk_group=number("topk_group", 1),
            first_k_dense_replace=number("first_k_dense_replace", 0, least=0),
            layer_group_size=number("layer_group_size"),
            short_conv_kernel_size=number("short_conv_kernel_size", 4),
            num_nextn_predict_layers=number("num_nextn_predict_layers", 0, least=0),
            mla_gate=config.get("gated_attention_proj_granularity_type"),
            routed_limits=_limits(config, "expert_swiglu_limit_list", layers),
            shared_limits=_limits(config, "share_expert_swiglu_limit_list", layers),
            excluded=excluded,
        )
        shape._check()
        return shape

    @classmethod
    def from_folder(cls, folder: Path) -> "LingShape":
        """Reads `folder/config.json`; raises LingError as `from_config`, or if the file is missing or not JSON."""
        path = folder / "config.json"
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise LingError(f"{path}: no such file") from None
        except OSError as error:
            raise LingError(f"{path}: cannot be read ({error.strerror})") from None
        except (ValueError, RecursionError):
            raise LingError(f"{path}: not valid JSON") from None
        if not isinstance(config, dict):
            raise LingError(f"{path}: not a JSON object")
        return cls.from_config(config)

    def _check(self) -> None:
        rules = (
            (self.head_dim == 128, f"head_dim is {self.head_dim}, but KDA is implemented for 128"),
            (self.num_experts % self.n_group == 0, "n_group does not divide num_experts"),
            (self.topk_group <= self.n_group, "topk_group exceeds n_group"),
            (
                self.num_experts_per_tok <= self.num_experts // self.n_group * self.topk_group,
                "num_experts_per_tok exceeds the experts of topk_group groups",
            ),
            (
                self.mla_gate in (None, "head_wise", "element_wise"),
                f"unknown gated_attention_proj_granularity_type {self.mla_gate!r}",
            ),
        )
        for holds, problem in rules:
            if not holds:
                raise LingError(f"config.json: {problem}")

    def is_kda(self, layer: int) -> bool:
        """True for a KDA (linear attention) layer, False for MLA; MTP layers are MLA."""
        whole = self.num_hidden_layers // self.layer_group_size * self.layer_group_size
        return layer < whole and (layer + 1) % self.layer_group_size != 0

    def is_moe(self, layer: int) -> bool:
        """True where the feed-forward block is routed."""
        return layer >= self.first_k_dense_replace

    def is_excluded(self, module: str) -> bool:
        """Whether quantization skips `module` (an official module name): suffix match at component boundaries."""
        return any(_is_suffix(entry, module) for entry in self.excluded)

    @property
    def layers(self) -> range:
        """Decoder layers, the MTP layers after them included."""
        return range(self.num_hidden_layers + self.num_nextn_predict_layers)


def _is_suffix(entry: str, module: str) -> bool:
    return module == entry or module.endswith(f".{entry}")


def _limits(config: Mapping[str, Any], key: str, layers: int) -> tuple[float | None, ...]:
    values = config.get(key)
    if values is None:
        return (None,) * layers
    if not isinstance(values, list) or len(values) < layers:
        raise LingError(f"config.json: {key} needs {layers} entries, one per layer")
    if not all(value is None or type(value) in (int, float) for value in values):
        raise LingError(f"config.json: {key} must hold numbers")
    if not all(0 <= value < float("inf") for value in values if value is not None):
        raise LingError(f"config.json: {key} must hold 0 (no limit) or positive numbers")
    return tuple(float(value) if value else None for value in values[:layers])


def _format(quantization: Any) -> tuple[Format, tuple[str, ...]]:
    if quantization is None:
        return "bf16", ()
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    if method == "compressed-tensors":
        ignored = _names(quantization, "ignore")
        _check_int4(quantization)
        return "int4", ignored
    if method != "fp8":
        raise LingError(
            f"config.json: quantization_config.quant_method {method!r} is not supported "
            "(fp8 and compressed-tensors are)"
        )
    if quantization.get("weight_block_size") != [128, 128]:
        raise LingError("config.json: quantization_config.weight_block_size must be [128, 128]")
    excluded = _names(quantization, "modules_to_not_convert") or _names(quantization, "ignored_layers")
    experts = quantization.get("routed_experts_quant_method")
    if experts not in (None, "mxfp4"):
        raise LingError(f"config.json: routed_experts_quant_method {experts!r} is not supported (mxfp4 is)")
    group = quantization.get("routed_experts_group_size", 32)
    if experts == "mxfp4" and group != 32:
        raise LingError(f"config.json: routed_experts_group_size {group!r} is not supported (32 is)")
    return ("fp4" if experts == "mxfp4" else "fp8"), excluded


def _names(quantization: dict[str, Any], key: str) -> tuple[str, ...]:
    values = quantization.get(key) or []
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise LingError(f"config.json: quantization_config.{key} must be a list of module names")
    return tuple(values)


def _check_int4(quantization: dict[str, Any]) -> None:
    wanted = {"num_bits": 4, "type": "int", "symmetric": True, "group_size": 32}
    groups = quantization.get("config_groups")
    groups = list(groups.values()) if isinstance(groups, dict) else []
    weights = [group.get("weights") if isinstance(group, dict) else None for group in groups]
    fits = bool(weights) and all(isinstance(w, dict) and wanted.items() <= w.items() for w in weights)
    if quantization.get("format") != "pack-quantized" or not fits:
        raise LingError(
            "config.json: quantization_config: of compressed-tensors only pack-quantized, symmetric 4-bit integers "
            "in groups of 32 are supported"
        )
