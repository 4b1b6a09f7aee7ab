# SPDX-License-Identifier: Apache-2.0
"""Which kernels run the routed experts and the FP8 projections."""

from vllm_ling.doctor import costs
from vllm_ling.doctor.facts.store import Facts
from vllm_ling.doctor.finding import Verdict, fail, ok, unknown, warn
from vllm_ling.doctor.registry import check

_BACKEND = "moe backend"  # what vLLM's own method resolved to
_OWN = ("torch", "reference")
_DECODE = "moe decode"  # the plugin's own kernel for few tokens, beside the backend
_MEASURED = (
    "auto measured "  # how the reason of ling.moe=auto begins where it timed the backends (quant/moe_auto.py)
)
# Reasons for vLLM's GEMM that are as meant (quant/linear_policy.py); ling.linear=ling with another choice is not.
_MEANT = ("ling.linear=stock", "ling.linear=auto:")
_SLOW = {"EMULATION": "dequantizes the experts at every call"}
_8_BIT_ACTIVATIONS = ("MXFP8", "_FP8", "MXFP4_MXFP4")
_ALIASES = {
    "flashinfer_trtllm": "TRTLLM",
    "flashinfer_cutlass": "CUTLASS",
    "triton_unfused": "TRITON_UNFUSED",
    "deep_gemm": "DEEPGEMM",
    "cutlass": "CUTLASS",
}


def device(facts: Facts) -> str:
    """Where the model runs or would run: cuda, cpu, ..."""
    if "engine.device" not in facts and "static" in facts.sources:
        if facts.get("gpu.names"):
            return "cuda"
        if "cpu" in str(facts.get("installed.vllm", "")) or facts.get("installed.cpu_build"):
            return "cpu"
    return str(facts["engine.device"])


def _backends(facts: Facts) -> list[str]:
    """Names of the backends that run the experts, from vLLM's log or the plugin's own record."""
    if "log.moe_backend" in facts:
        return [str(name) for name in facts["log.moe_backend"]]
    recorded = facts.get("record.choices", {})
    kinds = [choice for what, (choice, _) in recorded.items() if what.startswith("moe ") and what != _DECODE]
    own = sorted({choice for choice in kinds if choice in _OWN})
    if not own and _BACKEND in recorded:
        return [str(recorded[_BACKEND][0])]
    return own or [str(name) for name in facts["log.moe_backend"]]


def experts_format(facts: Facts) -> str | None:
    """Format of the experts that run, as the plugin's record names it ("moe mxfp4", "moe bf16 clamped")."""
    kinds = [what.split()[1] for what in facts.get("record.choices", {}) if what.startswith("moe ")]
    return next((kind for kind in kinds if kind not in ("decode", "backend")), None)


def _measured(facts: Facts) -> str:
    """What ling.moe=auto measured, with its figures; empty where it did not measure."""
    recorded = facts.get("record.choices", {})
    reasons = (reason for what, (_, reason) in recorded.items() if what.startswith("moe "))
    return next((reason for reason in reasons if reason.startswith(_MEASURED)), "")


def _asked(facts: Facts) -> str:
    option = facts.get("serve.ling", {}).get("moe", "auto")
    nested = facts.get("serve.moe_backend_nested", "auto")
    asked = facts.get("serve.moe_backend") or "auto"
    return str(
        next((name for name in (option, nested, asked) if name not in ("auto", "stock", None)), "auto")
    )


