# SPDX-License-Identifier: Apache-2.0
"""What config.json and the safetensors headers say, without reading a weight."""

from typing import Any

from vllm_ling.checkpoint.tensors import expected_tensors
from vllm_ling.doctor import costs
from vllm_ling.doctor.facts.store import Facts
from vllm_ling.doctor.finding import Verdict, fail, ok, unknown, warn
from vllm_ling.doctor.registry import check

_AGAIN = "download the checkpoint again, or quantize it again with vllm-ling quantize"
_HEAD_NAMES = ("lm_head.weight", "lm_head.weight_scale", "lm_head.weight_scale_inv")


def _headers(facts: Facts) -> dict[str, Any]:
    if "_checkpoint.headers" not in facts:
        facts["checkpoint.headers"]  # raises MissingFact with the reason
    headers: dict[str, Any] = facts["_checkpoint.headers"]
    return headers


def _shape(facts: Facts) -> Any:
    if "_checkpoint.shape" not in facts:
        facts["checkpoint.format"]
    return facts["_checkpoint.shape"]


def _expected(facts: Facts) -> dict[str, Any]:
    if "_checkpoint.expected" not in facts:
        facts.put("_checkpoint.expected", expected_tensors(_shape(facts)), "config.json")
    expected: dict[str, Any] = facts["_checkpoint.expected"]
    return expected


def _mtp_prefixes(shape: Any) -> tuple[str, ...]:
    return tuple(f"model.layers.{layer}." for layer in shape.layers[shape.num_hidden_layers :])


@check("static", "log", "live")
def checkpoint_complete(facts: Facts) -> Verdict:
    """Every tensor that config.json declares is there, with its shape; the MTP layer has its own check."""
    if "problem.headers" in facts:
        return fail(facts["problem.headers"], _AGAIN)
    if "problem.config" in facts:
        return fail(facts["problem.config"], _AGAIN)
    headers, expected = _headers(facts), _expected(facts)
    mtp = _mtp_prefixes(_shape(facts)) or ("\0",)
    missing = [name for name in expected if name not in headers and not name.startswith(mtp)]
    if missing:
        return fail(f"{missing[0]} is missing ({len(missing):,} tensors in all)", _AGAIN)
    shapes = [n for n, spec in expected.items() if n in headers and headers[n].shape != spec.shape]
    if shapes:
        found, wanted = list(headers[shapes[0]].shape), list(expected[shapes[0]].shape)
        return fail(f"{shapes[0]} has shape {found}, config.json declares {wanted}", _AGAIN)
    return ok(
        f"{len(headers):,} tensors, {facts['checkpoint.bytes'] / 1e9:.2f} GB, format {_shape(facts).fmt}"
    )


@check("static", "log", "live")
def tensors_consumed(facts: Facts) -> Verdict:
    """No tensor of the checkpoint is left over.

    Stock vLLM ignores every name that it does not know: a scale of a head that it takes for BF16, a renamed projection.
    """
    headers, expected = _headers(facts), _expected(facts)
    left = [name for name in headers if name not in expected and name not in _HEAD_NAMES]
    if left:
        return fail(
            f"{left[0]} belongs to no module of this config ({len(left):,} such tensors); stock vLLM drops it "
            "without a word",
            "serve the checkpoint that belongs to this config.json",
        )
    return ok("every tensor has its place")


@check("static", "log", "live")
def exclusions_match(facts: Facts) -> Verdict:
    """`modules_to_not_convert` names the modules that are stored unquantized, all of them and nothing else.

    An entry that matches nothing ('.b_proj' for 'b_proj') leaves a BF16 tensor to a layer that expects FP8: vLLM
    casts the bytes, its block scale stays uninitialized memory, and the server starts without a warning.
    """
    headers, expected, shape = _headers(facts), _expected(facts), _shape(facts)
    cast = [
        name
        for name, spec in expected.items()
        if name in headers and spec.dtypes == ("F8_E4M3",) and headers[name].dtype in ("BF16", "F16", "F32")
    ]
    reverse = [
        name
        for name, spec in expected.items()
        if name in headers
        and name not in _HEAD_NAMES
        and "F8_E4M3" not in spec.dtypes
        and headers[name].dtype == "F8_E4M3"
    ]
    # Of 512 experts one is enough: 127,000 names take a tenth of a second per entry.
    modules = {
        name.rpartition(".")[0]
        for name in headers
        if ".mlp.experts." not in name or ".mlp.experts.0." in name
    }
    idle = [
        e
        for e in shape.excluded
        if not e.startswith("re:")
        and shape.fmt in ("fp8", "fp4")
        and not any(m == e or m.endswith(f".{e}") for m in modules)
    ]
    if cast:
        cause = f"; the entry {idle[0]!r} of modules_to_not_convert matches no module" if idle else ""
        module = cast[0].removesuffix(".weight")
        return fail(
            f"{cast[0]} is {headers[cast[0]].dtype}, but is declared FP8{cause}: its scale would be uninitialized",
            f"config.json: add '{module.rpartition('.')[2]}' to quantization_config.modules_to_not_convert",
        )
    if reverse:
        return fail(
            f"{reverse[0]} is FP8, but modules_to_not_convert excludes it: its scale would be dropped",
            "config.json: take the module out of quantization_config.modules_to_not_convert",
        )
    if idle:
        return warn(
            f"the entry {idle[0]!r} of modules_to_not_convert matches no module",
            "correct or remove the entry",
        )
    return ok("declared and stored formats agree")


