# SPDX-License-Identifier: Apache-2.0
"""Whether vllm-ling is there at all, in every process, and what was typed for it."""

import dataclasses
import difflib

from vllm_ling.doctor import costs
from vllm_ling.doctor.facts.store import Facts
from vllm_ling.doctor.finding import Verdict, fail, ok, unknown, warn
from vllm_ling.doctor.registry import check
from vllm_ling.errors import LingError

_REINSTALL = "pip install --force-reinstall --no-deps vllm-ling"


@check("static", "log", "live")
def plugin_active(facts: Facts) -> Verdict:
    """The plugin is loaded and active.

    vLLM swallows an exception while it imports a plugin, skips plugins that VLLM_PLUGINS leaves out, and says nothing
    when none is installed. In each case stock vLLM serves the model: BF16 head, clamps in another form, no proofs.
    """
    if "plugin.state" in facts:
        verdict = _of_server(facts)
    elif facts.sources == {"static"}:
        verdict = _of_environment(facts)
    else:
        return unknown(f"{facts['plugin.state']}")
    stock = verdict.outcome == "fail"
    return dataclasses.replace(verdict, cost=costs.stock_head(facts)) if stock else verdict


def _of_server(facts: Facts) -> Verdict:
    state, reason = facts["plugin.state"], facts.get("plugin.reason", "")
    where = facts.origin("plugin.state")
    if state == "active":
        return ok(f"vllm-ling {facts.get('plugin.version', '')} is active ({where})")
    if state == "absent" and facts.get("plugin.listed"):
        return fail(
            f"vLLM found vllm-ling and did not load it: VLLM_PLUGINS leaves it out ({where})",
            "add ling to VLLM_PLUGINS, or unset it",
        )
    if state == "absent":
        return fail(
            f"the server does not know vllm-ling: stock vLLM serves the model ({where})", _absent_fix(facts)
        )
    if state == "failed to import":
        return fail(
            f"vLLM failed to import the plugin: {reason} ({where})",
            f"{_REINSTALL}, in the server's environment",
        )
    if "outside the supported window" in reason:
        return fail(f"the plugin switched itself off: {reason}", "install a vLLM of that window")
    if "VLLM_LING_DISABLE" in reason:
        return fail(f"the plugin is off: {reason}", "unset VLLM_LING_DISABLE")
    return fail(f"the plugin is {state}: {reason} ({where})", _REINSTALL)


def _absent_fix(facts: Facts) -> str:
    if facts.get("installed.filtered"):
        return "add ling to VLLM_PLUGINS, or unset it"
    return "pip install vllm-ling in the server's environment; if VLLM_PLUGINS is set, it must name ling"


def _of_environment(facts: Facts) -> Verdict:
    version = facts["installed.vllm"]
    if facts["installed.disabled"]:
        return fail("VLLM_LING_DISABLE=1: stock vLLM would serve the model", "unset VLLM_LING_DISABLE")
    if facts["installed.filtered"]:
        return fail("VLLM_PLUGINS leaves the plugin out", "add ling to VLLM_PLUGINS, or unset it")
    if not facts["installed.entry_point"]:
        return fail(
            "no entry point `ling` in vllm.general_plugins: vLLM would not find the plugin", _REINSTALL
        )
    if (reason := facts["installed.outside_window"]) is not None:
        return fail(f"the plugin would switch itself off: {reason}", "install a vLLM of that window")
    return ok(f"vLLM {version} would load vllm-ling {facts['installed.vllm_ling']}")


@check("log", "live")
def model_class(facts: Facts) -> Verdict:
    """The model is built from the plugin's classes, not vLLM's own.

    The plugin can be active and still not serve the model: with --model-impl transformers, or with hf-overrides that
    change `architectures`. Its record then holds no choice about the output head.
    """
    choices = facts["record.choices"]
    if "lm_head" in choices:
        return ok("the plugin's model class chose the output head")
    impl, architectures = facts.get("serve.model_impl"), facts.get("serve.architectures")
    if impl not in (None, "auto", "vllm"):
        return fail(f"--model-impl {impl}: not the plugin's model class", "leave --model-impl out")
    if architectures:
        return fail(
            f"--hf-overrides architectures {architectures}: another model class", "leave architectures out"
        )
    if facts["plugin.state"] != "active":
        return fail(
            "stock vLLM's class serves the model: the plugin is not active",
            "see plugin_active",
            costs.stock_head(facts),
        )
    quantization = facts.get("engine.quantization", facts.get("checkpoint.format"))
    if quantization in (None, "bf16"):
        return ok("BF16 checkpoint without --quantization ling: the plugin leaves the head to vLLM")
    if facts.sources == {"log"} and facts["log.start"] != "done":
        return unknown("the start failed before the head was chosen", "see server_started")
    return fail(
        "the plugin is active, but stock vLLM's class serves the model",
        "start without overrides of model and class",
        costs.stock_head(facts),
    )


