# SPDX-License-Identifier: Apache-2.0
"""The fp32 reference on shapes that do not fit in memory: one layer at a time, over all texts at once.

Every token is forced, so a text is one pass. Weights are made again per layer from their names and dropped after use.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from vllm_ling.eval.studies.seeded_weights import SeededWeights
from vllm_ling.reference.cache import Cache
from vllm_ling.reference.config import ReferenceConfig
from vllm_ling.reference.layers import KdaAttention
from vllm_ling.reference.model import DecoderLayer


@torch.inference_mode()
def exact_states(
    config: dict[str, Any],
    weights: SeededWeights,
    texts: Sequence[list[int]],
    layers: Sequence[int],
    logits_from: Sequence[int],
    say: Callable[[str], None] = lambda _: None,
) -> list[dict[str, Tensor]]:
    """Hidden states of each text in float32, on the CPU.

    Args:
        layers: after which the residual stream is kept.
        logits_from: per text, the first position whose logits are kept.

    Returns:
        per text: "<layer>" and "final" -> [tokens, hidden], "logits" -> [tokens - logits_from, vocabulary].
    """
    reference, device = ReferenceConfig.from_dict(config), weights.device
    embedding = weights.value("model.word_embeddings.weight")
    streams = [embedding[torch.tensor(text, device=device)].unsqueeze(0) for text in texts]
    del embedding
    found: list[dict[str, Tensor]] = [{} for _ in texts]
    for index in range(reference.num_hidden_layers):
        layer = _layer(reference, weights, index)
        for number, x in enumerate(streams):
            positions, visible = Cache().extend(torch.ones(x.shape[:2], dtype=torch.bool, device=device))
            streams[number] = layer(x, positions, visible, None, None, index)
            if index in layers:
                found[number][str(index)] = streams[number][0].cpu()
        del layer
        say(f"reference: layer {index} of {reference.num_hidden_layers}")
    norm, head = weights.value("model.norm.weight"), weights.value("lm_head.weight")
    for kept, x, begin in zip(found, streams, logits_from, strict=True):
        final = x[0] * torch.rsqrt(x[0].square().mean(-1, keepdim=True) + reference.rms_norm_eps) * norm
        kept["final"], kept["logits"] = final.cpu(), (final[begin:] @ head.T).cpu()
    return found


def _layer(config: ReferenceConfig, weights: SeededWeights, index: int) -> DecoderLayer:
    with torch.device(weights.device):
        layer = DecoderLayer(config, index)
    # In place of a second copy: routed experts of one layer are 12 GB in float32.
    layer.load_state_dict(weights.values(f"model.layers.{index}."), assign=True)
    if isinstance(layer.attention, KdaAttention):
        layer.attention.chunked = True
    return layer.eval()
