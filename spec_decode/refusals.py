# SPDX-License-Identifier: Apache-2.0
"""Speculation settings that vLLM would take in silence and that cannot do what they say. Pure policy."""

from dataclasses import dataclass

from vllm_ling.errors import LingError


@dataclass(frozen=True)
class DraftFacts:
    """What was asked for.

    Attributes:
        method: `speculative_config.method`; None without speculation.
        quantization: `speculative_config.quantization`, as vLLM leaves it after filling in the target's.
        target_quantization: the target's quantization method.
        mtp_layers: `num_nextn_predict_layers` of the checkpoint's config.
        draft_vocab: whether `ling.draft_vocab` is given.
        tensor_parallel: ranks that share every layer.
    """

    method: str | None
    quantization: str | None
    target_quantization: str | None
    mtp_layers: int
    draft_vocab: bool = False
    tensor_parallel: int = 1


def refuse(facts: DraftFacts) -> None:
    """Checks an MTP draft's settings.

    Raises:
        LingError: naming the setting and what to do.
    """
    if facts.draft_vocab and facts.method != "mtp":
        raise LingError(
            "ling.draft_vocab: nothing drafts with it; add --speculative-config with method mtp, or leave it out"
        )
    if facts.method != "mtp":
        return
    if facts.draft_vocab and facts.tensor_parallel > 1:
        raise LingError(
            f"ling.draft_vocab: with tensor parallel {facts.tensor_parallel} every rank holds other rows of the head, "
            "and a subset of them is not supported; leave it out"
        )
    if facts.mtp_layers < 1:
        raise LingError(
            "--speculative-config: method is mtp, but config.json has num_nextn_predict_layers = 0: this checkpoint "
            "has no MTP layer; leave the option out"
        )
    if facts.quantization not in (None, facts.target_quantization):
        raise LingError(
            f"--speculative-config: quantization={facts.quantization} would be ignored: an MTP draft is part of the "
            f"checkpoint and shares its quantization ({facts.target_quantization}); leave it out"
        )
