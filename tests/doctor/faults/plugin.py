# SPDX-License-Identifier: Apache-2.0
"""Injected faults: the plugin, its options and proofs."""

from tests.doctor.evidence import LIVE, LOG, STATIC, but, lines, live, without
from tests.doctor.faults.common import (
    BARE_LOG,
    NO_LOG,
    NO_OWN_SERIES,
    ODD_VERSION,
    Fault,
    ling,
    record,
    words,
)

PLUGIN = [
    Fault("absent, by log", "plugin_active", "fail", "does not know vllm-ling", BARE_LOG),
    Fault("absent, by metrics", "plugin_active", "fail", "does not know vllm-ling", NO_OWN_SERIES, LIVE),
    Fault(
        "failed to import",
        "plugin_active",
        "fail",
        "ImportError: cannot import name",
        lines(
            LOG,
            (
                r"^.*vllm-ling: 0.1.0 active.*$",
                (
                    "(EngineCore pid=2) ERROR 12-01 10:00:10 [__init__.py:72] Failed to "
                    "load plugin ling\nImportError: cannot import name 'x' from 'vllm'"
                ),
            ),
        ),
    ),
    Fault(
        "outside the window",
        "plugin_active",
        "fail",
        "outside the supported window",
        lines(
            LOG,
            (
                r"vllm-ling: 0.1.0 active.*",
                (
                    "vllm-ling: inactive: vLLM 0.35.0 is outside the supported window "
                    ">=0.32,<0.34; stock vLLM serves every model"
                ),
            ),
        ),
    ),
    Fault(
        "filtered out",
        "plugin_active",
        "fail",
        "VLLM_PLUGINS",
        but(STATIC, env={"VLLM_PLUGINS": "other"}),
        STATIC,
        NO_LOG,
    ),
    Fault(
        "filtered out, by log",
        "plugin_active",
        "fail",
        "VLLM_PLUGINS leaves it out",
        lines(
            BARE_LOG,
            (
                r"^(.*Resolved architecture: BailingMoeV3MTPModel)$",
                r"\1\nINFO - ling -> vllm_ling.metrics.stat_logger:LingStatLogger",
            ),
        ),
    ),
    Fault(
        "disabled",
        "plugin_active",
        "fail",
        "VLLM_LING_DISABLE",
        but(STATIC, env={"VLLM_LING_DISABLE": "1"}),
        STATIC,
    ),
    Fault(
        "no entry point",
        "plugin_active",
        "fail",
        "entry point",
        but(STATIC, known={"installed.entry_point": False}),
        STATIC,
    ),
    Fault(
        "off in one process",
        "plugin_active",
        "fail",
        "RuntimeError: broken",
        record(state="inactive", reason="RuntimeError: broken"),
        LIVE,
    ),
    Fault(
        "model-impl transformers",
        "model_class",
        "fail",
        "--model-impl transformers",
        lines(
            without(LOG, "vllm-ling: lm_head"),
            (r"'max_num_seqs'", "'model_impl': 'transformers', 'max_num_seqs'"),
        ),
    ),
    Fault(
        "other architectures",
        "model_class",
        "fail",
        "architectures",
        lines(
            without(LOG, "vllm-ling: lm_head"),
            (r"'max_num_seqs'", "'hf_overrides': {'architectures': ['Other']}, 'max_num_seqs'"),
        ),
    ),
    Fault(
        "stock class", "model_class", "fail", "stock vLLM's class", record(choices={}), LIVE, NO_OWN_SERIES
    ),
    Fault("unknown option", "ling_options", "fail", "unknown option ling.fast", lines(LOG, ling(fast=True))),
    Fault(
        "contradictory options",
        "ling_options",
        "fail",
        "needs an FP8 head",
        but(
            STATIC,
            words=words("--additional-config", '{"ling": {"inject_fault": "head_bytes", "lm_head": "bf16"}}'),
        ),
        STATIC,
    ),
    Fault(
        "injected fault, by log",
        "faults_allowed",
        "fail",
        "head_bytes",
        lines(LOG, ling(inject_fault="head_bytes")),
    ),
    Fault(
        "injected fault, live",
        "faults_allowed",
        "fail",
        "head_scale",
        live(LIVE, info={"inject_fault": "head_scale"}),
        LIVE,
        NO_OWN_SERIES,
    ),
    Fault("on_fault warn", "faults_allowed", "warn", "on_fault=warn", lines(LOG, ling(on_fault="warn"))),
    Fault(
        "probe failed",
        "proofs_hold",
        "fail",
        "head_probe",
        lines(LOG, (r"PROOF ok: head_probe: .*", "FAULT head_probe: top-1 agreement 12.0% (bound 85%)")),
    ),
    Fault(
        "probe failed, live",
        "proofs_hold",
        "fail",
        "head_probe",
        record(faults={"head_probe": "top-1 agreement 12.0%"}),
        LIVE,
        NO_OWN_SERIES,
    ),
    Fault(
        "misspelt variable",
        "unknown_variables",
        "warn",
        "VLLM_USE_DEEP_GEMM",
        but(STATIC, env={"VLLM_USE_DEEPGEMM": "0"}),
        STATIC,
    ),
    Fault(
        "unknown variable, by log",
        "unknown_variables",
        "warn",
        "VLLM_FOO",
        lines(
            LOG,
            (
                r"^(.*Resolved architecture: BailingMoeV3MTPModel)$",
                r"\1\nWARNING Unknown vLLM environment variable detected: VLLM_FOO",
            ),
        ),
    ),
    Fault(
        "another version",
        "server_version",
        "warn",
        "restart",
        but(LIVE, known={"installed.vllm": "0.32.0", "server.local": True}),
        but(LIVE, known={"installed.vllm": "0.33.0", "server.local": True}),
        ODD_VERSION,
    ),
]
