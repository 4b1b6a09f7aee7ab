# SPDX-License-Identifier: Apache-2.0
"""One page of a server, read with hard limits on size and time whatever the other side does."""

import queue
import threading
import time
from dataclasses import dataclass

from vllm_ling.doctor.text import clean

MAX_BYTES = 4 << 20
DEADLINE_S = 2.0


class ServerUnreadable(Exception):
    """A page that could not be read; the message says why."""


@dataclass(frozen=True)
class Page:
    """What was read; `local` says whether the other side has this machine's own address, None if that is not known."""

    text: str
    local: bool | None = None


def fetch(url: str, max_bytes: int = MAX_BYTES, deadline_s: float = DEADLINE_S) -> str:
    """The text of `read_page`."""
    return read_page(url, max_bytes, deadline_s).text


def read_page(url: str, max_bytes: int = MAX_BYTES, deadline_s: float = DEADLINE_S) -> Page:
    """A page of at most `max_bytes` within `deadline_s`; redirects are refused, nothing is decompressed.

    It is read in a thread that is left behind at the deadline: name resolution and a server that sends its header one
    byte at a time know no limit on the whole.

    Raises:
        ServerUnreadable: with the reason.
    """
    answers: queue.SimpleQueue[Page | ServerUnreadable] = queue.SimpleQueue()

    def work() -> None:
        try:
            answers.put(_read(url, max_bytes, deadline_s))
        except ServerUnreadable as error:
            answers.put(error)
        except Exception as error:  # whatever a foreign server provokes is an answer too
            answers.put(ServerUnreadable(f"{url}: {type(error).__name__}: {clean(error, 100)}"))

    threading.Thread(target=work, daemon=True).start()
    try:
        answer = answers.get(timeout=max(0.0, deadline_s))
    except queue.Empty:
        raise ServerUnreadable(f"{url}: no whole answer within {deadline_s:.1f} s") from None
    if isinstance(answer, ServerUnreadable):
        raise answer
    return answer


def _read(url: str, max_bytes: int, deadline_s: float) -> Page:
    import httpx

    until = time.monotonic() + deadline_s
    body = bytearray()
    with (
        httpx.Client(trust_env=False, follow_redirects=False, timeout=max(0.01, deadline_s)) as client,
        client.stream("GET", url, headers={"Accept-Encoding": "identity"}) as response,
    ):
        if response.is_redirect:
            target = clean(response.headers.get("location", ""), 80)
            raise ServerUnreadable(f"{url}: redirects to {target!r}, which is not followed")
        if response.status_code != 200:
            raise ServerUnreadable(f"{url}: HTTP {response.status_code}")
        local = _is_local(response.extensions.get("network_stream"))
        for chunk in response.iter_raw():
            body += chunk
            if len(body) > max_bytes:
                raise ServerUnreadable(f"{url}: more than {max_bytes >> 20} MB")
            if time.monotonic() > until:  # nobody waits for it any more
                raise ServerUnreadable(f"{url}: did not end within {deadline_s:.1f} s")
    return Page(body.decode("utf-8", errors="replace"), local)


def _is_local(stream: object) -> bool | None:
    """Both ends of the connection have the same address only if both are this machine."""
    info = getattr(stream, "get_extra_info", None)
    if info is None:
        return None
    here, there = info("client_addr"), info("server_addr")
    return None if not here or not there else bool(here[0] == there[0])
