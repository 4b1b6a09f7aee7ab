# SPDX-License-Identifier: Apache-2.0
"""Whether a process has ended, for tests of what is left behind."""

import time
from pathlib import Path


def over(process: int) -> bool:
    """Whether it is gone, or dead and unclaimed."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def ends(process: int) -> bool:
    """Whether it is over within five seconds."""
    for _ in range(50):
        if over(process):
            return True
        time.sleep(0.1)
    return False
