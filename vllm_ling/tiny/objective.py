# SPDX-License-Identifier: Apache-2.0
"""How tiny-ling learns: initial weights, loss, expert balancing, and training for the coming quantization."""

import math
import re
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm_ling.quant.block_fp8 import dequantize_block_fp8, quantize_block_fp8
from vllm_ling.quant.mxfp4 import dequantize_mxfp4, quantize_mxfp4
from vllm_ling.reference.model import LingReference
from vllm_ling.tiny.corpus import KIND_WEIGHT, PADDING

MTP_STEPS = 3
MTP_WEIGHT = 0.3

_OUTPUT_PROJECTION = re.compile(r"\.(o_proj|dense|down_proj)(\.weight)?$")
# MLA's head-wise g_proj and the KDA b_proj have one row per head and stay unquantized.
_BLOCK_FP8 = re.compile(
    r"\.((q|k|v|f|g|o|q_a|q_b|kv_b|gate|up|down|eh)_proj|kv_a_proj_with_mqa|dense)\.weight$"
)


def init_weights(model: LingReference, seed: int) -> None:
    """Fills every parameter: matrices with variance 1 / inputs, less where they write to the residual."""
    generator = torch.Generator().manual_seed(seed)
    config = model.config
    branches = 2 * (config.num_hidden_layers + config.num_nextn_predict_layers)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            continue
        values = torch.empty(parameter.shape)
        if name.endswith("A_log"):
            values.zero_()
        elif name.endswith("dt_bias"):
            # With A_log = 0, sigmoid of this times the lower bound: memories from about 1 to 130 tokens.
            values.uniform_(-6.5, -1.0, generator=generator)
        elif name.endswith("conv1d.weight"):
            values.uniform_(-0.5, 0.5, generator=generator)
        elif name.endswith("word_embeddings.weight"):
            values.normal_(0.0, 0.5, generator=generator)
        else:
            scale = 1 / math.sqrt(parameter.shape[-1])
            if _OUTPUT_PROJECTION.search(name):
                scale /= math.sqrt(branches)
            values.normal_(0.0, scale, generator=generator)
        with torch.no_grad():
            parameter.copy_(values)


class Objective(nn.Module):
    """Next-token loss plus the mean loss of `MTP_STEPS` recursive draft steps on the same text."""

    def __init__(self, model: LingReference) -> None:
        super().__init__()
        self.model = model
        self.kind_weight: Tensor
        self.register_buffer("kind_weight", torch.tensor(KIND_WEIGHT), persistent=False)

    def forward(self, tokens: Tensor, kinds: Tensor) -> tuple[Tensor, Tensor]:
        """tokens, kinds [B, T] int64 (see corpus) -> (next-token loss, draft loss), both scalars."""
        mask = kinds != PADDING
        weight = self.kind_weight[kinds]
        hidden = self.model.hidden(tokens, mask=mask)
        main = self._loss(hidden, tokens, weight, ahead=1)
        drafts = self.model.mtp_rollout(tokens, hidden, MTP_STEPS, mask)
        losses = [self._loss(h, tokens, weight, ahead=2 + step) for step, h in enumerate(drafts)]
        return main, torch.stack(losses).mean()

    def _loss(self, hidden: Tensor, tokens: Tensor, weight: Tensor, ahead: int) -> Tensor:
        """Weighted cross entropy of predicting the token `ahead` places on."""
        logits = self.model.logits(hidden[:, :-ahead])
        each = F.cross_entropy(logits.flatten(0, 1), tokens[:, ahead:].flatten(), reduction="none")
        scale = weight[:, ahead:].flatten()
        return (each * scale).sum() / scale.sum().clamp(min=1.0)


@torch.no_grad()
def balance_experts(model: LingReference, rate: float) -> None:
    """Raises the selection bias of experts that saw fewer tokens than the mean and lowers the others'."""
    for _, moe in model.moe_layers():
        if moe.load is not None:
            moe.gate.expert_bias += rate * torch.sign(moe.load.mean() - moe.load)
            moe.load = None


def quantized_weights(model: LingReference) -> Iterator[tuple[str, Tensor]]:
    """The weights that the FP4 checkpoint stores in fewer bits, as it will read them back.

    Gradients pass straight through to the underlying parameter.
    """
    for name, weight in model.named_parameters():
        if ".mlp.experts." in name:
            with torch.no_grad():
                rounded = dequantize_mxfp4(*quantize_mxfp4(weight.detach()), dtype=torch.float32)
        elif _BLOCK_FP8.search(name) and weight.shape[0] > model.config.num_attention_heads:
            with torch.no_grad():
                rounded = dequantize_block_fp8(*quantize_block_fp8(weight.detach()), dtype=torch.float32)
        else:
            continue
        yield name, weight + (rounded - weight).detach()


def parameter_groups(model: LingReference, weight_decay: float) -> list[dict[str, object]]:
    """Matrices decay; norms, gates' time constants, biases and the embedding do not."""
    decayed: list[Tensor] = []
    free: list[Tensor] = []
    for name, parameter in model.named_parameters():
        matrix = parameter.dim() >= 2 and not name.endswith(("conv1d.weight", "word_embeddings.weight"))
        (decayed if matrix else free).append(parameter)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": free, "weight_decay": 0.0}]
