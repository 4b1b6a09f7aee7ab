# SPDX-License-Identifier: Apache-2.0
"""What config.json and the safetensors headers say, without reading a weight."""

from vllm_ling.checkpoint.shapes import LingShape
from vllm_ling.doctor import costs
from vllm_ling.doctor.compare import comparison, mtp_prefixes
from vllm_ling.doctor.facts.store import Facts
from vllm_ling.doctor.finding import Verdict, fail, ok, unknown, warn
from vllm_ling.doctor.registry import check

_AGAIN = "download the checkpoint again, or quantize it again with vllm-ling quantize"
_FLOATS = ("BF16", "F16", "F32")


def _shape(facts: Facts) -> LingShape:
    if "_checkpoint.shape" not in facts:
        facts["checkpoint.format"]  # raises MissingFact with the reason
    shape: LingShape = facts["_checkpoint.shape"]
    return shape


@check("static", "log", "live")
def checkpoint_complete(facts: Facts) -> Verdict:
    """Every tensor that config.json declares is there, with its shape; the MTP layer has its own check."""
    if "problem.headers" in facts:
        return fail(facts["problem.headers"], _AGAIN)
    if "problem.config" in facts:
        return fail(facts["problem.config"], _AGAIN)
    found = comparison(facts)
    if found.missing:
        return fail(f"{found.missing[0]} is missing ({len(found.missing):,} tensors in all)", _AGAIN)
    if found.wrong_shape:
        name = found.wrong_shape[0]
        stored, declared = list(found.headers[name].shape), list(found.expected[name].shape)
        return fail(f"{name} has shape {stored}, config.json declares {declared}", _AGAIN)
    size = facts["checkpoint.bytes"] / 1e9
    return ok(f"{len(found.headers):,} tensors, {size:.2f} GB, format {_shape(facts).fmt}")


@check("static", "log", "live")
def tensors_consumed(facts: Facts) -> Verdict:
    """No tensor of the checkpoint is left over.

    Stock vLLM ignores every name that it does not know: a scale of a head that it takes for BF16, a renamed projection.
    """
    left = comparison(facts).left_over
    if left:
        return fail(
            f"{left[0]} belongs to no module of this config ({len(left):,} such tensors); stock vLLM drops it silently",
            "serve the checkpoint that belongs to this config.json",
        )
    return ok("every tensor has its place")


@check("static", "log", "live")
def exclusions_match(facts: Facts) -> Verdict:
    """`modules_to_not_convert` names the modules that are stored unquantized, all of them and nothing else.

    An entry that matches nothing ('.b_proj' for 'b_proj') leaves a BF16 tensor to a layer that expects FP8: vLLM casts
    the bytes, its block scale stays uninitialized memory, and the server starts without a warning.
    """
    found, idle = comparison(facts), _idle(facts)
    cause = f"; the entry {idle[0]!r} of modules_to_not_convert matches no module" if idle else ""
    for name in found.wrong_dtype:
        stored, declared = found.headers[name].dtype, found.expected[name].dtypes
        if declared == ("F8_E4M3",) and stored in _FLOATS:
            module = name.removesuffix(".weight").rpartition(".")[2]
            return fail(
                f"{name} is {stored}, but is declared FP8{cause}: its scale would be uninitialized",
                f"config.json: add '{module}' to quantization_config.modules_to_not_convert",
            )
        if stored == "F8_E4M3":
            return fail(
                f"{name} is FP8, but modules_to_not_convert excludes it: its scale would be dropped",
                "config.json: take the module out of quantization_config.modules_to_not_convert",
            )
        return fail(f"{name} is stored as {stored}, config.json declares {' or '.join(declared)}", _AGAIN)
    if idle:
        return warn(
            f"the entry {idle[0]!r} of modules_to_not_convert matches no module",
            "correct or remove the entry",
        )
    return ok("declared and stored formats agree")


def _idle(facts: Facts) -> list[str]:
    """Exclusions that match no stored module."""
    shape = _shape(facts)
    if shape.fmt not in ("fp8", "fp4"):
        return []
    # Of 512 experts one is enough: 127,000 names take a tenth of a second per entry.
    stored = comparison(facts).headers
    modules = {n.rpartition(".")[0] for n in stored if ".mlp.experts." not in n or ".mlp.experts.0." in n}
    return [e for e in shape.excluded if not any(m == e or m.endswith(f".{e}") for m in modules)]


@check("static", "log", "live")
def mtp_layer(facts: Facts) -> Verdict:
    """The MTP layer that speculation needs is declared and stored.

    A checkpoint may declare the layer and not hold it (a converter dropped it), or never have had one (Ling-3.0-tiny).
    """
    k, shape = facts.get("serve.k", 0), _shape(facts)
    layers = mtp_prefixes(shape)
    if not layers:
        if k:
            return fail(
                f"speculation with {k} draft tokens, but config.json has num_nextn_predict_layers 0",
                "leave --speculative-config out, or serve a checkpoint with an MTP layer",
            )
        return ok("no MTP layer, and no speculation")
    found = comparison(facts)
    names = [name for name in found.expected if name.startswith(layers)]
    missing = found.missing_mtp
    if not missing:
        served = "log" in facts.sources and facts.get("log.start") != "failed"
        if k and served and facts["log.runner"] == "v1" and not facts["log.draft_loaded"]:
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
    headers = comparison(facts).headers
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
