# SPDX-License-Identifier: Apache-2.0
"""All injected faults."""

from tests.doctor.faults.checkpoint import CHECKPOINT
from tests.doctor.faults.command import COMMAND
from tests.doctor.faults.decode import DECODE
from tests.doctor.faults.drafting import DRAFTING
from tests.doctor.faults.experts import EXPERTS
from tests.doctor.faults.head import HEAD
from tests.doctor.faults.plugin import PLUGIN
from tests.doctor.faults.ranks import RANKS_APART
from tests.doctor.faults.runtime import RUNTIME

FAULTS = [*COMMAND, *PLUGIN, *RANKS_APART, *CHECKPOINT, *HEAD, *EXPERTS, *DECODE, *DRAFTING, *RUNTIME]