@check("static", "log", "live")
def moe_backend(facts: Facts) -> Verdict:
    """The routed experts run on a fast backend for this GPU, and on the one that was asked for.

    ling.moe=auto times the backends at load and takes the fastest. Where it cannot, vLLM picks: Marlin on a GB10, where
    Humming must be asked for. Emulation dequantizes at every call, and experts that became BF16 read almost four times
    the bytes.
    """
    if facts.sources == {"static"}:
        return _backend_to_come(facts)
    fmt, names = facts.get("log.moe_format") or experts_format(facts), _backends(facts)
    shown, asked = ", ".join(names), _asked(facts)
    if facts.get("checkpoint.format") == "fp4" and fmt == "unquantized":
        return fail(
            f"the experts are MXFP4 in the checkpoint, but run unquantized on {shown}",
            "leave --quantization out, and see plugin_active",
            costs.bf16_experts(facts),
        )
    for name in names:
        if name.upper() in _SLOW or name == "reference":
            return fail(
                f"the experts run on {name}: it {_SLOW.get(name.upper(), 'dequantizes them at every call')}",
                "use --moe-backend auto or humming, and leave ling.moe=reference out",
                costs.bf16_experts(facts),
            )
    if asked not in ("auto", "ling", "reference", "b12x"):
        wanted = _ALIASES.get(asked, asked.upper())
        if not any(wanted in name.upper().replace("-", "_") for name in names):
            return fail(
                f"{asked} was asked for, but the experts run on {shown}",
                "see the server log for vLLM's reason",
                _humming(facts.get("gpu.capability")) if asked == "humming" else "",
            )
    if asked == "auto" and (measured := _measured(facts)):
        return ok(f"{fmt or 'experts'} on {shown}: {measured}")
    capability = facts.get("gpu.capability")
    if any("MARLIN" in name.upper() for name in names) and asked == "auto" and fmt == "mxfp4":
        if capability is None:
            return unknown(
                f"the experts run on {shown}; whether Humming is faster depends on the GPU, which is not known",
                "run doctor on the server's machine",
            )
        if capability >= 120 or capability == 90:
            return warn(
                f"the experts run on {shown} (vLLM's own order for compute capability {capability / 10:.1f})",
                "--moe-backend humming",
                _humming(capability),
            )
    return ok(f"{fmt or 'experts'} on {shown}")


def _backend_to_come(facts: Facts) -> Verdict:
    """Before serving: what vLLM would choose on this GPU by itself, and whether what was asked for is installed."""
    if device(facts) == "cpu":
        return ok("on a CPU the experts run in torch")
    if facts["checkpoint.format"] != "fp4":
        return ok("no MXFP4 experts")
    facts["serve.moe_backend"], facts["serve.ling"]  # not known is not "auto"
    asked, capability = _asked(facts), facts["gpu.capability"]
    if asked in ("humming", "ling") and not facts["installed.humming"]:
        return fail(
            f"{asked} was asked for, but Python finds no module `humming`",
            "pip install humming-kernels, in the environment that serves",
            _humming(capability),
        )
    # On 9.0 vLLM prefers Humming by itself, if it is there.
    installed = facts["installed.humming"]
    plugin_off = facts.get("installed.disabled") or facts.get("installed.filtered")
    measures = asked == "auto" and facts["serve.ling"].get("moe", "auto") == "auto"
    if measures and installed and not plugin_off:
        return ok("ling.moe=auto times Humming, Marlin and the plugin's kernel at load and takes the fastest")
    if asked == "auto" and (capability >= 120 or (capability == 90 and not installed)):
        return warn(
            f"no --moe-backend{'' if installed else ', and no module `humming`'}: vLLM would take Marlin on compute "
            f"capability {capability / 10:.1f}",
            f"{'' if installed else 'pip install humming-kernels, then '}--moe-backend humming",
            _humming(capability),
        )
    if asked == "reference":
        return fail("ling.moe=reference dequantizes the experts at every call", "leave it out")
    return ok(f"--moe-backend {asked}")


def _humming(capability: int | None) -> str:
    if capability is None:
        return ""
    if capability == 90:
        return "5.90-6.00 ms per token on Marlin against 5.56-6.07 on Humming, measured on an H200"
    return "published for a GB10: 27.71 ms per token became 25.35 with Humming (from FlashInfer)"


@check("log", "live")
def decode_kernels(facts: Facts) -> Verdict:
    """The plugin's own decode kernels run where ling.moe=ling or ling.linear=ling asks, or auto takes them.

    They are built and compared with vLLM's path at load. One that cannot be built, or that disagrees, leaves the work
    to vLLM: the server runs as before, without the speed that was meant.
    """
    asked = _asked_kernels(facts)
    if device(facts) == "cpu":
        return ok("decode kernels are for GPUs; on a CPU ling means torch")
    own = {
        what: verdict
        for what, verdict in facts["record.choices"].items()
        if what in (_DECODE, "lm_head decode kernel", "lm_head argmax kernel") or what.startswith("linear ")
    }
    for what, (choice, reason) in own.items():
        if choice in ("stock", "none") and not str(reason).startswith(_MEANT):
            explicit = str(reason).startswith("ling.linear=ling")
            judge = fail if explicit or ("moe" if what == _DECODE else "linear") in asked else warn
            return judge(
                f"{what} = {choice}: {reason}",
                "mend what the reason names (vllm-ling tune builds kernels ahead), or give the option's value stock",
            )
    if "moe" in asked and _DECODE not in own:
        return unknown("the MoE kernel was asked for, but the plugin recorded no decision about it")
    if not any(what.startswith("linear ") for what in own):
        if "linear" in asked:
            return unknown("ling.linear=ling was asked for, but the plugin recorded no decision about it")
        # With vLLM's GEMM everywhere, one line says so.
        stored = facts.get("checkpoint.format") or experts_format(facts)
        if stored not in ("bf16", "int4"):
            return unknown(
                "the plugin recorded no decision about the kernels of the block-FP8 projections",
                "see plugin_active; if it is active, read the server's whole log (--log) or --url",
            )
    ours = sorted(what for what, (choice, _) in own.items() if choice == "ling")
    return ok(
        f"on the plugin's own kernels: {', '.join(ours)}" if ours else "no decode kernel has a part here"
    )


