# SPDX-License-Identifier: Apache-2.0
"""What is asked of a server before a run: servers of other kinds, and pages that cannot be read."""

import json
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from tests.unit.mock_servers import serving
from vllm_ling.errors import LingError
from vllm_ling.eval.runs.commands import check_out
from vllm_ling.eval.serving.metrics import DRAFTS
from vllm_ling.eval.serving.mock_server import main
from vllm_ling.eval.serving.served import describe
from vllm_ling.eval.serving.target import target
from vllm_ling.metrics import names

MODELS = json.dumps({"data": [{"id": "org/m-1", "max_model_len": 99}]})


def pages(found: dict[str, str]) -> type[BaseHTTPRequestHandler]:
    """A server of these pages."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path in found else 404)
            self.end_headers()
            self.wfile.write(found.get(self.path, "").encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler


@pytest.mark.parametrize("version", ["", "<html>", "[1]", "null"])
def test_a_server_that_has_no_more_than_its_models(version: str) -> None:
    with serving(pages({"/v1/models": MODELS, "/version": version, "/metrics": "<html>\n{"})) as url:
        found = describe(url + "/v1/")
    assert (found.model, found.max_model_len, found.version, found.plugin) == ("org/m-1", 99, None, False)


@pytest.mark.parametrize(("states", "active"), [("inactive inactive", False), ("inactive active", True)])
def test_a_plugin_that_is_switched_off_says_so_and_is_none(states: str, active: bool) -> None:
    page = "".join(
        f'{names.PLUGIN}{{process="{n}",state="{state}",reason="",version="1"}} 1.0\n'
        for n, state in enumerate(states.split())
    )
    with serving(pages({"/v1/models": MODELS, "/metrics": page})) as url:
        assert describe(url).plugin is active


@pytest.mark.parametrize("models", ["<html>", "[1]", "{}", '{"data": [7]}', '{"data": [{"name": "x"}]}'])
def test_no_list_of_models_is_named(models: str) -> None:
    words = r"/v1/models: no list of models.*--url"
    with serving(pages({"/v1/models": models})) as url, pytest.raises(LingError, match=words):
        describe(url)


@pytest.mark.parametrize("line", ["ling:choice{what=", names.CHOICE + '{a="b"} 1', DRAFTS + " x"])
def test_a_record_that_cannot_be_read_is_named(line: str) -> None:
    found = {"/v1/models": MODELS, "/metrics": line + "\n"}
    with serving(pages(found)) as url, pytest.raises(LingError, match="/metrics: not readable"):
        describe(url)


def test_a_place_for_the_result_is_looked_at_first(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LingError, match="is a folder; name a file in it"):
        check_out(tmp_path)
    with pytest.raises(LingError, match="nothing can be written to"):
        check_out(tmp_path / "file" / "r.json")
    check_out(tmp_path / "new" / "r.json")


def test_the_port_is_ours_however_it_is_written(tmp_path: Path) -> None:
    for words in (["m", "--port", "1"], ["m", "--port=1"]):
        with pytest.raises(LingError, match="--port"), target(None, words, model=None, log=tmp_path / "log"):
            pass


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--speculative-config", "{}", "--accept", "0"], None),
        (["--speculative-config", '{"method": "mtp"}', "--accept", "2,0"], "--accept 2,0"),
        (["--speculative-config", '{"method": "mtp"}', "--accept", "two"], "--accept two"),
        (["--pretend", "lm_head"], "--pretend lm_head: expected WHAT=CHOICE"),
        (["--fail", "fire:1"], "--fail fire:1"),
    ],
)
def test_the_mock_names_a_bad_option(words: list[str], said: str | None) -> None:
    """The last check is the port's, which is out of range, so that none of them serves."""
    with pytest.raises(LingError, match=said or "--port 70000: .*choose another"):
        main(["--port", "70000", *words])
