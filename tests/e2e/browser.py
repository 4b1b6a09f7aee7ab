# SPDX-License-Identifier: Apache-2.0
"""A headless Chromium for tests: what a page becomes in it, what it says on its console and asks of the network."""

import json
import os
import shutil
import subprocess
import threading
from dataclasses import dataclass
from html import escape, unescape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
# The browser's own conversation with its maker is not the page's.
QUIET = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--no-pings"),
    *("--disable-background-networking", "--disable-component-update", "--disable-default-apps"),
    *("--disable-domain-reliability", "--disable-sync", "--disable-extensions", "--disable-dev-shm-usage"),
    *(
        "--disable-client-side-phishing-detection",
        "--metrics-recording-only",
        "--force-device-scale-factor=1",
    ),
    "--disable-features=OptimizationHints,MediaRouter,Translate",
)
# Requests that remain are made whatever the page is.
BROWSERS_OWN = (".google.com", ".googleapis.com", ".gvt1.com")
MEASURE = """<script>
const box = (e) => { const r = e.getBoundingClientRect(); return [r.left, r.top, r.right, r.bottom]; };
const plots = {};
for (const svg of document.querySelectorAll("svg.plot")) {
  plots[svg.id] = {box: box(svg), texts: [...svg.querySelectorAll("text")].map((e) => [e.textContent, box(e)]),
    card: box(svg.closest("figure"))};
}
const out = parent.document.createElement("pre");
out.id = "measured";
out.textContent = JSON.stringify({plots, inner: innerWidth, page: document.documentElement.scrollWidth});
parent.document.body.append(out);
</script>"""


@dataclass(frozen=True)
class Visit:
    """What came of loading a page: the document after loading, console lines, requests that left the file."""

    dom: str
    console: list[str]
    requests: list[str]


def find() -> str:
    """The browser's command; skips the test where there is none, and fails it in CI, which installs one."""
    for name in NAMES:
        if found := shutil.which(name):
            return found
    missing = "no Chromium found: install the Debian package `chromium` (.ci/run does)"
    if os.environ.get("CI") == "true":
        pytest.fail(missing)
    pytest.skip(missing)


def visit(browser: str, page: Path, width: int, shot: Path | None = None, dark: bool = False) -> Visit:
    """Loads a file, through a proxy that answers nothing and writes down what it is asked."""
    asked: list[str] = []

    class Recorder(BaseHTTPRequestHandler):
        def handle_one_request(self) -> None:
            asked.append(self.rfile.readline(65536).decode("latin-1").strip())
            self.close_connection = True
            self.wfile.write(b"HTTP/1.1 502 Nothing\r\nContent-Length: 0\r\n\r\n")

    proxy = ThreadingHTTPServer(("127.0.0.1", 0), Recorder)
    thread = threading.Thread(target=proxy.serve_forever, daemon=True)
    thread.start()
    what = [f"--screenshot={shot}"] if shot else ["--dump-dom"]
    try:
        done = subprocess.run(
            [
                *(browser, *QUIET, *what, f"--window-size={width},3000", "--enable-logging=stderr"),
                f"--user-data-dir={page.parent / 'profile'}",
                *(f"--proxy-server=127.0.0.1:{proxy.server_port}", "--proxy-bypass-list=<-loopback>"),
                f"--blink-settings=preferredColorScheme={0 if dark else 1}",
                page.resolve().as_uri(),
            ],
            capture_output=True,
            text=True,
            timeout=120,
        )
    finally:
        proxy.shutdown()
        proxy.server_close()
        thread.join()
    assert done.returncode == 0, done.stderr
    console = [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
    return Visit(done.stdout, console, [line for line in asked if line and not _own(line)])


def _own(request: str) -> bool:
    """Whether a line such as "GET http://host/path HTTP/1.1" or "CONNECT host:443 HTTP/1.1" is the browser's."""
    target = request.split(" ")[1]
    host = urlsplit(target if "://" in target else f"//{target}").hostname or ""
    return host.endswith(BROWSERS_OWN)


def without_policy(text: str) -> str:
    """The page without its Content-Security-Policy, so that nothing but its own text keeps it harmless."""
    start, end = text.index("<meta http-equiv"), text.index("<meta name=")
    return text[:start] + text[end:]


def measure(browser: str, page: Path, width: int) -> tuple[dict[str, Any], Visit]:
    """Boxes (left, top, right, bottom, in CSS pixels) of every plot, of its texts and of its card.

    The page stands in a frame: the browser's own window does not get narrower than 500 pixels.
    """
    inner = without_policy(page.read_text(encoding="utf-8")).replace("</body>", MEASURE + "</body>")
    outer = page.with_name(f"measured-{width}.html")
    outer.write_text(
        f'<!doctype html><title>frame</title><body style="margin: 0"><iframe srcdoc="{escape(inner)}" '
        f'style="border: 0; width: {width}px; height: 5000px"></iframe></body>',
        encoding="utf-8",
    )
    seen = visit(browser, outer, max(width, 500))
    start = seen.dom.index('<pre id="measured">') + len('<pre id="measured">')
    return json.loads(unescape(seen.dom[start : seen.dom.index("</pre>", start)])), seen