@check("static", "log", "live")
def mtp_layer(facts: Facts) -> Verdict:
    """The MTP layer that speculation needs is declared and stored.

    A checkpoint may declare the layer and not hold it (a converter dropped it), or never have had one (Ling-3.0-tiny).
    """
    k, shape = facts.get("serve.k", 0), _shape(facts)
    layers = _mtp_prefixes(shape)
    if not layers:
        if k:
            return fail(
                f"speculation with {k} draft tokens, but config.json has num_nextn_predict_layers 0",
                "leave --speculative-config out, or serve a checkpoint with an MTP layer",
            )
        return ok("no MTP layer, and no speculation")
    names = [name for name in _expected(facts) if name.startswith(layers)]
    headers = _headers(facts)
    missing = [name for name in names if name not in headers]
    if not missing:
        if k and facts.get("log.draft_loaded") is False and facts.get("log.runner") == "v1":
            return fail(
                f"speculation with {k} draft tokens, but the log shows no draft model being loaded",
                'start again with --speculative-config \'{"method": "mtp", ...}\'',
            )
        return ok(f"the MTP layer is stored ({len(names):,} tensors)")
    part = "all" if len(missing) == len(names) else "part"
    evidence = (
        f"config.json declares an MTP layer, but {part} of it is missing from the checkpoint ({missing[0]})"
    )
    fix = "download the original shards of the MTP layer, or leave --speculative-config out"
    return fail(evidence, fix) if k or part == "part" else warn(evidence, fix)


@check("static", "log", "live")
def clamp_lists(facts: Facts) -> Verdict:
    """The SwiGLU clamp lists of the last layers stand in config.json.

    Ling-3.0-flash was trained with clamps on layers 34 to 41. Without the lists the model runs unclamped: plausible
    output, lower scores.
    """
    shape = _shape(facts)
    config = facts["_checkpoint.config"]
    names = ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list")
    missing = [name for name in names if not config.get(name)]
    # The flash layout; Ling-3.0-tiny never had clamps.
    flash = shape.num_hidden_layers == 42 and shape.num_experts == 512
    if len(missing) == 1 or (missing and flash):
        return fail(
            f"config.json lacks {missing[0]}: clamped layers would run unclamped",
            "take config.json from the original checkpoint",
        )
    if missing:
        return ok("no clamp lists; this model has none")
    if not any(shape.routed_limits) and flash:
        return fail(
            "expert_swiglu_limit_list holds no limit", "take config.json from the original checkpoint"
        )
    return ok(f"clamps on {sum(v is not None for v in shape.routed_limits)} layers of routed experts")


@check("static", "log", "live")
def router_dtype(facts: Facts) -> Verdict:
    """How the router is stored. vLLM always holds it in FP32, which doubles its bytes; accumulation is FP32 anyway."""
    headers = _headers(facts)
    gates = {n: i.dtype for n, i in headers.items() if n.endswith(".mlp.gate.weight")}
    if not gates:
        return unknown("the checkpoint holds no router weight")
    cost = costs.fp32_router(facts)
    wide = [name for name, dtype in gates.items() if dtype == "F32"]
    if wide:
        return warn(
            f"{wide[0]} is stored in FP32", "store the router in BF16, as the official checkpoints do", cost
        )
    return ok(f"router stored as {', '.join(sorted(set(gates.values())))}; vLLM holds it in FP32", cost)


@check("static", "log", "live")
def chat_template(facts: Facts) -> Verdict:
    """The chat template is there: without it, chat requests are refused or formatted like no training example."""
    if facts.get("serve.chat_template"):
        return ok(f"--chat-template {facts['serve.chat_template']}")
    if facts["checkpoint.chat_template"]:
        return ok("the tokenizer has a chat template")
    return fail(
        "no chat template: neither in tokenizer_config.json nor as chat_template.jinja",
        "copy chat_template.jinja from the original checkpoint, or give --chat-template FILE",
    )


@check("static", "log")
def parsers(facts: Facts) -> Verdict:
    """Reasoning and tool calls of a full-size Ling are parsed.

    Without --reasoning-parser ling3 the thinking lands in the answer; without --tool-call-parser, tool calls are text.
    """
    shape = _shape(facts)
    if shape.vocab_size < 100_000:
        return ok("a small test model without reasoning or tools")
    missing = [
        flag
        for flag, key in (
            ("--reasoning-parser ling3", "serve.reasoning_parser"),
            ("--tool-call-parser ling3 --enable-auto-tool-choice", "serve.tool_call_parser"),
        )
        if facts[key] is None
    ]
    if missing:
        return warn(
            f"{' and '.join(flag.split()[0] for flag in missing)} not given", f"add {' '.join(missing)}"
        )
    return ok(f"parsers {facts['serve.reasoning_parser']} and {facts['serve.tool_call_parser']}")
