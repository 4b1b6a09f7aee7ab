# SPDX-License-Identifier: Apache-2.0
"""What each process of a server decided and proved; the merged record shows one answer where ranks gave several."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_ling.doctor.facts.store import Facts

# vLLM puts it before each line; where a progress bar is being drawn, somewhere behind its beginning.
_PROCESS = re.compile(r"\((\w+) pid=(\d+)\)")
# Phrase -> part of the record.
RECORDED = {"ling_choice": "choices", "ling_proof": "proofs", "ling_fault": "faults"}
_MOST_PROCESSES, _MOST = 256, 512


@dataclass
class Rank:
    """The record of one process."""

    name: str = ""
    choices: dict[str, list[str]] = field(default_factory=dict)
    proofs: dict[str, str] = field(default_factory=dict)
    faults: dict[str, str] = field(default_factory=dict)


class LogRecords:
    """The plugin's lines of a log by process (its id; a name changes while a worker starts), bounded in number."""

    def __init__(self) -> None:
        self.ranks: dict[str, Rank] = {}

    def add(self, line: str, kind: str, groups: list[str]) -> None:
        """A line that is a `ling_choice`, `ling_proof` or `ling_fault`."""
        process = _PROCESS.search(line)
        rank = self.ranks.setdefault(process[2] if process else "", Rank())
        rank.name = process[1] if process else ""
        told: dict[str, Any] = getattr(rank, RECORDED[kind])
        told.pop(groups[0], None)  # a decision that was revised is the latest one
        told[groups[0]] = groups[1:] if kind == "ling_choice" else groups[1]
        for full, most in ((told, _MOST), (self.ranks, _MOST_PROCESSES)):
            if len(full) > most:
                del full[next(iter(full))]


def put_ranks(facts: Facts, ranks: Mapping[str, Rank], origin: str) -> None:
    """States `record.*`: choices, proofs and faults of all processes as one, and `record.ranks`, process by process.

    A rank is a process that made a choice; the front process and an engine core with workers make none.
    """
    merged = Rank()
    for rank in ranks.values():
        merged.choices |= rank.choices
        merged.proofs |= rank.proofs
        merged.faults |= rank.faults
    facts.put("record.choices", merged.choices, origin)
    facts.put("record.proofs", merged.proofs, origin)
    facts.put("record.faults", merged.faults, origin)
    alone = {
        f"{rank.name} {key}".strip() or "the process": {
            "choices": {what: choice for what, (choice, _) in rank.choices.items()},
            "proofs": sorted(rank.proofs),
            "faults": sorted(rank.faults),
        }
        for key, rank in ranks.items()
        if rank.choices
    }
    facts.put("record.ranks", alone, origin)
