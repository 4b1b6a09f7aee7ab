# SPDX-License-Identifier: Apache-2.0
"""A part in a process of its own, so that its tensors and its GPU context are gone before the next part begins."""

import importlib
import os
import signal
import sys
import tempfile
from pathlib import Path

from vllm_ling.errors import LingError
from vllm_ling.eval.serving.servers import started
from vllm_ling.verify.finding import Finding
from vllm_ling.verify.logits import last_line
from vllm_ling.verify.settings import Verification

_UNUSABLE = 3


def run_apart(part: str, what: Verification, log: Path) -> Finding:
    """Runs `head`, `kernels`, `logits` or `greedy`; what it prints goes to `log`.

    Raises:
        LingError: what the part found unusable, such as a missing tensor.
        RuntimeError: it ended in another way, such as for want of memory.
    """
    with tempfile.TemporaryDirectory() as folder:
        asked, answered = Path(folder, "asked.json"), Path(folder, "answered.json")
        asked.write_text(what.to_json(), encoding="utf-8")
        command = [sys.executable, "-m", "vllm_ling.verify.worker", part, str(asked), str(answered)]
        with started(command, log) as process:
            process.wait()
        if process.returncode or not answered.exists():
            if process.returncode == _UNUSABLE:
                raise LingError(answered.read_text(encoding="utf-8"))
            said = last_line(log.read_text(encoding="utf-8", errors="replace"))
            ended = (
                f"signal {-process.returncode}"
                if process.returncode < 0
                else f"exit code {process.returncode}"
            )
            raise RuntimeError(f"{said} ({ended}; log: {log.name})")
        return Finding.model_validate_json(answered.read_text(encoding="utf-8"))


def _main(part: str, asked: Path, answered: Path) -> None:
    signal.signal(signal.SIGTERM, _end_group)
    what = Verification.from_json(asked.read_text(encoding="utf-8"))
    try:
        finding: Finding = importlib.import_module(f"vllm_ling.verify.{part}").run(what)
    except LingError as error:
        answered.write_text(str(error), encoding="utf-8")
        sys.exit(_UNUSABLE)
    answered.write_text(finding.model_dump_json(), encoding="utf-8")


def _end_group(*_: object) -> None:
    """This process leads its group; an engine that it waits for must not outlive it."""
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    _main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
