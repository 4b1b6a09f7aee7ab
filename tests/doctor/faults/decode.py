# SPDX-License-Identifier: Apache-2.0
"""Injected faults: decode steps that stay on vLLM's layers."""

from typing import Any

from tests.doctor.evidence import GPU_RECORD, LIVE, LOG, Evidence, but, chosen, lines, live, without
from tests.doctor.faults.common import DEFAULTS, NO_OWN_SERIES, Fault, ling, record

LINEAR = "KDA's in_proj is not read by our FP8 kernel (ling.linear=ling, block-FP8 weights)"
EXPERTS = "the experts are not read by our MoE kernel (ling.moe=ling)"
BOTH = """--additional-config '{"ling":{"moe":"ling","linear":"ling"}}'"""
MIXED = "plain decodes beside verified drafts"
UNTRIED = without(LOG, "vllm-ling: target (?:decode|path)")


def fell_back(reason: str, *edits: tuple[str, str], model: str = "target") -> Evidence:
    """The log of a server whose target or draft stayed on vLLM's layers."""
    kept = without(LOG, f"vllm-ling: {model} path")
    return lines(kept, (f"{model} decode = .*", f"{model} decode = layers ({reason})"), *edits)


def on_layers(model: str, reason: str, **options: str) -> Evidence:
    """The same, live."""
    changes: dict[str, Any] = {f"{model}_decode": ("layers", reason)}
    choices = chosen(f"{model} path", **changes)
    return live(LIVE, info=options, record={**GPU_RECORD, "choices": choices})


def astray(kind: str, model: str = "target") -> Evidence:
    """A log in which one more kind of batch goes through vLLM's layers."""
    path = f"{model} path: more than 8 tokens = layers (ling.decode=auto)"
    line = rf"^(.*vllm-ling: ){model} path: more than 8 tokens = layers .*$"
    return lines(LOG, (line, rf"\1{path}\n\1{model} path: {kind} = layers (ling.decode=auto)"))


def takes(most: int, model: str) -> Evidence:
    """A live server whose kernels take `most` tokens."""
    changes: dict[str, Any] = {f"{model}_decode": ("fused", f"up to {most} tokens; ling.decode=auto")}
    return record(choices=chosen(**changes))


def proven(*leave: str) -> dict[str, str]:
    """The record's proofs without some."""
    return {code: text for code, text in GPU_RECORD["proofs"].items() if code not in leave}


def unhonoured(reason: str) -> Evidence:
    """A log with the warning of ling.decode=fused, and without the arguments that ask for it."""
    said = f"ling.decode=fused cannot be honoured ({reason}); vLLM's layers decode"
    line = rf"\1WARNING [status.py:131] vllm-ling: {said}"
    return lines(
        fell_back(reason), (r"^(.*)INFO .*vllm-ling: target decode = .*$", rf"{line}\n\g<0>"), DEFAULTS
    )


