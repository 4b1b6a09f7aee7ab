# SPDX-License-Identifier: Apache-2.0
"""`vllm-ling eval compare`: two result files over the same items, with what may be claimed of the difference."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vllm_ling.errors import LingError
from vllm_ling.eval.report.result_file import Item, load
from vllm_ling.eval.report.statistics import Comparison, bootstrap, compare_accuracy, ratio_of_means

_TIMES = ("tpot_ms", "ttft_s", "latency_s")


def compare(first: Path, second: Path, margin: float) -> dict[str, Any]:
    """Accuracy and speed of `second` against `first`, paired by item id.

    Items that either run has no answer to are left out of the accuracy and counted.

    Raises:
        LingError: unreadable files, different data, or no item in common.
    """
    a, b = load(first), load(second)
    hashes = [file.provenance.get("data_sha256") for file in (a, b)]
    if hashes[0] != hashes[1]:
        raise LingError(
            f"{first} and {second} are about different data (provenance.data_sha256 {hashes[0]}, {hashes[1]})"
        )
    pairs = _paired(a.items, b.items)
    if not pairs:
        raise LingError(f"{first} and {second} have no item in common")
    accuracy = paired_accuracy(a.items, b.items, margin)
    return {
        "items": len(pairs),
        "unpaired": len(a.items) + len(b.items) - 2 * len(pairs),
        "unanswered": len(pairs) - (accuracy.items if accuracy else 0),
        "margin": margin,
        "accuracy": accuracy and asdict(accuracy),
        "ratios": {name: _ratio(pairs, name) for name in _TIMES},
        "accept_length": [a.summary.accept_length, b.summary.accept_length],
        "tok_per_s": [a.summary.tok_per_s, b.summary.tok_per_s],
    }


def paired_accuracy(first: Sequence[Item], second: Sequence[Item], margin: float) -> Comparison | None:
    """Accuracy of the items that both runs have a judged answer to; None without any."""
    judged = [
        (x.correct, y.correct)
        for x, y in _paired(first, second)
        if x.correct is not None and y.correct is not None
    ]
    return compare_accuracy([x for x, _ in judged], [y for _, y in judged], margin) if judged else None


def _paired(first: Sequence[Item], second: Sequence[Item]) -> list[tuple[Item, Item]]:
    other = {item.id: item for item in second}
    return [(item, other[item.id]) for item in first if item.id in other]


def _ratio(pairs: list[tuple[Item, Item]], name: str) -> dict[str, float] | None:
    values = [(getattr(x, name), getattr(y, name)) for x, y in pairs]
    known = [(x, y) for x, y in values if x is not None and y is not None]
    return asdict(bootstrap(known, ratio_of_means)) if known and sum(x for x, _ in known) > 0 else None


def run(first: Path, second: Path, margin: float, as_json: bool) -> int:
    """The command: prints the comparison. Returns 0 for PASS, 1 for INCONCLUSIVE or nothing to judge, 2 for FAIL."""
    if not 0 < margin < 1:
        raise LingError(f"--margin {margin:g}: a share of the items between 0 and 1, such as 0.01")
    found = compare(first, second, margin)
    accuracy = found["accuracy"]
    if as_json:
        print(json.dumps(found, indent=1))
    else:
        print(
            f"{found['items']} items in both, {found['unpaired']} in one only, {found['unanswered']} without an answer"
        )
        if accuracy:
            low, high = accuracy["difference"]["low"], accuracy["difference"]["high"]
            print(
                f"accuracy {accuracy['accuracy'][0]:.2%} and {accuracy['accuracy'][1]:.2%}: {accuracy['sentence']}"
            )
            print(f"difference {low:+.2%} to {high:+.2%} (95%), margin {margin:.2%}: {accuracy['verdict']}")
        for name, ratio in found["ratios"].items():
            if ratio:
                print(f"{name}: {ratio['estimate']:.3f} times ({ratio['low']:.3f} to {ratio['high']:.3f})")
        for name in ("tok_per_s", "accept_length"):
            x, y = found[name]
            if x is not None and y is not None:
                print(f"{name}: {x:.2f} and {y:.2f}")
    return {"PASS": 0, "FAIL": 2}.get(accuracy["verdict"] if accuracy else "", 1)
