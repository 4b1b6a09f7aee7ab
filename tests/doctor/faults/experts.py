# SPDX-License-Identifier: Apache-2.0
"""Injected faults: kernels of experts and projections."""

from tests.doctor.evidence import GB10, GPU_RECORD, LIVE, LOG, but, lines
from tests.doctor.faults.common import Fault, record

EXPERTS = [
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
        lines(LOG, (r"'HUMMING' Mxfp4", "'MARLIN' Mxfp4")),
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
]
