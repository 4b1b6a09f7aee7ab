# SPDX-License-Identifier: Apache-2.0
"""Injected faults: the output head and the draft's."""

from tests.doctor.evidence import GPU_RECORD, LIVE, LOG, STATIC, but, lines, live
from tests.doctor.faults.common import (
    BARE_LOG,
    NO_CHECKPOINT,
    NO_LOG,
    NO_OWN_SERIES,
    STOCK_FP8_HEAD,
    Fault,
    fp8_head,
    ling,
    record,
    words,
)

HEAD = [
    Fault(
        "BF16 for an obstacle",
        "head_format",
        "warn",
        "draft_lm_head_quantization",
        lines(
            LOG,
            (
                r"lm_head = fp8_online .*",
                (
                    "lm_head = bf16 (speculative_config.draft_lm_head_quantization=fp8 copies "
                    "an unquantized target head)"
                ),
            ),
        ),
    ),
    Fault(
        "BF16 although FP8 was asked",
        "head_format",
        "fail",
        "was asked for",
        lines(LOG, ling(lm_head="fp8"), (r"lm_head = fp8_online .*", "lm_head = bf16 (some reason)")),
    ),
    Fault(
        "BF16 on purpose",
        "head_format",
        "warn",
        "leave ling.lm_head out",
        but(STATIC, words=words("--additional-config", '{"ling": {"lm_head": "bf16"}}')),
        STATIC,
        NO_CHECKPOINT,
    ),
    Fault("stock BF16 head", "head_format", "fail", "stock vLLM keeps", BARE_LOG),
    Fault(
        "stock BF16 head, live",
        "head_format",
        "fail",
        "stock vLLM keeps",
        NO_OWN_SERIES,
        LIVE,
        live(LIVE, traffic={"vllm:unrelated": 1.0}, record={**GPU_RECORD, "choices": {}}),
    ),
    Fault(
        "FP32 logits",
        "head_dtype",
        "warn",
        "head_dtype",
        but(STATIC, words=words("--hf-overrides", '{"head_dtype": "float32"}')),
        STATIC,
        NO_LOG,
    ),
    Fault(
        "FP32 logits, live",
        "head_dtype",
        "warn",
        "float32",
        live(LIVE, info={"head_dtype": "float32"}),
        LIVE,
        NO_OWN_SERIES,
    ),
    Fault(
        "FP8 head on stock vLLM",
        "head_scale",
        "fail",
        "without its scale",
        STOCK_FP8_HEAD,
        but(LOG, tensors=fp8_head(True)),
        NO_CHECKPOINT,
    ),
    Fault(
        "FP8 head on stock vLLM, full acceptance",
        "head_scale",
        "fail",
        "proves nothing",
        but(live(LIVE, record=None), tensors=fp8_head(True)),
        but(LIVE, tensors=fp8_head(True)),
        NO_CHECKPOINT,
    ),
    Fault(
        "FP8 head without scale",
        "head_scale",
        "fail",
        "neither",
        but(STATIC, tensors=fp8_head(False)),
        but(STATIC, tensors=fp8_head(True)),
        NO_CHECKPOINT,
    ),
    Fault(
        "draft reads bytes",
        "draft_head",
        "fail",
        "draft_head_not_shared",
        lines(
            LOG, (r"PROOF ok: draft_head: .*", "FAULT draft_head_not_shared: not the target's lm_head module")
        ),
    ),
    Fault(
        "draft head without scale, live",
        "draft_head",
        "fail",
        "draft_head_no_scale",
        record(faults={"draft_head_no_scale": "weight is FP8 without a scale"}, proofs={}),
        LIVE,
        record(proofs={}),
    ),
    Fault(
        "draft head NaN",
        "draft_head",
        "fail",
        "NaN",
        record(faults={"draft_head_nan": "weight holds NaN or Inf"}, proofs={}),
        LIVE,
        record(proofs={}),
    ),
    Fault(
        "second head for drafting",
        "draft_head_copies",
        "warn",
        "second copy",
        lines(
            LOG,
            (
                r"'num_speculative_tokens': 3",
                "'num_speculative_tokens': 3, 'draft_lm_head_quantization': 'fp8'",
            ),
        ),
    ),
    Fault("stock draft head", "draft_head_copies", "warn", "loads a head for the draft", BARE_LOG),
]
