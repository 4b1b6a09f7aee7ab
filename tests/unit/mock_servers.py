# SPDX-License-Identifier: Apache-2.0
"""Servers in a thread of the test, for tools that measure servers."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


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
