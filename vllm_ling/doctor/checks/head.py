# SPDX-License-Identifier: Apache-2.0
"""The output head: the largest single read of a token, and the one that a wrong dtype breaks in silence."""

from typing import Any

from vllm_ling.doctor import costs
from vllm_ling.doctor.facts.store import Facts
from vllm_ling.doctor.finding import Verdict, fail, ok, unknown, warn
from vllm_ling.doctor.registry import check
from vllm_ling.errors import LingError
from vllm_ling.options import parse_options
from vllm_ling.quant.head_policy import HeadFacts, choose_head

_FP8 = ("fp8_online", "fp8_row", "fp8_block")


def _option(facts: Facts) -> str:
    return str(facts.get("serve.lm_head_option") or facts.get("serve.ling", {}).get("lm_head", "auto"))


@check("static", "log", "live")
def head_format(facts: Facts) -> Verdict:
    """The output head is FP8: half the bytes of BF16, read once per token and once per draft.

    Seen in the plugin's own record where a server runs, else foretold by the same policy that will decide.
    """
    option = _option(facts)
    if "record.choices" in facts and "lm_head" in facts["record.choices"]:
        choice, reason = facts["record.choices"]["lm_head"]
    elif facts.sources == {"static"}:
        try:
            choice, reason = _foretold(facts)
        except LingError as error:
            return fail(f"the head cannot be served as asked: {error}", "change the option it names")
    elif facts.get("plugin.state") in ("absent", "inactive", "failed to import"):
        return fail(
            "stock vLLM keeps the head unquantized (BF16)", "see plugin_active", costs.bf16_head(facts)
        )
    else:
        facts["record.choices"]
        return unknown("the plugin recorded no choice about the head")
    if choice in _FP8:
        return ok(f"lm_head = {choice} ({reason})")
    if option == "fp8":
        return fail(
            f"ling.lm_head=fp8 was asked for, but the head is {choice} ({reason})",
            "see the reason",
            costs.bf16_head(facts),
        )
    if option == "bf16":
        return warn(
            f"lm_head = {choice} ({reason})",
            "leave ling.lm_head out, or set it to fp8",
            costs.bf16_head(facts),
        )
    if "BF16 checkpoint" in reason:
        return ok(f"lm_head = {choice} ({reason})", costs.bf16_head(facts))
    return warn(
        f"lm_head = {choice}: {reason}", "remove the obstacle that the reason names", costs.bf16_head(facts)
    )


def _foretold(facts: Facts) -> tuple[str, str]:
    if "_checkpoint.config" not in facts:
        facts["checkpoint.format"]  # raises MissingFact with the reason
    config = facts["_checkpoint.config"]
    dtype = {"auto": config.get("torch_dtype") or config.get("dtype") or "bfloat16"}.get(
        facts["serve.dtype"], facts["serve.dtype"]
    )
    return choose_head(
        parse_options({"ling": facts["serve.ling"]}),
        HeadFacts(
            stored=stored_head(facts),
            checkpoint_quantized=config.get("quantization_config") is not None,
            quantization_ling=facts["serve.quantization"] == "ling",
            model_dtype=str(dtype),
            head_dtype=str(facts.get("serve.head_dtype") or config.get("head_dtype") or dtype),
            tied=bool(config.get("tie_word_embeddings")),
            lora=False,
            draft_quantization=facts.get("serve.draft_head_quantization"),
        ),
    )


def stored_head(facts: Facts) -> Any:
    """How the checkpoint stores its head, in the policy's words."""
    if "_checkpoint.headers" not in facts:
        facts["checkpoint.headers"]
    headers = facts["_checkpoint.headers"]
    head = headers.get("lm_head.weight")
    if head is None or not head.dtype.startswith("F8"):
        return "bf16"
    if "lm_head.weight_scale" in headers:
        return "fp8_row"
    return "fp8_block" if "lm_head.weight_scale_inv" in headers else "fp8_noscale"


