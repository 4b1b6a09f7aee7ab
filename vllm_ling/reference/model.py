# SPDX-License-Identifier: Apache-2.0
"""LingReference: an independent fp32 Ling model in plain torch, a parity oracle that can also be trained.

It shares no code with vLLM. `state_dict()` names are the official checkpoint's, with routed experts stacked.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from vllm_ling.reference.cache import Cache, KdaState, MlaState
from vllm_ling.reference.config import ReferenceConfig
from vllm_ling.reference.layers import MLP, KdaAttention, MlaAttention, RMSNorm, attend, linear
from vllm_ling.reference.moe import MoE


class DecoderLayer(nn.Module):
    """Pre-norm attention (KDA or MLA) and feed-forward (dense or MoE), each added to the residual stream."""

    def __init__(self, config: ReferenceConfig, layer: int) -> None:
        super().__init__()
        eps, hidden = config.rms_norm_eps, config.hidden_size
        self.input_layernorm = RMSNorm(hidden, eps)
        self.attention = KdaAttention(config) if config.is_kda(layer) else MlaAttention(config)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.mlp = MoE(config, layer) if config.is_moe(layer) else MLP(hidden, config.intermediate_size)

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        visible: Tensor,
        mask: Tensor | None,
        cache: Cache | None,
        layer: int,
    ) -> Tensor:
        normed = self.input_layernorm(x)
        state = None if cache is None else cache.layers.get(layer)
        if isinstance(self.attention, KdaAttention):
            kda = state if isinstance(state, KdaState) else self.attention.new_state(x)
            x = x + self.attention(normed, kda, mask)
            state = kda
        else:
            state = state if isinstance(state, MlaState) else MlaState()
            x = x + self.attention(normed, positions, state, visible)
        if cache is not None:
            cache.layers[layer] = state
        return x + self.feed_forward(x, mask)

    def feed_forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """The normalized feed-forward branch, without its residual."""
        normed = self.post_attention_layernorm(x)
        out: Tensor = self.mlp(normed, mask) if isinstance(self.mlp, MoE) else self.mlp(normed)
        return out


class MtpLayer(DecoderLayer):
    """The multi-token-prediction layer: mixes the next token's embedding with the previous hidden state."""

    def __init__(self, config: ReferenceConfig, layer: int) -> None:
        super().__init__(config, layer)
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.attention: MlaAttention = MlaAttention(config)
        self.enorm, self.hnorm, self.final_layernorm = (RMSNorm(hidden, eps) for _ in range(3))
        self.eh_proj = linear(2 * hidden, hidden)

    def mix(self, embedding: Tensor, previous: Tensor) -> Tensor:
        """Token embedding and previous hidden [B, T, hidden] -> the layer's residual stream."""
        out: Tensor = self.eh_proj(torch.cat([self.enorm(embedding), self.hnorm(previous)], dim=-1))
        return out.float()

    def draft_step(
        self,
        embedding: Tensor,
        previous: Tensor,
        earlier: list[tuple[Tensor, Tensor]],
        mask: Tensor | None = None,
    ) -> Tensor:
        """One draft step of every slot at once.

        Slot i stands at position i + step, where step is the length of `earlier`. It attends to the step-0 entries of
        the slots up to i and to its own entries of later steps.

        Args:
            embedding: of the token each slot is fed, [B, T, hidden].
            previous: hidden state before that token, [B, T, hidden].
            earlier: keys and values of the steps before this one; this step's are added.
            mask: [B, T] bool, False where a token must not count in the experts' `load`.

        Returns:
            The layer's final-norm hidden states [B, T, hidden].
        """
        slots = torch.arange(embedding.shape[1], device=embedding.device)
        x = self.mix(embedding, previous)
        normed = self.input_layernorm(x)
        q, k, v = self.attention.project(normed, (slots + len(earlier)).unsqueeze(0))
        earlier.append((k, v))
        causal = (slots <= slots.unsqueeze(1)).unsqueeze(0)
        x = x + self.attention.output(attend(q, *earlier[0], causal, earlier[1:]), normed)
        out: Tensor = self.final_layernorm(x + self.feed_forward(x, mask))
        return out


