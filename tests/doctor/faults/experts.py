# SPDX-License-Identifier: Apache-2.0
"""Injected faults: kernels of experts and projections."""

from typing import Any

from tests.doctor.clean import BF16, FP8, bf16_tensors, fp8_tensors
from tests.doctor.evidence import (
    GB10,
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
from tests.doctor.faults.common import DEFAULTS, NO_CHECKPOINT, NO_OWN_SERIES, Fault, record, words
from vllm_ling.quant.linear_policy import choose_linear


def own_kernel(what: str, choice: str, reason: str) -> dict[str, Any]:
    """The record's choices with one more."""
    return {**chosen("moe decode"), what: {"what": what, "choice": choice, "reason": reason}}


def measured(reason: str, what: str, choice: str) -> Evidence:
    """A live server on a GB10 whose ling.moe=auto measured, with one choice more."""
    choices = own_kernel("moe mxfp4", "humming", reason) | {
        what: {"what": what, "choice": choice, "reason": "x"}
    }
    info = {"moe_backend": "auto", "moe": "auto", "linear": "stock"}
    return but(live(LIVE, info=info, record={**GPU_RECORD, "choices": choices}), gpu=GB10)


DEFAULT_LOG = lines(LOG, DEFAULTS)


def linear_stock(option: str, nvidia: bool) -> Evidence:
    """A live server whose projections are vLLM's, with the reason that the policy gives."""
    choices = chosen("linear 2", linear_decode=choose_linear(option, nvidia=nvidia, one_gpu=True))
    return live(LIVE, info={"linear": option}, record={**GPU_RECORD, "choices": choices})


OWN = live(
    LIVE, info={"moe": "ling"}, record={**GPU_RECORD, "choices": own_kernel("moe decode", "ling", "agrees")}
)

EXPERTS = [
    Fault(
        "emulation, live",
        "moe_backend",
        "fail",
        "dequantizes",
        record(choices=own_kernel("moe backend", "EMULATION", "Mxfp4MoEMethod")),
        LIVE,
        record(choices={}),
    ),
    Fault(
        "Marlin on a GB10, live",
        "moe_backend",
        "warn",
        "--moe-backend humming",
        but(
            live(
                LIVE,
                info={"moe_backend": "auto", "moe": "auto"},
                record={**GPU_RECORD, "choices": own_kernel("moe backend", "MARLIN", "Mxfp4MoEMethod")},
            ),
            gpu=GB10,
        ),
        but(LIVE, gpu=GB10),
        record(choices={}),
    ),
    Fault(
        "Marlin on a GB10, nothing measured",
        "moe_backend",
        "warn",
        "--moe-backend humming",
        measured("auto: vLLM's own choice; nothing could be measured: x", "moe backend", "MARLIN"),
        measured("auto measured marlin fastest, us a block: marlin 70.1/95.2", "moe backend", "MARLIN"),
    ),
    Fault(
        "measured decode kernel not honoured",
        "decode_kernels",
        "fail",
        "moe decode = stock",
        measured("auto measured ling fastest, us a block: ling 21.0/45.2", "moe decode", "stock"),
        measured("auto measured ling fastest, us a block: ling 21.0/45.2", "moe decode", "ling"),
        measured("auto measured ling fastest, us a block: ling 21.0/45.2", "moe backend", "HUMMING"),
    ),
    Fault(
        "decode kernel not honoured",
        "decode_kernels",
        "fail",
        "compiler missing",
        live(OWN, record={**GPU_RECORD, "choices": own_kernel("moe decode", "stock", "compiler missing")}),
        OWN,
        live(OWN, record={**GPU_RECORD, "choices": chosen("moe decode")}),
    ),
    Fault(
        "decode kernels of the projections fell back, by default",
        "decode_kernels",
        "warn",
        "linear 4096 x 2560 = stock: CompileError",
        live(
            LIVE,
            info={"linear": "auto"},
            record={
                **GPU_RECORD,
                "choices": own_kernel(
                    "linear 4096 x 2560", "stock", "CompileError: nvrtc: no such architecture"
                ),
            },
        ),
        live(LIVE, info={"linear": "auto"}),
        NO_OWN_SERIES,
    ),
    Fault(
        "the head's argmax kernel fell back, by default",
        "decode_kernels",
        "warn",
        "lm_head argmax kernel = none: it misses",
        live(
            LIVE,
            info={"linear": "auto"},
            record={
                **GPU_RECORD,
                "choices": own_kernel("lm_head argmax kernel", "none", "it misses the largest logit"),
            },
        ),
        live(LIVE, info={"linear": "auto"}),
        NO_OWN_SERIES,
    ),
    Fault(
        "decode kernels asked on another vendor's GPU",
        "decode_kernels",
        "fail",
        "ling.linear=ling: the kernel needs an NVIDIA GPU",
        linear_stock("ling", nvidia=False),
        linear_stock("auto", nvidia=False),
        record(choices=chosen("linear")),
    ),
    Fault(
        "decode kernels asked on another vendor's GPU, by the reason alone",
        "decode_kernels",
        "fail",
        "ling.linear=ling: the kernel needs an NVIDIA GPU",
        live(linear_stock("ling", nvidia=False), info={"linear": None}),
        linear_stock("stock", nvidia=True),
        live(LIVE, info={"linear": None}, record={**GPU_RECORD, "choices": chosen("linear")}),
    ),
    Fault(
        "no decision about the projections, by default",
        "decode_kernels",
        "unknown",
        "no decision about the kernels of the block-FP8 projections",
        without(DEFAULT_LOG, "vllm-ling: linear"),
        DEFAULT_LOG,
    ),
    Fault(
        "no decision about any kernel of ours",
        "decode_kernels",
        "unknown",
        "no decision about the kernels of the block-FP8 projections",
        but(
            without(DEFAULT_LOG, "vllm-ling: linear", "moe.decode"),
            config=FP8,
            tensors=fp8_tensors,
        ),
        but(without(DEFAULT_LOG, "vllm-ling: linear", "moe.decode"), config=BF16, tensors=bf16_tensors),
    ),
    Fault(
        "no decision about any kernel of ours, format not known",
        "decode_kernels",
        "unknown",
        "no decision about the kernels of the block-FP8 projections",
        but(without(DEFAULT_LOG, "vllm-ling: linear", "moe.(?:decode|mxfp4)"), config=None),
        but(DEFAULT_LOG, config=None),
    ),
    Fault(
        "decode kernels of the projections not honoured, by log",
        "decode_kernels",
        "fail",
        "scales are not",
        lines(
            LOG,
            (
                r"'speculative_config'",
                "'additional_config': {'ling': {'linear': 'ling'}}, 'speculative_config'",
            ),
            (
                r"vllm-ling: lm_head = .*",
                "vllm-ling: linear 4096 x 2560 = stock (its scales are not 128 x 128)",
            ),
        ),
    ),
    Fault(
        "emulation",
        "moe_backend",
        "fail",
        "dequantizes",
        lines(LOG, (r"'HUMMING' Mxfp4", "'EMULATION' Mxfp4")),
    ),
    Fault(
        "Marlin on a GB10",
        "moe_backend",
        "warn",
        "--moe-backend humming",
        but(
            lines(
                LOG,
                (r"'HUMMING' Mxfp4", "'MARLIN' Mxfp4"),
                (r"'moe_backend': 'humming'", "'moe_backend': 'auto'"),
                (r"'moe': 'ling', ", ""),
            ),
            gpu=GB10,
        ),
        but(LOG, gpu=GB10),
    ),
    Fault(
        "Humming asked, Marlin runs",
        "moe_backend",
        "fail",
        "was asked for",
        lines(LOG, (r"'HUMMING' Mxfp4", "'MARLIN' Mxfp4"), (r"'moe': 'ling', ", "")),
    ),
    Fault(
        "experts in BF16",
        "moe_backend",
        "fail",
        "run unquantized",
        lines(
            LOG,
            (
                r"Using 'HUMMING' Mxfp4 MoE backend.",
                "Using TRITON Unquantized MoE backend out of potential backends: [].",
            ),
        ),
    ),
    Fault(
        "reference experts, live",
        "moe_backend",
        "fail",
        "reference",
        record(
            choices={
                **GPU_RECORD["choices"],
                "moe mxfp4": {"what": "moe mxfp4", "choice": "reference", "reason": "x"},
            }
        ),
        LIVE,
        record(choices={}),
    ),
    Fault(
        "8-bit activations",
        "moe_activations",
        "warn",
        "W4A8",
        lines(LOG, (r"'HUMMING' Mxfp4", "'FLASHINFER_CUTLASS_MXFP4_MXFP8' Mxfp4")),
    ),
    Fault(
        "activation request ignored",
        "moe_activations",
        "fail",
        "Falling back",
        lines(
            LOG,
            (
                r"^(.*Using 'HUMMING' Mxfp4.*)$",
                (
                    r"\1\nWARNING No Mxfp4 MoE backend supports activation=mxfp8 for the "
                    "deployment configuration. Falling back to 'MARLIN' with BF16 activations."
                ),
            ),
        ),
    ),
    Fault(
        "DeepGEMM with E8M0 on SM12x",
        "deep_gemm_scales",
        "fail",
        "VLLM_USE_DEEP_GEMM",
        but(
            lines(
                LOG,
                (
                    r"Selected CutlassFp8BlockScaledMMKernel for .*",
                    "DeepGEMM E8M0 enabled on current platform.\nINFO Selected DeepGemmFp8BlockScaledMMKernel for Fp8",
                ),
            ),
            gpu=GB10,
        ),
        but(LOG, gpu=GB10),
        but(LOG, gpu={"gpu.names": ["unreadable"]}),
    ),
    Fault(
        "DeepGEMM with E8M0 on SM12x, by default",
        "deep_gemm_scales",
        "warn",
        "VLLM_USE_DEEP_GEMM_E8M0=0",
        but(STATIC, gpu=GB10),
        but(STATIC, gpu=GB10, env={"VLLM_USE_DEEP_GEMM_E8M0": "0"}),
        but(without(LOG, "Selected Cutlass"), gpu=GB10),
    ),
    Fault(
        "no MoE backend named for a GB10",
        "moe_backend",
        "warn",
        "--moe-backend humming",
        but(STATIC, gpu=GB10, words=words(leave="--moe-backend"), env={"VLLM_LING_DISABLE": "1"}),
        but(STATIC, gpu=GB10, words=words(leave="--moe-backend")),
        but(STATIC, gpu={"gpu.names": ["unreadable"]}),
    ),
    Fault(
        "nothing measured for a GB10, by option",
        "moe_backend",
        "warn",
        "--moe-backend humming",
        but(
            STATIC,
            gpu=GB10,
            words=words("--additional-config", '{"ling": {"moe": "stock"}}', leave="--moe-backend"),
        ),
        but(STATIC, gpu=GB10, words=words(leave="--moe-backend")),
    ),
    Fault(
        "no Humming for an H200",
        "moe_backend",
        "warn",
        "pip install humming-kernels",
        but(STATIC, words=words(leave="--moe-backend"), known={"installed.humming": False}),
        but(STATIC, words=words(leave="--moe-backend")),
        NO_CHECKPOINT,
    ),
    Fault(
        "Humming asked and not installed",
        "moe_backend",
        "fail",
        "pip install humming-kernels",
        but(STATIC, gpu=GB10, known={"installed.humming": False}),
        but(STATIC, gpu=GB10),
        NO_CHECKPOINT,
    ),
    Fault(
        "reference experts, by option",
        "moe_backend",
        "fail",
        "leave it out",
        but(
            STATIC,
            words=words("--additional-config", '{"ling": {"moe": "reference"}}', leave="--moe-backend"),
        ),
        STATIC,
        NO_CHECKPOINT,
    ),
]