@check("static", "log", "live")
def head_dtype(facts: Facts) -> Verdict:
    """Logits are computed in the model's dtype.

    `head_dtype: float32` in --hf-overrides forbids a quantized head, so each token reads the BF16 head or more.
    """
    asked = facts["serve.head_dtype"]
    if str(asked).removeprefix("torch.") in ("float32", "fp32"):
        return warn(
            f"head_dtype is {asked}, which only an unquantized head supports",
            "drop head_dtype from --hf-overrides",
            costs.bf16_head(facts),
        )
    return ok(f"head_dtype: {asked or 'the model dtype'}")


@check("static", "log", "live")
def head_scale(facts: Facts) -> Verdict:
    """An FP8 head in the checkpoint is used with its scale.

    Stock vLLM copies FP8 bytes into a BF16 parameter without their scale and drops `lm_head.weight_scale`: no error,
    wrong output. Acceptance cannot show it, it rises towards 100%, because the draft shares the broken head.
    """
    stored = stored_head(facts)
    if stored == "bf16":
        return ok("the checkpoint stores no FP8 head")
    if stored == "fp8_noscale":
        return fail(
            "lm_head.weight is FP8, but the checkpoint has neither lm_head.weight_scale nor _scale_inv",
            "quantize the head again: vllm-ling quantize --head fp8",
        )
    state = (
        facts["plugin.state"]
        if facts.sources != {"static"}
        else (
            "inactive"
            if facts["installed.disabled"]
            or facts["installed.filtered"]
            or not facts["installed.entry_point"]
            or facts["installed.outside_window"]
            else "active"
        )
    )
    if state != "active":
        length = facts.get("recent.accept_length")
        seen = f"; accept length {length:.2f} proves nothing, the draft shares this head" if length else ""
        return fail(
            f"the checkpoint stores an FP8 head, and stock vLLM casts it without its scale: wrong output{seen}",
            "activate vllm-ling (see plugin_active), or serve a checkpoint with a BF16 head",
        )
    return ok(f"stored as {stored}; the plugin reads it with its scale")


@check("log", "live")
def draft_head(facts: Facts) -> Verdict:
    """The draft reads the target's own head module, scale included.

    A draft that takes the bytes of an FP8 head without its module reads noise: nothing is accepted, and serving is
    slower than without speculation. With a dropped scale acceptance may even stay high; only the comparison at load
    shows it.
    """
    if not facts["serve.k"]:
        return ok("no speculation")
    broken = {code: text for code, text in facts["record.faults"].items() if code.startswith("draft_head")}
    if broken:
        code, message = next(iter(broken.items()))
        return fail(
            f"FAULT {code}: {message}",
            "restart without ling.inject_fault and on_fault=warn; if it stays, start "
            "without --speculative-config and report it",
            costs.useless_drafts(facts, facts["serve.k"], 0),
        )
    proofs = facts["record.proofs"]
    if "draft_head" in proofs:
        return ok(proofs["draft_head"])
    return unknown("the plugin recorded no proof of the draft's head")


@check("static", "log", "live")
def draft_head_copies(facts: Facts) -> Verdict:
    """The draft has no head of its own.

    `draft_lm_head_quantization` keeps a second, quantized copy of the head; stock vLLM loads a full head for the draft,
    quantizes and then drops it, a peak of one head more while loading. With vllm-ling both are needless.
    """
    if not facts["serve.k"]:
        return ok("no speculation")
    size = costs.head_bytes(facts)
    quantization = facts.get("serve.draft_head_quantization")
    if quantization:
        held = f"keeps {costs.size(size / 2)} more in memory" if size else ""
        return warn(
            f"draft_lm_head_quantization={quantization}: a second copy of the head, for drafting only",
            "leave it out: with an FP8 head the draft shares the target's module",
            held,
        )
    if facts.get("plugin.state", "active") != "active":
        peak = f"{costs.size(size)} more at the peak of loading" if size else ""
        return warn("stock vLLM loads a head for the draft and then drops it", "see plugin_active", peak)
    return ok("the draft is built without a head")