DECODE = [
    Fault(
        "decode on layers, linear stock",
        "decode_path",
        "warn",
        BOTH,
        fell_back(LINEAR, ling(linear="stock")),
        LOG,
        UNTRIED,
    ),
    Fault(
        "decode on layers for the experts",
        "decode_path",
        "warn",
        BOTH,
        fell_back(EXPERTS, (r"'moe': 'ling', ", "")),
    ),
    Fault(
        "decode on layers, other options kept",
        "decode_path",
        "warn",
        '{"ling":{"moe":"ling","linear":"ling","on_fault":"warn"}}',
        fell_back(LINEAR, ling(on_fault="warn", linear="stock")),
    ),
    Fault(
        "decode on layers beside Marlin, live",
        "decode_path",
        "warn",
        "already), and leave --moe-backend marlin out",
        on_layers("target", LINEAR, moe="auto", linear="stock", moe_backend="marlin"),
        LIVE,
        record(choices=chosen("target decode")),
    ),
    Fault(
        "decode on layers, nothing to set",
        "decode_path",
        "warn",
        "no option mends this",
        on_layers("target", "CompileError: nvrtc: unknown architecture"),
        LIVE,
        NO_OWN_SERIES,
    ),
    Fault(
        "decode on layers, format not known",
        "decode_path",
        "unknown",
        "name the checkpoint",
        but(without(fell_back(LINEAR, DEFAULTS), "Mxfp4 MoE backend", "moe mxfp4"), config=None),
    ),
    Fault(
        "fused path never compared",
        "decode_path",
        "unknown",
        "3 state slots are too few",
        record(
            choices=chosen(
                target_decode_check=("unknown", "3 state slots are too few for 5 groups of layers")
            ),
            proofs=proven("target_decode"),
        ),
        record(choices=chosen(target_decode_check=("ok", "compared at a later batch"))),
        record(choices=chosen("target decode")),
    ),
    Fault(
        "no comparison of the fused path recorded",
        "decode_path",
        "unknown",
        "the target's fused path is taken, and no comparison",
        without(LOG, "PROOF ok: target_decode"),
        LOG,
    ),
    Fault(
        "no comparison of the draft's fused path recorded, live",
        "decode_path",
        "unknown",
        "the draft's fused path is taken, and no comparison",
        record(proofs=proven("draft_decode")),
        LIVE,
    ),
    Fault(
        "draft on layers",
        "decode_path",
        "warn",
        "draft decode = layers: eh_proj",
        fell_back(
            "eh_proj is not read by our FP8 kernel (ling.linear=ling, block-FP8 weights)", model="draft"
        ),
        LOG,
        without(LOG, "vllm-ling: draft decode"),
    ),
    Fault(
        "draft of several layers",
        "decode_path",
        "warn",
        "not one layer on one GPU",
        on_layers("draft", "not one layer on one GPU"),
        LIVE,
        record(choices=chosen("draft decode")),
    ),
    Fault(
        "decode on layers by option",
        "decode_path",
        "warn",
        "leave ling.decode out",
        on_layers("target", "ling.decode=layers", decode="layers"),
        LIVE,
        live(LIVE, info={"k": None}, traffic={}, record={**GPU_RECORD, "choices": {}}),
    ),
    Fault(
        "fused decode asked and refused",
        "decode_path",
        "fail",
        BOTH.replace("}}", ',"decode":"fused"}}'),
        fell_back(LINEAR, ling(decode="fused", linear="stock")),
        lines(
            LOG, ling(moe="ling", linear="ling", decode="fused"), (r"ling\.decode=auto", "ling.decode=fused")
        ),
        UNTRIED,
    ),
    Fault("fused decode refused, by its warning", "decode_path", "fail", "not honoured", unhonoured(LINEAR)),
    Fault(
        "fused decode asked, live",
        "decode_path",
        "fail",
        "not honoured",
        on_layers("draft", "KDA states are torch.bfloat16 and torch.bfloat16", decode="fused"),
        live(LIVE, info={"decode": "fused"}),
        live(LIVE, info={"device": None}),
    ),
    Fault(
        "fused decode asked on two ranks",
        "decode_path",
        "fail",
        "serve on one GPU",
        on_layers("target", "it serves one GPU", decode="fused", tensor_parallel_size="2"),
        LIVE,
        NO_OWN_SERIES,
    ),
    Fault("plain decodes beside drafts", "decode_batches", "warn", MIXED, astray(MIXED), LOG, UNTRIED),
    Fault(
        "sequences too long for the kernels",
        "decode_batches",
        "warn",
        "num_speculative_tokens 7",
        astray("more than 8 tokens of a sequence"),
        LOG,
        without(LOG, "vllm-ling: target path"),
    ),
    Fault(
        "embeddings from outside",
        "decode_batches",
        "warn",
        "embeddings come from outside",
        astray("embeddings come from outside"),
        LOG,
        without(LOG, "vllm-ling: target path: decode"),
    ),
    Fault(
        "batch indices of another type",
        "decode_batches",
        "warn",
        "torch.int64",
        astray("an index of the batch is torch.int64 with strides (1,)"),
    ),
    Fault(
        "verification larger than the kernels take",
        "decode_batches",
        "warn",
        "num_speculative_tokens 2",
        takes(3, "target"),
        takes(4, "target"),
        record(choices=chosen("target path")),
    ),
    Fault(
        "draft's first pass larger than the kernels take",
        "decode_batches",
        "warn",
        "draft: one sequence",
        takes(2, "draft"),
        takes(4, "draft"),
        record(choices=chosen("draft path")),
    ),
]
