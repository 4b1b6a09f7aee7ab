# SPDX-License-Identifier: Apache-2.0
"""The server to evaluate: one that runs already, or one started for the run and ended after it."""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from vllm_ling.errors import LingError
from vllm_ling.eval.serving.served import Served, describe
from vllm_ling.eval.serving.servers import free_port, running

SERVE = (sys.executable, "-m", "vllm_ling.cli", "serve")
# A server of ours needs no network and no telemetry; what the user has set wins.
SERVER_ENV = {"DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
START_S = 1800.0  # a first start compiles kernels and reads 70 GB


@contextmanager
def target(
    url: str | None,
    serve: Sequence[str],
    *,
    model: str | None,
    log: Path,
    command: Sequence[str] = SERVE,
    env: Mapping[str, str] | None = None,
) -> Iterator[Served]:
    """The server at `url`, or `command` with the arguments `serve` for the length of the `with` block.

    Args:
        serve: MODEL and flags, as for `vllm-ling serve`.
        model: served name, where the server has several.
        log: where a started server prints.

    Raises:
        LingError: both or neither given, or no server answers.
    """
    if bool(url) == bool(serve):
        raise LingError("give either --url URL of a running server, or MODEL and its serve flags after --")
    if url:
        yield describe(url, model)
        return
    if any(word.split("=")[0] == "--port" for word in serve):
        raise LingError("--port: the server for this run gets a free port; leave the option out")
    port = free_port()
    variables = {name: value for name, value in SERVER_ENV.items() if name not in os.environ}
    with running(
        [*command, *serve, "--host", "127.0.0.1", "--port", str(port)],
        port=port,
        log=log,
        env={**variables, **(env or {})},
        timeout_s=START_S,
    ) as server:
        yield describe(server.url, model)
