# SPDX-License-Identifier: Apache-2.0
"""What vllm-ling did in this process: activated parts, choices with reasons, proofs and faults.

The record is plain data so that a doctor, a log reader or a test can read it; nothing here chooses anything.
The front process of a Ling server makes a folder (`share`), and every process below it keeps its record there as a
file, which is how the record reaches /metrics: the engine core and its workers have no port of their own.
"""

import atexit
import json
import logging
import multiprocessing
import os
import shutil
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

# Not VLLM_...: vLLM warns about variables of that prefix that it does not know.
SHARED_FOLDER = "LING_STATUS_DIR"

# vLLM configures the `vllm` logger tree only, so a child of it is what reaches the server log.
_logger = logging.getLogger("vllm.vllm_ling")


@dataclass
class Choice:
    """One dispatch: `what` was decided, `choice` taken, `reason` for it."""

    what: str
    choice: str
    reason: str


@dataclass
class Status:
    """Everything this process knows about itself."""

    state: str = "not registered"
    reason: str = ""
    active: dict[str, str] = field(default_factory=dict)
    inactive: dict[str, str] = field(default_factory=dict)
    choices: dict[str, Choice] = field(default_factory=dict)
    proofs: dict[str, str] = field(default_factory=dict)
    faults: dict[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """A JSON-ready copy."""
        return asdict(self)

    def to_json(self) -> str:
        """The record as one line of JSON."""
        return json.dumps(self.as_dict(), sort_keys=True)


STATUS = Status()


def share() -> None:
    """Makes the folder in which this process and those it starts keep their records; removed when this process ends."""
    if SHARED_FOLDER in os.environ:
        return
    folder = tempfile.mkdtemp(prefix="vllm-ling-")
    owner = os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # not in a forked child
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    os.environ[SHARED_FOLDER] = folder


def shared_folder() -> Path | None:
    """The folder of the records, None if the front process made none."""
    return Path(os.environ[SHARED_FOLDER]) if SHARED_FOLDER in os.environ else None


def publish() -> None:
    """Writes this process's record into the shared folder, whole or not at all; without a folder nothing happens."""
    folder = shared_folder()
    if folder is None:
        return
    path = folder / f"{os.getpid()}.json"
    record = {"process": multiprocessing.current_process().name, "record": STATUS.as_dict()}
    try:
        partial = path.with_suffix(".tmp")
        partial.write_text(json.dumps(record), encoding="utf-8")
        partial.replace(path)
    except OSError:
        pass  # the folder is gone with its owner; the log still has every line


def choose(what: str, choice: str, reason: str) -> str:
    """Records and logs (once per distinct decision) that `what` resolved to `choice` because of `reason`."""
    decision = Choice(what, choice, reason)
    if STATUS.choices.get(what) != decision:
        STATUS.choices[what] = decision
        publish()
        info(f"{what} = {choice} ({reason})")
    return choice


def proof(code: str, message: str) -> None:
    """Records that a check of the loaded model passed."""
    STATUS.proofs[code] = message
    publish()
    info(f"PROOF ok: {code}: {message}")


def fault(code: str, message: str) -> None:
    """Records that a check of the loaded model failed; the caller decides whether to go on."""
    STATUS.faults[code] = message
    publish()
    _logger.error("vllm-ling: FAULT %s: %s", code, message)


def alarm(code: str, message: str) -> None:
    """One ERROR line about something that went wrong while serving; not part of the record of the loaded model."""
    _logger.error("vllm-ling: ALARM %s: %s", code, message)


def info(message: str) -> None:
    """One INFO line in the server log."""
    _logger.info("vllm-ling: %s", message)


def warning(message: str) -> None:
    """One WARNING line in the server log."""
    _logger.warning("vllm-ling: %s", message)
