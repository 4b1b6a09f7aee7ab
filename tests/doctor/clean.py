# SPDX-License-Identifier: Apache-2.0
"""Sound configurations in which doctor must find nothing; the captured ones are in test_doctor_clean.py."""

import dataclasses

from tests.doctor.evidence import (
    GB10,
    GPU_INFO,
    GPU_RECORD,
    LIVE,
    LOG,
    STATIC,
    Evidence,
    but,
    chosen,
    lines,
    live,
    without,
)
from tests.doctor.faults.common import DEFAULTS, fp8_head, words
from tests.unit.checkpoint_files import Tensors, declared_tensors
from vllm_ling.checkpoint.synthetic import mini_config
from vllm_ling.quant.linear_policy import choose_linear

V1 = lines(
    LOG,
    (r"^(.*Resolved architecture: BailingMoeV3MTPModel)$", r"\1\nWARNING using the V1 model runner instead"),
)
PLAIN = lines(
    without(
        LOG,
        "SpecDecoding",
        "PROOF ok: draft_",
        "Loading drafter",
        "architecture: BailingMoeV3MTPModel",
        "vllm-ling: draft (?:decode|path)",
    ),
    (r", 'speculative_config': \{.*?\}", ""),
    (r"speculative_config=SpeculativeConfig\([^)]*\)", "speculative_config=None"),
)

# What the log of a server without the fused path does not say.
NO_FUSED = "moe.decode|(?:target|draft)_decode|vllm-ling: (?:target|draft) path"
LINEAR_ON_RANKS = choose_linear("auto", nvidia=True, one_gpu=False)


def two_ranks(evidence: Evidence) -> Evidence:
    """The log of two tensor-parallel ranks, which the decode kernels do not serve."""
    once = lines(
        without(evidence, NO_FUSED),
        DEFAULTS,
        (
            "linear 20480 x 2560 = .*",
            f"linear decode = {LINEAR_ON_RANKS[0]} ({LINEAR_ON_RANKS[1]})",
        ),
        (r"target decode = .*", "target decode = layers (it serves one GPU)"),
        ("tensor_parallel_size=1", "tensor_parallel_size=2"),
        ("'max_num_seqs'", "'tensor_parallel_size': 2, 'max_num_seqs'"),
    )
    if "draft decode" in (once.log or ""):
        once = lines(once, (r"draft decode = .*", "draft decode = layers (not one layer on one GPU)"))
    doubled = []
    for line in (once.log or "").splitlines():
        doubled.append(line.replace("(EngineCore pid=200)", "(Worker_TP0 pid=201)"))
        if "status.py" in line:
            doubled.append(line.replace("(EngineCore pid=200)", "(Worker_TP1 pid=202)"))
    return dataclasses.replace(once, log="\n".join(doubled) + "\n")


BF16 = mini_config("flash", "bf16", mtp=True, clamp=4)


def bf16_tensors(tensors: Tensors) -> None:
    """The tensors of a BF16 checkpoint instead."""
    tensors.clear()
    tensors.update(declared_tensors(BF16))


FP8 = mini_config("flash", "fp8", mtp=True, clamp=4)


def fp8_tensors(tensors: Tensors) -> None:
    """The tensors of an FP8 checkpoint instead."""
    tensors.clear()
    tensors.update(declared_tensors(FP8))


# An engine core with two workers keeps a record, but decides nothing.
RANK_RECORD = {
    **GPU_RECORD,
    "choices": chosen(
        "moe decode",
        "linear 2",
        "target path",
        "draft path",
        linear_decode=LINEAR_ON_RANKS,
        target_decode=("layers", "it serves one GPU"),
        draft_decode=("layers", "not one layer on one GPU"),
    ),
    "proofs": {code: GPU_RECORD["proofs"][code] for code in ("head_probe", "draft_head")},
}
RANKS = live(
    LIVE,
    info={"tensor_parallel_size": "2", "moe": "auto", "linear": "auto"},
    record={**GPU_RECORD, "choices": {}, "proofs": {}},
    others={"VllmWorker-0": RANK_RECORD, "VllmWorker-1": RANK_RECORD},
)
PLAIN_INFO = {**GPU_INFO, "k": "0", "method": "None"}
CLEAN = {
    "H200, V2 runner, MTP, log": LOG,
    "H200, V2 runner, plain, log": PLAIN,
    "H200, V1 runner, MTP, log": V1,
    "two ranks, MTP, log": two_ranks(LOG),
    "two ranks, plain, log": two_ranks(PLAIN),
    "GB10, Humming, MTP, log": but(LOG, gpu=GB10),
    "H200, MTP, live": LIVE,
    "H200, two ranks, MTP, live": RANKS,
    "H200, FP8 checkpoint, log": but(
        lines(
            without(LOG, NO_FUSED),
            DEFAULTS,
            (r"'kernel_config': .*?\}, ", ""),
            (
                r"Using 'HUMMING' Mxfp4 MoE backend\.",
                "Using TRITON Fp8 MoE backend out of potential backends: [].",
            ),
            ("moe mxfp4", "moe fp8"),
            (
                r"(target|draft) decode = .*",
                r"\1 decode = layers (the experts are not read by our MoE kernel (ling.moe=ling))",
            ),
        ),
        config=FP8,
        tensors=fp8_tensors,
    ),
    "H200, a draft that is no model, live": live(
        LIVE, info={"method": "ngram"}, record={**GPU_RECORD, "choices": chosen("draft")}
    ),
    "H200, plain, live": live(
        LIVE,
        info=PLAIN_INFO,
        traffic={name: None for name in LIVE.live.traffic if "spec_decode" in name} if LIVE.live else {},
        record={
            **GPU_RECORD,
            "choices": chosen("draft"),
            "proofs": {code: text for code, text in GPU_RECORD["proofs"].items() if "draft" not in code},
        },
    ),
    "GB10, Humming, MTP, live": but(LIVE, gpu=GB10),
    "V1 runner, two ranks, MTP, log": two_ranks(V1),
    "H200, V1 runner, plain, log": lines(
        PLAIN,
        (
            r"^(.*Resolved architecture: BailingMoeV3ForCausalLM)$",
            r"\1\nWARNING using the V1 model runner instead",
        ),
    ),
    "GB10, plain, static": but(
        STATIC,
        gpu=GB10,
        env={"VLLM_USE_DEEP_GEMM_E8M0": "0"},
        words=words(leave="--speculative-config"),
    ),
    "H200, no MoE backend named, static": but(STATIC, words=words(leave="--moe-backend")),
    "H200, BF16 checkpoint, static": but(STATIC, config=BF16, tensors=bf16_tensors),
    "GB10, MTP, static": but(STATIC, gpu=GB10, env={"VLLM_USE_DEEP_GEMM_E8M0": "0"}),
    "H200, MTP, static": STATIC,
    "H200, stored FP8 head, live": but(LIVE, tensors=fp8_head(True)),
}
