# SPDX-License-Identifier: Apache-2.0
"""Measured round times: read from a result of bench decode, and the draft lengths replayed at them."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from vllm_ling.errors import LingError
from vllm_ling.eval.studies.draft_length import MOST, flash_costs, replay, walk
from vllm_ling.eval.studies.draft_traces import Trace
from vllm_ling.eval.studies.round_times import RoundTimes, read_round_times

RESULT = Path("eval/results/draft-length.json")
# Made up: a plain step of 3 ms, and 1 ms for each draft but the last, which is dear.
MS = [3.0, 4.0, 5.0, 6.0, 9.0]


def times(ms: list[float]) -> RoundTimes:
    return RoundTimes(ms, [(one, one) for one in ms], {})


def measured(accept: float = 2.0) -> dict[str, Any]:
    """A result of bench decode, as far as it is read, with rounds of `MS` at context 128 and slower ones at 4096."""
    rows, engines = [], {}
    for k, ms in enumerate(MS):
        workload, tokens = (f"mtp{k}@{accept:g}", accept) if k else ("plain", 1.0)
        for context, slower in ((4096, 1.5), (128, 1.0)):
            token = slower * ms / tokens
            row = {"workload": workload, "context": context, "ms_per_token": token}
            row |= {"spread_ms": [0.9 * token, 1.1 * token]}
            rows.append(row | ({"accept_length_seen": accept * 0.995} if k else {}))
        engine = {"options": {"moe": "ling"}, "model": "flash", "layers": 42, "draft_tokens": k}
        engines[f"ours {workload}"] = engine | {"accept_length": accept, "clocks": "1980 MHz", "date": "d"}
    return {"provenance": {"gpus": ["a GPU"]}, "rows": rows, "engines": engines, "errors": {}}


def write(tmp_path: Path, result: dict[str, Any]) -> Path:
    path = tmp_path / "rounds.json"
    path.write_text(json.dumps(result))
    return path


def texts(seed: int = 0) -> list[Trace]:
    """Drafts that are right in half of the positions, and know it."""
    chooser, found = random.Random(seed), []
    for _ in range(30):
        sure = [[chooser.random() < 0.5 for _ in range(MOST)] for _ in range(120)]
        drafts = [[at + 1 + i if right else -1 for i, right in enumerate(row)] for at, row in enumerate(sure)]
        probs = [[0.95 if right else 0.05 for right in row] for row in sure]
        found.append(Trace(4, list(range(120)), drafts, probs))
    return found


def test_a_round_is_the_time_of_a_token_times_its_tokens(tmp_path: Path) -> None:
    found = read_round_times(write(tmp_path, measured()), MOST)
    assert found.ms == pytest.approx(MS), "a whole accept length is exact, and the shortest context is taken"
    assert found.spread_ms[3] == pytest.approx((5.4, 6.6))
    data = found.as_data()
    assert data["round_ms"]["4"] == pytest.approx(9.0) and data["source"]["context"] == 128
    assert data["source"]["engines"][1]["clocks"] == "1980 MHz" and len(data["source"]["sha256"]) == 64
    drawn = read_round_times(write(tmp_path, measured(accept=1.5)), MOST)
    assert drawn.ms[0] == pytest.approx(3.0)
    assert drawn.ms[1:] == pytest.approx([ms * 0.995 for ms in MS[1:]]), "lots: what was seen counts"


def broken(result: dict[str, Any], what: str) -> dict[str, Any]:
    if what == "missing":
        result["rows"] = [row for row in result["rows"] if row["workload"] != "mtp2@2"]
    elif what == "failed":
        result["rows"][5]["ms_per_token"] = None
    elif what == "options":
        result["engines"]["ours mtp4@2"]["options"] = {"moe": "humming"}
    elif what == "unseen":
        del result["rows"][5]["accept_length_seen"]
    elif what == "other":
        result["rows"][5]["accept_length_seen"] = 1.0
    elif what == "twice":
        result["rows"].append(result["rows"][5] | {"workload": "mtp2@1"})
    elif what == "shape":
        del result["engines"]
    return result


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("missing", "no context has rounds of 0 to 4 drafts"),
        ("failed", "mtp2@2 was not measured"),
        ("options", "different options"),
        ("unseen", "accept length 2 was asked for, and none was seen"),
        ("other", "2 was asked for, and 1.0 was seen"),
        ("twice", "several accept lengths"),
        ("shape", "no result of bench decode"),
    ],
)
def test_what_cannot_be_charged_is_refused(what: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(LingError, match=said):
        read_round_times(write(tmp_path, broken(measured(), what)), MOST)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(LingError, match=r"none\.json: cannot be read"):
        read_round_times(tmp_path / "none.json", MOST)


def test_fixed_lengths_cost_their_round_and_bytes_stay_as_they_are() -> None:
    for k in range(1, MOST + 1):
        row = replay("made", f"k{k}", texts(), flash_costs(), times(MS))
        assert row.ms_per_token == pytest.approx(MS[k] / row.accept_length)
        assert (row.ms_accept_length, row.ms_drafted) == (row.accept_length, k)
        plain = replay("made", f"k{k}", texts(), flash_costs())
        assert plain.ms_per_token is None and "ms_per_token" not in plain.as_data()
        assert plain.as_data().items() <= row.as_data().items()


def test_a_gated_round_costs_what_it_drafted() -> None:
    """Charged again from the rounds themselves: two walks of the same decisions at costs that tell j apart."""
    whole = walk("gated", texts(), times(MS).costs(), whole_rounds=True)
    assert whole.drafted == whole.verified, "dropping a draft would save nothing"
    # Between 0 and 3 drafts a round costs 3 ms and 1 ms a draft; the gate must not have made the fourth, at 3 ms.
    assert whole.cost == pytest.approx(3 * whole.rounds + whole.drafted)


def test_the_gate_decides_by_the_measured_times() -> None:
    """Where drafts are free it makes all, where they are dear none, whatever the bytes say."""
    free = replay("made", "gated", texts(), flash_costs(), times([3.0] * 5))
    dear = replay("made", "gated", texts(), flash_costs(), times([3.0, 9.0, 15.0, 21.0, 27.0]))
    assert free.ms_drafted == MOST and dear.ms_drafted == 0
    assert dear.ms_per_token == pytest.approx(3.0) and free.drafted == dear.drafted
    assert 0 < free.drafted < MOST


def test_published_times_follow_from_their_rounds() -> None:
    """Where the published rows have times, all have them, and a fixed length costs its round."""
    data = json.loads(RESULT.read_text())
    timed = [row for row in data["rows"] if "ms_per_token" in row]
    assert len(timed) == (len(data["rows"]) if "measured_rounds" in data else 0)
    for row in timed:
        ms = data["measured_rounds"]["round_ms"]
        if row["policy"] == "gated":
            least, most = min(ms.values()), max(ms.values())
            assert least <= row["ms_per_token"] * row["ms_accept_length"] <= most
        else:
            assert row["ms_per_token"] == pytest.approx(ms[row["policy"][1:]] / row["accept_length"])
