# SPDX-License-Identifier: Apache-2.0
"""The byte model of what a server serves, from its vLLM configuration."""

from typing import Any

from vllm_ling.options import parse_options
from vllm_ling.roofline.bytes import ByteModel, HeadFormat
from vllm_ling.roofline.models import model_shape
from vllm_ling.spec_decode.draft_vocab import load_draft_vocab

# What is decided with it (draft lengths, break-even) hardly depends on the context.
CONTEXT = 1024


def served_bytes(vllm_config: Any) -> ByteModel:
    """Bytes of the served checkpoint's steps at a context of CONTEXT tokens.

    Raises:
        LingError: the checkpoint's shape or the draft vocabulary cannot be read.
    """
    options = parse_options(vllm_config.additional_config)
    shape = model_shape(vllm_config.model_config.model)
    rows = options.draft_vocab and len(load_draft_vocab(options.draft_vocab, shape.vocab_size).ids)
    head: HeadFormat = "bf16" if options.lm_head == "bf16" else "fp8"
    return ByteModel(shape, head=head, context=CONTEXT, draft_rows=rows or None)
