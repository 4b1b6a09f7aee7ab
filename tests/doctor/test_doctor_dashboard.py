# SPDX-License-Identifier: Apache-2.0
"""Dashboard and alert rules against the series and labels that a captured server exported; e2e asks a running one."""

import json
import re
from importlib.resources import files
from itertools import combinations

import pytest
import yaml

from tests.doctor.evidence import FOLDER
from vllm_ling.metrics import names

PAGES = "".join((FOLDER / f"cpu-{name}.after").read_text() for name in ("mtp", "trap"))
BOARD = json.loads((files("vllm_ling.metrics") / "dashboard.json").read_text())
RULES = yaml.safe_load((files("vllm_ling.metrics") / "alerts.yaml").read_text())["groups"][0]["rules"]
QUERIES = [target["expr"] for panel in BOARD["panels"] for target in panel["targets"]]
QUERIES += [rule["expr"] for rule in RULES]
# Added by Prometheus itself, or by its histograms; captured pages hold no histograms.
OUTSIDE = {"job", "instance", "le"}


def labels_of(series: str) -> set[str]:
    """Labels of a captured series."""
    lines = re.findall(rf"^{re.escape(series)}{{(.*)}} ", PAGES, re.MULTILINE)
    return {name for line in lines for name in re.findall(r'(\w+)="', line)}


@pytest.mark.parametrize("query", QUERIES)
def test_every_series_and_label_was_exported(query: str) -> None:
    used = re.findall(r"\b((?:vllm|ling):\w+)(?:{([^}]*)})?", query)
    assert used
    captured = set(re.findall(r"^((?:vllm|ling):\w+)", PAGES, re.MULTILINE))
    labels: set[str] = set()
    for series, matchers in used:
        if series.endswith("_bucket"):
            continue
        assert series in captured
        labels |= labels_of(series)
        assert set(re.findall(r"(\w+)\s*(?:=~|!=|=)", matchers)) <= labels_of(series)
    grouped = re.findall(r"\b(?:by|on|ignoring) \(([^)]*)\)", query)
    assert {name.strip() for group in grouped for name in group.split(",")} <= labels | OUTSIDE


@pytest.mark.parametrize("query", QUERIES)
def test_brackets_close(query: str) -> None:
    bare = re.sub(r'"[^"]*"', "", query)
    for opening, closing in ("()", "{}", "[]"):
        assert bare.count(opening) == bare.count(closing)


def test_every_own_series_of_speculation_is_shown() -> None:
    shown = {name for query in QUERIES for name in re.findall(r"ling:\w+", query)}
    assert shown == set(names.ALL)


def test_panels_neither_overlap_nor_share_an_id() -> None:
    panels = BOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for first, second in combinations((panel["gridPos"] for panel in panels), 2):
        apart = first["x"] + first["w"] <= second["x"] or second["x"] + second["w"] <= first["x"]
        apart = apart or first["y"] + first["h"] <= second["y"] or second["y"] + second["h"] <= first["y"]
        assert apart
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in panels)
    assert all(panel["datasource"]["uid"] == "${datasource}" for panel in panels)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_every_alert_says_what_to_do(rule: dict[str, object]) -> None:
    assert re.fullmatch(r"Ling[A-Z]\w+", str(rule["alert"]))
    assert rule["labels"] in ({"severity": "critical"}, {"severity": "warning"})
    annotations = rule["annotations"]
    assert isinstance(annotations, dict) and set(annotations) == {"summary", "action"}
    assert all(len(str(text)) > 15 for text in annotations.values())


def test_alert_names_differ() -> None:
    assert len({rule["alert"] for rule in RULES}) == len(RULES) >= 9
