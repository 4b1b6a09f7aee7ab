# SPDX-License-Identifier: Apache-2.0
"""What vllm-ling did in this process: activated parts, choices with reasons, proofs and faults.

The record is plain data so that a doctor, a log reader or a test can read it; nothing here chooses anything.
"""

import json
import logging
from dataclasses import asdict, dataclass, field
from typing import Any

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


def choose(what: str, choice: str, reason: str) -> str:
    """Records and logs (once per distinct decision) that `what` resolved to `choice` because of `reason`."""
    decision = Choice(what, choice, reason)
    if STATUS.choices.get(what) != decision:
        STATUS.choices[what] = decision
        info(f"{what} = {choice} ({reason})")
    return choice


def proof(code: str, message: str) -> None:
    """Records that a check of the loaded model passed."""
    STATUS.proofs[code] = message
    info(f"PROOF ok: {code}: {message}")


def fault(code: str, message: str) -> None:
    """Records that a check of the loaded model failed; the caller decides whether to go on."""
    STATUS.faults[code] = message
    _logger.error("vllm-ling: FAULT %s: %s", code, message)


def info(message: str) -> None:
    """One INFO line in the server log."""
    _logger.info("vllm-ling: %s", message)


def warning(message: str) -> None:
    """One WARNING line in the server log."""
    _logger.warning("vllm-ling: %s", message)
