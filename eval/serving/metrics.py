# SPDX-License-Identifier: Apache-2.0
"""vLLM's Prometheus counters: what happened between two readings, never averages since the server started."""

import math
from dataclasses import dataclass
from itertools import zip_longest

import httpx
from prometheus_client.parser import text_string_to_metric_families

_PREFIX = "vllm:spec_decode_num_"
DRAFTS = f"{_PREFIX}drafts_total"
ACCEPTED = f"{_PREFIX}accepted_tokens_total"
ACCEPTED_AT = f"{_PREFIX}accepted_tokens_per_pos_total"


@dataclass(frozen=True)
class SpecCounters:
    """Draft rounds and accepted draft tokens since the server started, over all engines; zero without speculation.

    Attributes:
        accepted_at: rounds that accepted position 1, 2, ..., k; empty without speculation.
    """

    drafts: float
    accepted: float
    accepted_at: tuple[float, ...] = ()

    def since(self, earlier: "SpecCounters") -> "SpecCounters":
        """The change from an earlier reading."""
        pairs = zip_longest(self.accepted_at, earlier.accepted_at, fillvalue=0.0)
        return SpecCounters(
            self.drafts - earlier.drafts,
            self.accepted - earlier.accepted,
            tuple(now - then for now, then in pairs),
        )

    @property
    def accept_length(self) -> float | None:
        """Tokens per verification, 1 + accepted / drafts (vLLM's own definition); None if nothing was drafted."""
        return 1 + self.accepted / self.drafts if self.drafts else None


def parse_counters(text: str) -> SpecCounters:
    """Reads a /metrics page.

    Raises:
        ValueError: the counters are there but cannot be read.
    """
    totals, positions = {DRAFTS: 0.0, ACCEPTED: 0.0}, dict[int, float]()
    # Parsing all of a page takes long enough to delay the requests that are being timed.
    lines = [line for line in text.split("\n") if line.startswith(_PREFIX)]
    for family in text_string_to_metric_families("\n".join([*lines, ""])):
        for sample in family.samples:
            if not math.isfinite(sample.value):
                raise ValueError(f"{sample.name} is {sample.value}")
            if sample.name in totals:
                totals[sample.name] += sample.value
            elif sample.name == ACCEPTED_AT:
                position = int(sample.labels.get("position", ""))
                positions[position] = positions.get(position, 0.0) + sample.value
    at = tuple(positions.get(position, 0.0) for position in range(max(positions, default=-1) + 1))
    return SpecCounters(totals[DRAFTS], totals[ACCEPTED], at)


def read_counters(base_url: str) -> SpecCounters:
    """Fetches and reads BASE_URL/metrics.

    Raises:
        httpx.HTTPError: if the server does not answer with a page.
    """
    return parse_counters(
        httpx.get(f"{base_url}/metrics", timeout=30, trust_env=False).raise_for_status().text
    )
