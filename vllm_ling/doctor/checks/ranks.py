# SPDX-License-Identifier: Apache-2.0
"""Whether the ranks of a server are what one of them says."""

from vllm_ling.doctor.facts.store import Facts
from vllm_ling.doctor.finding import Verdict, ok, unknown, warn
from vllm_ling.doctor.registry import check


@check("log", "live")
def ranks_agree(facts: Facts) -> Verdict:
    """Every rank decided the same, and what one has proven all have.

    With tensor parallelism each rank is a process that loads its own shard, chooses its kernels and compares its head
    by itself. All wait for the slowest, and every other check reads one record made of all, in which a rank that fell
    back can hide behind one that did not.
    """
    if facts["plugin.state"] != "active":
        return unknown("the plugin is not active, so no rank keeps a record", "see plugin_active")
    ranks, expected = facts["record.ranks"], int(facts["serve.tensor_parallel_size"] or 1)
    if len(ranks) < expected:
        return unknown(
            f"{expected} {'ranks serve' if expected > 1 else 'rank serves'} the model, and records of {len(ranks)} "
            "are there",
            "read the whole log of all ranks (--log), or /metrics of the server's own front process (--url)",
        )
    said: dict[str, dict[str, list[str]]] = {}
    for name, rank in ranks.items():
        for what, choice in rank["choices"].items():
            said.setdefault(what, {}).setdefault(choice, []).append(name)
    for what, choices in said.items():
        if len(choices) > 1:
            shown = "; ".join(f"{choice} on {', '.join(names[:3])}" for choice, names in choices.items())
            return warn(
                f"{what}: {shown}",
                "mend what the slower rank's reason names (ling:choice in /metrics, or its line in the log)",
                "all ranks wait for the slowest",
            )
    # With pipeline stages only the last holds a head, and only it can prove it.
    holders = {name: rank for name, rank in ranks.items() if "lm_head" in rank["choices"]}
    for code in ("head_probe", "draft_head"):
        lacking = [name for name, rank in holders.items() if code not in rank["proofs"]]
        if 0 < len(lacking) < len(holders):
            return unknown(
                f"{code} is not proven on {', '.join(lacking[:3])}, but on other ranks", "see proofs_hold"
            )
    return ok(f"{len(ranks)} {'ranks agree' if len(ranks) > 1 else 'rank'}: {', '.join(list(ranks)[:8])}")