@check("static", "log")
def ling_options(facts: Facts) -> Verdict:
    """The `ling` section of --additional-config holds known options that do not contradict each other."""
    from vllm_ling.options import parse_options

    options = facts["serve.ling"]
    try:
        parse_options({"ling": options})
    except LingError as error:
        return fail(str(error), "mend or leave out the option")
    return ok(f"ling options: {options or 'defaults'}")


@check("static", "log", "live")
def faults_allowed(facts: Facts) -> Verdict:
    """No fault is injected, and a failed proof would stop the start.

    `inject_fault` breaks the draft head on purpose; `on_fault=warn` lets a server run that a proof found broken.
    """
    given = facts.get("serve.ling")
    if given is None and "serve.inject_fault" not in facts:
        return unknown(f"{facts['serve.ling']}")
    inject = facts.get("serve.inject_fault") or (given or {}).get("inject_fault", "none")
    on_fault = facts.get("serve.on_fault") or (given or {}).get("on_fault", "fail")
    if inject not in (None, "none"):
        return fail(
            f"ling.inject_fault={inject}: the draft head is broken on purpose", "leave inject_fault out"
        )
    if on_fault == "warn":
        return warn("ling.on_fault=warn: a failed proof is logged and served anyway", "leave on_fault out")
    return ok("no injected fault, and on_fault=fail")


@check("log", "live")
def proofs_hold(facts: Facts) -> Verdict:
    """No proof at load failed.

    The plugin compares the FP8 head with the BF16 one and proves that the draft reads the target's own head. A FAULT
    line means the model that runs is not the one meant, whatever acceptance or throughput say.
    """
    faults = {
        code: message for code, message in facts["record.faults"].items() if not code.startswith("draft_head")
    }
    if faults:
        code, message = next(iter(faults.items()))
        return fail(f"FAULT {code}: {message}", "restart without on_fault=warn and mend what it names")
    if facts["plugin.state"] != "active":
        return unknown("the plugin is not active, so nothing was proven")
    proofs = facts["record.proofs"]
    if proofs:
        return ok(f"{len(proofs)} proofs passed: {', '.join(sorted(proofs))}")
    return (
        ok("no proof was due: BF16 head, no draft")
        if _nothing_to_prove(facts)
        else unknown("no proof was recorded")
    )


def _nothing_to_prove(facts: Facts) -> bool:
    head = facts["record.choices"].get("lm_head", ["bf16"])[0]
    return head in ("bf16", "fp8_row", "fp8_block") and not facts["serve.k"]


# vLLM does not know them either, and warns of them.
OUR_VARIABLES = {"VLLM_LING_DISABLE", "VLLM_LING_CACHE_DIR"}


@check("static", "log")
def unknown_variables(facts: Facts) -> Verdict:
    """Every VLLM_ environment variable is one that vLLM reads.

    vLLM warns once among a hundred lines; a misspelt switch then simply does not switch.
    """
    if "log.unknown_variables" in facts:
        strange = [name for name in facts["log.unknown_variables"] if name not in OUR_VARIABLES]
        known: frozenset[str] = facts.get("_env.known_variables", frozenset())
    else:
        if "static" not in facts.sources:  # this process's variables are not the server's
            return unknown(f"{facts['log.unknown_variables']}")
        variables = facts["env.variables"]
        if "_env.known_variables" not in facts:
            return unknown(f"{facts['env.known_variables']}")
        known = facts["_env.known_variables"]
        strange = sorted(name for name in variables if name not in known | OUR_VARIABLES)
    if not strange:
        return ok("no unknown VLLM_ variable")
    near = difflib.get_close_matches(strange[0], known, 1, 0.8)
    hint = f"did you mean {near[0]}?" if near else f"unset {strange[0]}"
    return warn(f"vLLM does not know {', '.join(strange[:5])}", hint)
