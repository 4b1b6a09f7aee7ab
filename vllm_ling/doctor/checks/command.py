# SPDX-License-Identifier: Apache-2.0
"""The serve command itself: flags that vLLM does not know, speculation settings, dummy weights."""

import difflib

from vllm_ling.doctor.facts.store import Facts
from vllm_ling.doctor.finding import Verdict, fail, ok, unknown
from vllm_ling.doctor.registry import check

_MTP = '--speculative-config \'{"method": "mtp", "num_speculative_tokens": 3}\''
# Methods that need no draft model, beside MTP; vLLM takes the model types' own names for mtp.
_WITHOUT_MODEL = ("mtp", "ngram", "ngram_gpu", "suffix")


@check("static")
def serve_flags(facts: Facts) -> Verdict:
    """vLLM knows every flag, and every JSON value is JSON.

    Flags are compared with the source of the installed vLLM; a unique beginning of a name counts, as for vLLM.
    """
    problems = facts["serve.flag_problems"]
    if problems:
        return fail(problems[0], "correct the value; in a shell, put JSON between single quotes")
    names = facts["serve.flags"]
    if "_env.known_flags" not in facts:
        return unknown(f"{facts['env.known_flags']}")
    known = facts["_env.known_flags"] | {"--strict"}
    for name in names:
        if not _is_known(name, known):
            near = difflib.get_close_matches(name, known, 1, 0.7)
            return fail(
                f"vLLM does not know {name}", f"did you mean {near[0]}?" if near else f"leave {name} out"
            )
    return ok(f"{len(names)} flags, all known")


def _is_known(name: str, known: frozenset[str]) -> bool:
    flag = name.replace("_", "-")
    if flag.startswith("--no-") and f"--{flag[5:]}" in known:
        return True
    return flag in known or (flag.startswith("--") and sum(k.startswith(flag) for k in known) == 1)


@check("static", "log")
def speculation_settings(facts: Facts) -> Verdict:
    """The speculation settings draft with the checkpoint's MTP layer.

    Without `method`, vLLM looks for a separate draft model and refuses; `num_speculative_tokens` must be 1 or more. No
    EAGLE or Medusa head belongs to a Ling checkpoint. `rejection_sample_method: synthetic`, left over from a benchmark,
    accepts drafts by lot: the output is not the model's.
    """
    given = facts["serve.speculative"]
    if given is None:
        return ok("no speculation")
    method, model = given.get("method"), given.get("model")
    if method is None and model is None:
        return fail("--speculative-config names no method: vLLM looks for a draft model", _MTP)
    if facts["serve.k"] < 1:
        return fail("num_speculative_tokens is 0", f"{_MTP}, or leave the option out")
    if method is None or (method not in _WITHOUT_MODEL and not str(method).endswith("_mtp")):
        return fail(f"speculation with {method or model!r}: not what a Ling checkpoint drafts with", _MTP)
    if given.get("rejection_sample_method") == "synthetic":
        return fail(
            "rejection_sample_method synthetic: drafts are accepted by lot, the output is noise",
            "leave rejection_sample_method out of --speculative-config",
        )
    return ok(f"method {method}, {facts['serve.k']} draft tokens")


@check("static", "log")
def weights_real(facts: Facts) -> Verdict:
    """The weights come from the checkpoint: `--load-format dummy`, left over from a benchmark, serves random ones."""
    load_format = facts["serve.load_format"]
    if load_format == "dummy":
        return fail(
            "--load-format dummy: the weights are random, the output is noise", "leave --load-format out"
        )
    return ok(f"load format {load_format}")
