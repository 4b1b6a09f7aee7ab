# SPDX-License-Identifier: Apache-2.0
"""Names and labels of the series that vllm-ling exports beside vLLM's own; written by `collector`, read by doctor."""

# 1 per process and label set ("info" gauges).
PLUGIN = "ling:plugin"  # process, state, reason, version
CHOICE = "ling:choice"  # process, what, choice, reason
PROOF = "ling:proof"  # process, code, message
FAULT = "ling:fault"  # process, code, message
INFO = "ling:config"  # the labels of INFO_FACTS
# Values.
FAULTS = "ling:faults"  # how many proofs failed at load
ACCEPT_LENGTH = "ling:accept_length"  # tokens per verify step over the last WINDOW_S seconds with drafts
ACCEPTANCE = "ling:acceptance"  # position: share of the guard's window in which it was accepted
DRAFT_ALARM = "ling:draft_alarm"  # alarm: 1 while the guard's alarm stands
LEVEL_2_SLEEPS = "ling:level_2_sleeps_total"
WINDOW_S = 60.0

ALL = (PLUGIN, CHOICE, PROOF, FAULT, INFO, FAULTS, ACCEPT_LENGTH, ACCEPTANCE, DRAFT_ALARM, LEVEL_2_SLEEPS)

# Label of INFO -> doctor's fact.
INFO_FACTS = {
    "model": "serve.model",
    "device": "engine.device",
    "runner": "log.runner",
    "quantization": "engine.quantization",
    "head_dtype": "serve.head_dtype",
    "dtype": "serve.dtype",
    "method": "serve.method",
    "k": "serve.k",
    "draft_head_quantization": "serve.draft_head_quantization",
    "enforce_eager": "engine.enforce_eager",
    "cudagraph_mode": "engine.cudagraph_mode",
    "capture_sizes": "engine.capture_sizes",
    "moe_backend": "serve.moe_backend",
    "max_num_seqs": "serve.max_num_seqs",
    "max_model_len": "serve.max_model_len",
    "tensor_parallel_size": "serve.tensor_parallel_size",
    "inject_fault": "serve.inject_fault",
    "on_fault": "serve.on_fault",
    "lm_head": "serve.lm_head_option",
    "moe": "serve.moe_option",
    "linear": "serve.linear_option",
    "decode": "serve.decode_option",
    "draft_gate": "serve.draft_gate_option",
}
