# SPDX-License-Identifier: Apache-2.0
"""Why a gain on a synthetic load is not the gain on real text: the two, and what stands between them. Pure arithmetic.

A request takes T + n t: fixed time T (to the first token), n further tokens of t each. With speculation t = s / a, step
time over accept length. The gain of a run b over a baseline a is the ratio of mean latencies, and is exactly

    accept length x step time x fixed time x output length

with step time = t_a / s_b, output length = (T_a + n_a t_a) / (T_a + n_b t_a), and fixed time the factor by which T
keeps the latency from gaining as much as t. The gap is real gain over synthetic gain: the product of the
factors' ratios.
"""

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Load:
    """Means over one workload on one server.

    Attributes:
        ttft_s: time to first token.
        tokens: output tokens after the first.
        tpot_s: time per output token after the first.
        accept_length: 1 without speculation.
    """

    ttft_s: float
    tokens: float
    tpot_s: float
    accept_length: float = 1.0

    @property
    def latency_s(self) -> float:
        """Of a mean request."""
        return self.ttft_s + self.tokens * self.tpot_s


@dataclass(frozen=True)
class Gain:
    """A ratio of latencies (above 1: faster) and its factors."""

    total: float
    accept_length: float
    step_time: float
    fixed_time: float
    output_length: float


def gain(base: Load, run: Load) -> Gain:
    """How much faster `run` is than `base`, factor by factor; the factors multiply to the total."""
    same_length = base.ttft_s + run.tokens * base.tpot_s
    token = base.tpot_s / run.tpot_s
    accept = run.accept_length / base.accept_length
    return Gain(
        total=base.latency_s / run.latency_s,
        accept_length=accept,
        step_time=token / accept,
        fixed_time=same_length / run.latency_s / token,
        output_length=base.latency_s / same_length,
    )


def explain_gap(synthetic: Gain, real: Gain) -> dict[str, float]:
    """Real over synthetic, for the whole gain ("total") and for each factor; the factors multiply to the total."""
    return {name: value / asdict(synthetic)[name] for name, value in asdict(real).items()}
