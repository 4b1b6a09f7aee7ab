# SPDX-License-Identifier: Apache-2.0
"""Runs the parts one after another, keeps what is finished, writes the JSON and the page."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError
from rich.console import Console

from vllm_ling.errors import LingError
from vllm_ling.eval.files import write_json, write_text
from vllm_ling.eval.provenance import provenance, public_data
from vllm_ling.eval.serving.served import Served
from vllm_ling.eval.serving.servers import ServerError
from vllm_ling.eval.serving.target import target
from vllm_ling.verify import gsm8k, speed
from vllm_ling.verify.finding import Finding, exit_code, worst
from vllm_ling.verify.page import page
from vllm_ling.verify.settings import PARTS, Verification
from vllm_ling.verify.worker import run_apart

_ON_SERVER = ("gsm8k", "speed")
_SETTINGS = "settings.json"


class PartFile(BaseModel):
    """A finished part on the disk: what it depended on, when, how long, what it found."""

    model_config = ConfigDict(extra="forbid")

    settings: dict[str, Any]
    date: str
    seconds: float
    finding: Finding


def run(what: Verification, parts: Sequence[str], out: Path, *, restart: bool, console: Console) -> int:
    """Writes `out`, and the same as a page with the suffix .md; finished parts lie in the folder beside them.

    Args:
        parts: names from PARTS; they run in that order.

    Returns:
        The exit code of all finished parts, as on the page: 0 ok, 1 warn, 2 fail, 3 unknown.

    Raises:
        LingError: unusable settings, or a folder that holds another verification.
    """
    if out.suffix in ("", ".md"):
        raise LingError(f"--out {out}: the name of a JSON file, such as verify.json")
    folder = out.with_suffix("")
    chosen = [name for name in PARTS if name in parts]
    signature = what.signature()
    for part in chosen:
        what.part_settings(part)  # refuses an unreadable file before anything is written
    _claim(folder, signature, chosen if restart else [])
    with _Server(what, folder) as server:
        for number, part in enumerate(chosen, 1):
            _one_part(what, part, f"[{number}/{len(chosen)}] {part}", folder, server, console)
    done = {part: found for part in PARTS if (found := _finished(what, part, folder)) is not None}
    findings = [found.finding for found in done.values()]
    content = {
        "schema_version": 1,
        "provenance": {**provenance(), **signature},
        "outcome": worst([finding.outcome for finding in findings]),
        "parts": {
            part: {"date": f.date, "seconds": f.seconds, "settings": f.settings} for part, f in done.items()
        },
        "findings": [finding.model_dump() for finding in findings],
    }
    content = public_data(content)
    write_json(out, content)
    text = page(content)
    write_text(out.with_suffix(".md"), text)
    console.print(text, markup=False, soft_wrap=True)
    console.print(f"written: {out} and {out.with_suffix('.md')}", markup=False, soft_wrap=True)
    return exit_code(findings)


def _one_part(
    what: Verification, part: str, label: str, folder: Path, server: "_Server", console: Console
) -> None:
    found = _finished(what, part, folder)
    if found is not None and found.finding.outcome != "unknown":
        console.print(f"{label}: finished on {found.date}: {found.finding.outcome}", markup=False)
        return
    console.print(f"{label} ...", markup=False)
    started = time.monotonic()
    if part not in _ON_SERVER:
        server.stop()
        with _clock(console, label):
            finding = _guarded(part, lambda: run_apart(part, what, folder / f"{part}.log"))
    else:
        finding = _guarded(part, lambda: _on_server(what, part, folder, server, console))
    finding = Finding.model_validate(public_data(finding.model_dump()))
    seconds = round(time.monotonic() - started, 1)
    record = PartFile(
        settings=what.part_settings(part),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        seconds=seconds,
        finding=finding,
    )
    write_json(folder / f"{part}.part.json", record.model_dump())
    console.print(
        f"{label}: {finding.outcome} after {seconds:.0f} s: {finding.evidence}", markup=False, soft_wrap=True
    )


def _on_server(what: Verification, part: str, folder: Path, server: "_Server", console: Console) -> Finding:
    if part == "gsm8k" and (missing := gsm8k.missing_data(what)):
        return missing
    with _clock(console, "the server starts") if server.served is None else nullcontext():
        served = server.start()
    try:
        if part == "gsm8k":
            return gsm8k.run(what, served, folder, restart=not _begun(folder, what.part_settings(part)))
        with _clock(console, "speed"):
            return speed.run(what, served, folder, console)
    except LingError:
        server.stop()  # it stopped answering: the next part gets a new one
        raise


def _begun(folder: Path, settings: dict[str, Any]) -> bool:
    """Whether what lies in `folder` of the questions was asked with these settings; they are on record afterwards."""
    path = folder / "gsm8k.begun.json"
    same = _read(path) == json.loads(json.dumps(settings))
    write_json(path, settings)
    return same


def _guarded(part: str, work: Callable[[], Finding]) -> Finding:
    """A part that cannot be carried out is a finding too, and the next part still runs."""
    try:
        return work()
    except ServerError as error:
        return Finding(
            part=part, outcome="fail", evidence=f"{error}", fix="see the end of server.log beside --out"
        )
    except LingError as error:
        return Finding(part=part, outcome="fail", evidence=f"could not be carried out: {error}")
    except Exception as error:  # of a part, never of the whole: what is finished must be written
        said = f"the check itself broke: {type(error).__name__}: {error}"
        return Finding(part=part, outcome="unknown", evidence=said, fix="report it with this page")


class _Server(AbstractContextManager["_Server"]):
    """The server of the parts that need one: started by the first of them, ended before any other part."""

    def __init__(self, what: Verification, folder: Path) -> None:
        self.what, self.log = what, folder / "server.log"
        self.served: Served | None = None
        self._running: AbstractContextManager[Served] | None = None

    def start(self) -> Served:
        """The running server.

        Raises:
            ServerError: it does not start.
        """
        if self.served is None:
            serve = [self.what.model, *self.what.serve]
            running = target(None, serve, model=None, log=self.log, command=self.what.command)
            self.served = running.__enter__()
            self._running = running
        return self.served

    def stop(self) -> None:
        """Ends it, if it runs."""
        running, self._running, self.served = self._running, None, None
        if running is not None:
            running.__exit__(None, None, None)

    def __exit__(self, *_: object) -> None:
        self.stop()


def _finished(what: Verification, part: str, folder: Path) -> PartFile | None:
    """The part's file, if it is whole and its settings are today's."""
    try:
        found = PartFile.model_validate_json((folder / f"{part}.part.json").read_text(encoding="utf-8"))
    except (OSError, ValidationError):
        return None
    return found if found.settings == json.loads(json.dumps(what.part_settings(part))) else None


def _claim(folder: Path, signature: dict[str, Any], again: Sequence[str]) -> None:
    """Ties a folder to one model, its flags and the installed versions.

    Args:
        again: parts to run again whatever is finished; with any, another verification is thrown away.
    """
    path, wanted = folder / _SETTINGS, json.loads(json.dumps(public_data(signature)))
    found = _read(path)
    other = [name for name, value in wanted.items() if found.get(name) != value] if path.exists() else []
    if other and not again:
        raise LingError(
            f"{folder} holds a verification with other {other[0]}; choose another --out, or --restart to throw it away"
        )
    for part in PARTS if other else again:
        for old in (f"{part}.part.json", f"{part}.begun.json"):
            (folder / old).unlink(missing_ok=True)
    write_json(path, wanted)


def _read(path: Path) -> dict[str, Any]:
    """A JSON object from a file, empty if there is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


@contextmanager
def _clock(console: Console, label: str) -> Iterator[None]:
    """A moving sign on a terminal; nothing in a file."""
    if not console.is_terminal:
        yield
        return
    with console.status(f"{label}, since {datetime.now():%H:%M}"):
        yield
