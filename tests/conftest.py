# SPDX-License-Identifier: Apache-2.0
"""Settings of every test run: no network, no telemetry, no `gpu` test without a device, fixed hypothesis seeds.

Two at a time (`pytest -n 2`): one thread a process and long files first.
"""

import os
import signal

import pytest
from hypothesis import settings

# Before any import of vLLM or huggingface_hub, and inherited by every process that a test starts.
os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

BESIDE_OTHERS = "PYTEST_XDIST_WORKER" in os.environ
# An engine on one core: small layers gain nothing from a second, and OpenMP threads that wait for a core spin.
# Uncompiled: vLLM compiles a loop that ranks log-probabilities, which takes longer than all that it ranks here.
ONE_THREAD = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
if BESIDE_OTHERS:
    os.environ.update(ONE_THREAD)

# A shell's background job starts with SIGINT ignored, and every child would inherit that: the tests of Ctrl-C need it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


@pytest.fixture(scope="session")
def one_thread() -> dict[str, str]:
    """Environment of an engine on one core, where the second runs another engine."""
    return ONE_THREAD


@pytest.fixture(scope="session")
def at_once() -> int:
    """How many engines a test may run side by side: two, or one where another test has the second core."""
    return 1 if BESIDE_OTHERS else 2


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts files with `slow` tests first beside others; skips `gpu` tests where torch sees no CUDA device."""
    if BESIDE_OTHERS:
        # With --no-loadscope-reorder files start in this order, and none that takes long is left for the end.
        slow = {item.path for item in items if item.get_closest_marker("slow")}
        items.sort(key=lambda item: item.path not in slow)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