def _asked_kernels(facts: Facts) -> set[str]:
    """Which of "moe" and "linear" were asked of the plugin's kernels, or measured fastest."""
    given = facts.get("serve.ling", {})
    options = {name: facts.get(f"serve.{name}_option") for name in ("moe", "linear")}
    asked = {name for name, option in options.items() if "ling" in (option, given.get(name))}
    return asked | ({"moe"} if _measured(facts).startswith(f"{_MEASURED}ling ") else set())


@check("log", "live")
def moe_activations(facts: Facts) -> Verdict:
    """Whether the experts' activations stay BF16 (W4A16) or are rounded to 8 bits (W4A8).

    Both are legal for Ling's MXFP4 experts, but they are not the same model: benchmark and evaluation must name the one
    that ran. A request for 8 bits that vLLM could not honour is a silent change.
    """
    fallback = facts["log.moe_activation_fallback"] if "log" in facts.sources else None
    if fallback:
        return fail(
            fallback,
            "leave the activation request out, or choose a backend that has it",
        )
    if facts.get("checkpoint.format", "fp4") != "fp4":
        return ok("no MXFP4 experts")
    names = _backends(facts)
    if any(mark in name.upper() for name in names for mark in _8_BIT_ACTIVATIONS):
        return warn(
            f"W4A8: {', '.join(names)} rounds activations to 8 bits",
            "--moe-backend humming or marlin keeps them BF16; if 8 bits are meant, evaluate with them",
        )
    override = facts.get("env.variables", {}).get("VLLM_HUMMING_INPUT_QUANT_CONFIG")
    if override and "HUMMING" in names and "static" in facts.sources:
        return warn(f"W4A8: VLLM_HUMMING_INPUT_QUANT_CONFIG={override}", "unset it for BF16 activations")
    return ok(f"W4A16: {', '.join(names)} keeps BF16 activations")


@check("static", "log")
def deep_gemm_scales(facts: Facts) -> Verdict:
    """DeepGEMM's E8M0 scales and compute capability 12.x do not meet.

    On SM12x (GB10, RTX PRO 6000) block-FP8 through DeepGEMM with E8M0 scales was reported to give gibberish. The kernel
    must be another one, or E8M0 must be off.
    """
    capability = facts.get("gpu.capability")
    if capability is None:
        if facts.get("engine.device") == "cpu" or facts.get("gpu.names") == []:
            return ok("no GPU")
        return unknown(f"{facts['gpu.capability']}")
    if capability < 120:
        return ok(f"compute capability {capability / 10:.1f}")
    if facts.get("checkpoint.format", "fp8") not in ("fp8", "fp4"):
        return ok("no block-FP8 layers")
    if "log" in facts.sources:
        kernels = facts["log.linear_kernels"]
        if not kernels:
            return unknown("the log names no kernel of the block-FP8 layers")
        if any("DeepGemm" in name for name in kernels) and facts["log.e8m0"]:
            return fail(
                f"DeepGEMM with E8M0 scales on compute capability {capability / 10:.1f}: wrong output",
                "VLLM_USE_DEEP_GEMM_E8M0=0, or VLLM_USE_DEEP_GEMM=0",
            )
        return ok(f"block-FP8 layers on {', '.join(kernels[:3])}")
    variables = facts["env.variables"]
    if "0" in (variables.get("VLLM_USE_DEEP_GEMM"), variables.get("VLLM_USE_DEEP_GEMM_E8M0")):
        return ok("DeepGEMM or its E8M0 scales are switched off")
    return warn(
        f"compute capability {capability / 10:.1f}: vLLM may choose DeepGEMM with E8M0 scales",
        "VLLM_USE_DEEP_GEMM_E8M0=0",
    )