class Decoder(nn.Module):
    """Embedding, decoder layers (MTP layers last, as in the checkpoint) and the final norm."""

    def __init__(self, config: ReferenceConfig) -> None:
        super().__init__()
        depth = config.num_hidden_layers
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            [DecoderLayer(config, i) for i in range(depth)]
            + [MtpLayer(config, depth + i) for i in range(config.num_nextn_predict_layers)]
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class LingReference(nn.Module):
    """A Ling model with an untied head.

    Args:
        config: dimensions.
        ignore_clamps: a negative control: every SwiGLU limit is dropped.
        drop_expert: a negative control: (layer, expert) whose routed contribution is zeroed.
    """

    def __init__(
        self,
        config: ReferenceConfig,
        ignore_clamps: bool = False,
        drop_expert: tuple[int, int] | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        self.lm_head = linear(config.hidden_size, config.vocab_size)
        for layer, moe in self.moe_layers():
            if ignore_clamps:
                moe.limit = moe.shared_experts.limit = None
            if drop_expert is not None and drop_expert[0] == layer:
                moe.dropped = drop_expert[1]

    def moe_layers(self) -> Iterator[tuple[int, MoE]]:
        """(layer index, MoE block), MTP layers included."""
        for index, layer in enumerate(self.model.layers):
            if isinstance(layer.mlp, MoE):
                yield index, layer.mlp

    def set_parallel(self, enabled: bool = True) -> "LingReference":
        """Picks the forms for large batches, chunked KDA and dense experts; the function stays the same."""
        for module in self.modules():
            if isinstance(module, KdaAttention):
                module.chunked = enabled
            if isinstance(module, MoE):
                module.dense = enabled
        return self

    def hidden(self, tokens: Tensor, cache: Cache | None = None, mask: Tensor | None = None) -> Tensor:
        """Final-norm hidden states.

        Args:
            tokens: [B, T] int64, the tokens after those already in `cache`.
            cache: advanced in place; None computes from scratch and keeps nothing.
            mask: [B, T] bool, False at padding (left padding when decoding goes on afterwards).

        Returns:
            [B, T, hidden] float32.
        """
        seen = cache or Cache()
        positions, visible = seen.extend(torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask)
        x = self.model.word_embeddings(tokens).float()
        for index in range(self.config.num_hidden_layers):
            x = self.model.layers[index](x, positions, visible, mask, cache, index)
        normed: Tensor = self.model.norm(x)
        return normed

    def forward(self, tokens: Tensor, cache: Cache | None = None, mask: Tensor | None = None) -> Tensor:
        """Logits [B, T, vocab] float32; arguments as `hidden`."""
        return self.logits(self.hidden(tokens, cache, mask))

    def logits(self, hidden: Tensor) -> Tensor:
        """Head of the target and of every draft step: [..., hidden] -> [..., vocab] float32."""
        out: Tensor = self.lm_head(hidden)
        return out.float()

    def mtp_layer(self) -> MtpLayer:
        """The layer that drafts."""
        layer = self.model.layers[self.config.num_hidden_layers]
        assert isinstance(layer, MtpLayer)
        return layer

    def mtp_rollout(
        self, tokens: Tensor, hidden: Tensor, steps: int, mask: Tensor | None = None
    ) -> list[Tensor]:
        """Draft hidden states of all positions at once, with the draft tokens forced to `tokens`.

        Slot i of step j (from 0) is what vLLM's proposer computes when it drafts after token i + 1: token i +
        1 + j at position i + j, previous hidden = the target's final norm output (j = 0) or the MTP layer's
        own final norm output (j > 0). It attends to the step-0 entries of slots up to i and to its own
        earlier draft steps. Its head output predicts token i + 2 + j. Where that token does not exist the
        slot is meaningless.

        Args:
            tokens: [B, T]. hidden: [B, T, hidden] from `hidden(tokens)`. steps: draft length k.
            mask: [B, T] bool, False where a token must not count in the experts' `load`.

        Returns:
            k tensors [B, T, hidden].
        """
        layer = self.mtp_layer()
        last = tokens.shape[1] - 1
        slots = torch.arange(last + 1, device=tokens.device)
        embedded = self.model.word_embeddings(tokens).float()
        earlier: list[tuple[Tensor, Tensor]] = []
        results: list[Tensor] = []
        for step in range(steps):
            fed = embedded[:, (slots + 1 + step).clamp(max=last)]
            hidden = layer.draft_step(fed, hidden, earlier, mask)
            results.append(hidden)
        return results

    @torch.inference_mode()
    def generate(
        self, prompts: list[list[int]], max_new_tokens: int, stop: frozenset[int]
    ) -> list[list[int]]:
        """Greedy continuations of a batch, each ending after a token of `stop` or at `max_new_tokens`.

        Prompts are padded on the left; the mask keeps padding out of every state.
        """
        device = self.lm_head.weight.device
        width = max(map(len, prompts))
        tokens = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=device)
        lengths = torch.tensor([len(p) for p in prompts], device=device)
        mask = torch.arange(width, device=device) >= width - lengths.unsqueeze(1)
        stop_ids = torch.tensor(sorted(stop), device=device)
        cache, produced = Cache(), []
        done = torch.zeros(len(prompts), dtype=torch.bool, device=device)
        for step in range(max_new_tokens):
            last = self.hidden(tokens, cache, mask)[:, -1]
            token = self.logits(last).argmax(-1)
            produced.append(token)
            done |= torch.isin(token, stop_ids)
            # Asking the device whether all have ended stalls it, so ask seldom.
            if step % 8 == 7 and bool(done.all()):
                break
            tokens, mask = token.unsqueeze(1), torch.ones_like(token, dtype=torch.bool).unsqueeze(1)
        return [_until_stop(row, stop) for row in torch.stack(produced, dim=1).tolist()]


def _until_stop(row: list[int], stop: frozenset[int]) -> list[int]:
    """The row up to and including its first stop token."""
    for index, token in enumerate(row):
        if token in stop:
            return row[: index + 1]
    return row
