# SPDX-License-Identifier: Apache-2.0
"""The fields of a Ling `config.json` that the reference model needs, checked once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_ling.errors import LingError


@dataclass(frozen=True)
class ReferenceConfig:
    """Dimensions of one Ling model; the names are those of `config.json`.

    `routed_limits` and `shared_limits` hold one SwiGLU clamp per decoder layer, None where a layer has none;
    MTP layers lie past their end and are never clamped.
    """

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
    routed_scaling_factor: float
    first_k_dense_replace: int
    layer_group_size: int
    num_nextn_predict_layers: int
    short_conv_kernel_size: int
    kda_lower_bound: float
    mla_gate: str | None
    rope_theta: float
    rms_norm_eps: float
    routed_limits: tuple[float | None, ...]
    shared_limits: tuple[float | None, ...]

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "ReferenceConfig":
        """Reads a `config.json` dictionary.

        Raises:
            LingError: a key is missing, or names a variant that this model does not compute.
        """

        def need(key: str) -> Any:
            if config.get(key) is None:
                raise LingError(f"config.json: {key} is missing")
            return config[key]

        _reject_variants(config)
        layers = int(need("num_hidden_layers"))
        rope = config.get("rope_parameters") or {}
        return cls(
            vocab_size=int(need("vocab_size")),
            hidden_size=int(need("hidden_size")),
            num_hidden_layers=layers,
            num_attention_heads=int(need("num_attention_heads")),
            head_dim=int(need("head_dim")),
            q_lora_rank=config.get("q_lora_rank"),
            kv_lora_rank=int(need("kv_lora_rank")),
            qk_nope_head_dim=int(need("qk_nope_head_dim")),
            qk_rope_head_dim=int(need("qk_rope_head_dim")),
            v_head_dim=int(need("v_head_dim")),
            intermediate_size=int(need("intermediate_size")),
            moe_intermediate_size=int(need("moe_intermediate_size")),
            shared_intermediate_size=int(need("moe_shared_expert_intermediate_size"))
            * int(config.get("num_shared_experts", 1)),
            num_experts=int(need("num_experts")),
            num_experts_per_tok=int(need("num_experts_per_tok")),
            n_group=int(need("n_group")),
            topk_group=int(need("topk_group")),
            routed_scaling_factor=float(config.get("routed_scaling_factor", 1.0)),
            first_k_dense_replace=int(need("first_k_dense_replace")),
            layer_group_size=int(need("layer_group_size")),
            num_nextn_predict_layers=int(config.get("num_nextn_predict_layers", 0)),
            short_conv_kernel_size=int(config.get("short_conv_kernel_size", 4)),
            kda_lower_bound=float(config.get("kda_lower_bound", -5.0)),
            mla_gate=config.get("gated_attention_proj_granularity_type"),
            rope_theta=float(config["rope_theta"] if "rope_theta" in config else rope.get("rope_theta", 6e6)),
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            routed_limits=_limits(config.get("expert_swiglu_limit_list"), layers),
            shared_limits=_limits(config.get("share_expert_swiglu_limit_list"), layers),
        )

    def is_kda(self, layer: int) -> bool:
        """Whether decoder layer `layer` is KDA; the last of each group and any remainder are MLA."""
        grouped = self.num_hidden_layers // self.layer_group_size * self.layer_group_size
        return layer < grouped and (layer + 1) % self.layer_group_size != 0

    def is_moe(self, layer: int) -> bool:
        """Whether `layer` (MTP layers included) has routed experts."""
        return layer >= self.first_k_dense_replace

    def limit(self, layer: int, shared: bool) -> float | None:
        """SwiGLU clamp of a layer's shared or routed experts, None where there is none."""
        limits = self.shared_limits if shared else self.routed_limits
        return limits[layer] if layer < len(limits) else None


def _limits(values: Sequence[float | None] | None, layers: int) -> tuple[float | None, ...]:
    return tuple(float(v) if v else None for v in (values or [])[:layers])


def _reject_variants(config: Mapping[str, Any]) -> None:
    """Refuses what Ling configs may say but no published Ling checkpoint uses."""
    expected: dict[str, tuple[Any, ...]] = {
        "tie_word_embeddings": (False, None),
        "no_kda_lora": (True,),
        "kda_safe_gate": (True, None),
        "rope_scaling": (None,),
        "hidden_act": ("silu", None),
        "use_bias": (False, None),
    }
    for key, allowed in expected.items():
        if config.get(key) not in allowed:
            raise LingError(
                f"config.json: {key} = {config.get(key)!r} is not supported by the reference model"
            )
