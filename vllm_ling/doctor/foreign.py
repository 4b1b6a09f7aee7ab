# SPDX-License-Identifier: Apache-2.0
"""Whether the sources speak of a Ling model at all; no other model is judged by Ling's rules."""

from vllm_ling.compat import ARCHITECTURE, MTP_ARCHITECTURE
from vllm_ling.doctor.facts.store import Facts
from vllm_ling.doctor.text import clean


def other_model(facts: Facts) -> str | None:
    """Why this is another model, or None if it is a Ling model or nobody says.

    A Ling checkpoint that was forced into another class stays a Ling model; that has a check of its own.
    """
    ours = facts.get("checkpoint.is_ling")
    if ours is False:
        return _said(facts["checkpoint.name"], facts.get("checkpoint.architectures"))
    resolved = facts.get("log.architectures")
    forced = facts.get("serve.architectures") or facts.get("serve.model_impl") not in (None, "auto", "vllm")
    if ours is None and resolved and not forced and not {ARCHITECTURE, MTP_ARCHITECTURE} & set(resolved):
        return _said(facts.get("serve.model"), resolved)
    return None


def _said(model: object, architectures: object) -> str:
    listed = architectures if isinstance(architectures, list) else [architectures]
    return f"{clean(model, 100)} is no Ling-3.0 model ({clean(', '.join(map(str, listed[:3])), 100)}): not judged"
