# SPDX-License-Identifier: Apache-2.0
r"""Fixed against earned draft length on tiny-ling's drafts, at Ling-3.0-flash's costs: eval/results/draft-length.json.

The drafts and their probabilities are tiny-ling's, replayed exactly (`draft_traces`). Two sets: `held_out` (greedy
answers to held-out problems, what the model knows) and `hard` (text sampled at a high temperature after random words,
what no draft can know). A round costs what the byte model says of flash in FP4 with an FP8 head, and with `--rounds`
also the milliseconds that `bench decode` measured (`round_times`): the gate then decides by those.

    python -m vllm_ling.eval.studies.draft_length --rounds eval/results/h200-rounds.json \
        --out eval/results/draft-length.json
"""

import argparse
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from vllm_ling.checkpoint.locate import resolve_model
from vllm_ling.eval.files import write_json
from vllm_ling.eval.provenance import provenance
from vllm_ling.eval.studies.draft_traces import Trace, sample, traces
from vllm_ling.eval.studies.round_times import RoundTimes, read_round_times
from vllm_ling.reference.load import from_checkpoint
from vllm_ling.reference.model import LingReference
from vllm_ling.roofline.bytes import ByteModel
from vllm_ling.roofline.models import model_shape
from vllm_ling.spec_decode.gate import Costs, DraftGate
from vllm_ling.tiny.evaluate import load_heldout
from vllm_ling.tiny.tokenizer import render_chat

MOST = 4
CONTEXT = 1024
_TOKENS = 96
_HOT = 2.0


@dataclass(frozen=True)
class Row:
    """One policy on one set.

    Attributes:
        drafted, verified: draft tokens a round, on average.
        ms_per_token: at measured round times, with `ms_accept_length` and `ms_drafted` of the rounds that the policy
            then chooses; None where no times were given.
    """

    set: str
    policy: str
    rounds: int
    accept_length: float
    bytes_per_token: float
    drafted: float
    verified: float
    ms_per_token: float | None = None
    ms_accept_length: float | None = None
    ms_drafted: float | None = None

    def as_data(self) -> dict[str, Any]:
        """Plain JSON data; what was not measured is left out."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class Walk:
    """What a policy did with a set of texts; `cost` is of all rounds, in the unit of the costs."""

    rounds: int
    tokens: int
    cost: float
    drafted: int
    verified: int


def flash_bytes(draft_rows: int | None = None) -> ByteModel:
    """Flash in FP4 with an FP8 head, of which the draft reads `draft_rows` rows (None: all)."""
    return ByteModel(model_shape("flash", "fp4"), head="fp8", context=CONTEXT, draft_rows=draft_rows)


def flash_costs(draft_rows: int | None = None) -> Costs:
    """Bytes of flash's target steps over 1 to MOST + 1 tokens and of a draft step."""
    model = flash_bytes(draft_rows)
    return Costs([0.0, *(model.step_bytes(n) for n in range(1, MOST + 2))], model.draft_bytes())


def replay(
    name: str, policy: str, texts: Sequence[Trace], costs: Costs, times: RoundTimes | None = None
) -> Row:
    """One row; `policy` is "k1" to "k4" or "gated". `times`: also walk at these."""
    found = walk(policy, texts, costs)
    row = Row(
        set=name,
        policy=policy,
        rounds=found.rounds,
        accept_length=found.tokens / found.rounds,
        bytes_per_token=found.cost / found.tokens,
        drafted=found.drafted / found.rounds,
        verified=found.verified / found.rounds,
    )
    if times is None:
        return row
    timed = walk(policy, texts, times.costs(), whole_rounds=True)
    return replace(
        row,
        ms_per_token=timed.cost / timed.tokens,
        ms_accept_length=timed.tokens / timed.rounds,
        ms_drafted=timed.drafted / timed.rounds,
    )


def walk(policy: str, texts: Sequence[Trace], costs: Costs, whole_rounds: bool = False) -> Walk:
    """Walks the texts round by round.

    Args:
        whole_rounds: a round costs by what it drafted, so whatever is drafted is verified.
    """
    rounds = tokens = drafted = verified = 0
    cost = 0.0
    gate = DraftGate(costs, MOST) if policy == "gated" else None  # one for all texts, as a server has
    for text in texts:
        last = text.prompt
        while last < len(text.tokens) - 1:
            left = len(text.tokens) - 1 - last
            if gate is None:
                made = kept = int(policy[1:])
                probabilities = text.probs[last][:made]
            else:
                chances: list[float] = []
                while gate.draft_more(chances):
                    chances.append(gate.chance(text.probs[last][len(chances)]))
                made = len(chances)
                kept = made if whole_rounds else gate.verify(chances)
                probabilities = text.probs[last][:made]
            accepted = min(text.matches(last), kept)
            emitted = min(accepted + 1, left)
            if gate is not None:
                gate.observe(probabilities, kept, accepted)
            cost += costs.draft * made + costs.verify[kept + 1]
            rounds, tokens, last = rounds + 1, tokens + emitted, last + emitted
            drafted, verified = drafted + made, verified + kept
    return Walk(rounds, tokens, cost, drafted, verified)


def text_sets(items: int, seed: int = 0) -> dict[str, list[Trace]]:
    """Traces of both sets, `items` texts each."""
    model, texts = emitted(items, seed)
    return {name: traces(model, *pair, MOST) for name, pair in texts.items()}


def emitted(
    items: int, seed: int = 0
) -> tuple[LingReference, dict[str, tuple[list[list[int]], list[list[int]]]]]:
    """tiny-ling, and per set its prompts and the tokens it emits after them."""
    folder = resolve_model("tiny-ling")
    assert folder is not None
    model = from_checkpoint(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    known = [tokenizer.encode(render_chat(item["question"])).ids for item in load_heldout(items)]
    words = " ".join(item["question"] for item in load_heldout(items)).split()
    chooser = random.Random(seed)
    unknown = [tokenizer.encode(" ".join(chooser.choices(words, k=24))).ids for _ in range(items)]
    return model, {
        "held_out": (known, sample(model, known, _TOKENS // 2, 0.0, seed)),
        "hard": (unknown, sample(model, unknown, _TOKENS, _HOT, seed)),
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--items", type=int, default=64)
    parser.add_argument("--out", type=Path, default=Path("build/draft-length.json"))
    parser.add_argument(
        "--rounds", type=Path, help="result of bench decode with --draft 0 to 4: measured times"
    )
    args = parser.parse_args()
    times = read_round_times(args.rounds, MOST) if args.rounds else None
    costs, rows = flash_costs(), []
    for name, texts in text_sets(args.items).items():
        for policy in (*(f"k{k}" for k in range(1, MOST + 1)), "gated"):
            row = replay(name, policy, texts, costs, times)
            rows.append(row.as_data())
            timed = "" if row.ms_per_token is None else f"  {row.ms_per_token:.3f} ms a token"
            print(
                f"{name:9} {policy:6} accept length {row.accept_length:.2f}  {row.bytes_per_token / 1e9:.3f} GB a token"
                f"  drafted {row.drafted:.2f} verified {row.verified:.2f}{timed}"
            )
    measured = {} if times is None else {"measured_rounds": times.as_data()}
    write_json(args.out, {"provenance": provenance(), **measured, "rows": rows})


if __name__ == "__main__":
    main()
