# SPDX-License-Identifier: Apache-2.0
"""The `quantization_config` section of config.json that declares each official format."""

from typing import Any

from vllm_ling.checkpoint.shapes import LingShape

_LORA_PROJECTIONS = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")


def quantization_section(shape: LingShape, fmt: str) -> dict[str, Any]:
    """What a checkpoint of these dimensions declares when it is stored as `fmt` (fp8, fp4 or int4)."""
    if fmt == "int4":
        return _int4_section()
    section: dict[str, Any] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "scale_fmt": "ue8m0",
        "modules_to_not_convert": _unquantized_modules(shape),
    }
    if fmt == "fp4":
        section |= {"routed_experts_quant_method": "mxfp4", "routed_experts_group_size": 32}
    return section


def _unquantized_modules(shape: LingShape) -> list[str]:
    """Linear modules that stay BF16: the KDA beta, the MLA gate and, where the query is compressed, all MLA LoRAs."""
    mla = [layer for layer in shape.layers if not shape.is_kda(layer)]
    modules = ["b_proj", *(f"{layer}.attention.g_proj" for layer in mla)]
    if shape.q_lora_rank is not None:
        modules += [f"{layer}.attention.{name}" for layer in mla for name in _LORA_PROJECTIONS]
    return modules


def _int4_section() -> dict[str, Any]:
    """compressed-tensors: routed experts only, group 32, symmetric."""
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": 32,
        "dynamic": False,
        "actorder": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": [r"re:.*\.mlp\.experts\.\d+\.(gate|up|down)_proj$"],
                "weights": weights,
                "input_activations": None,
                "output_activations": None,
            }
        },
        "ignore": ["lm_head", r"re:.*\.attention\..*", r"re:.*\.shared_experts\..*", r"re:.*\.mlp\.gate$"],
    }
