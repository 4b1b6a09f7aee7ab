# SPDX-License-Identifier: Apache-2.0
"""Servers in a thread of the test, for tools that measure servers."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


@contextmanager
def serving(handler_class: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Base URL of a server that runs in a thread."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler_class)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def steadily(measure: Callable[[], None], tries: int = 5) -> None:
    """Runs a test of speed again if it fails: a busy machine delays a run now and then, a wrong tool always fails."""
    for number in range(1, tries + 1):
        try:
            measure()
            return
        except AssertionError:
            if number == tries:
                raise


def servers_of(folder: Path) -> list[str]:
    """Command lines of mock servers that carry `folder`, as a tag of the test that started them."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if "vllm_ling.eval.serving.mock_server" in words and str(folder) in words:
            found.append(" ".join(words))
    return found
