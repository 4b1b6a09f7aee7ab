# SPDX-License-Identifier: Apache-2.0
"""register(): cheap, idempotent, silent about other models, and never an exception, whatever breaks inside."""

import json
import subprocess
import sys
from typing import Any

import pytest

from vllm_ling import compat

# Importing vLLM takes seconds: one process does it, and each case is a fork of it where nothing of ours is loaded.
REPORTS = """
import json, os, sys
from vllm.model_executor.models import ModelRegistry
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS
assert not any(name.split(".")[0] == "vllm_ling" for name in sys.modules)

def report(break_it, env):
    os.environ.update(env)
    from vllm_ling import plugin, status
    exec(break_it, {})
    plugin.register()
    first = status.STATUS.as_dict()
    plugin.register()
    assert status.STATUS.as_dict() == first, "a second call changed something"
    entry = ModelRegistry.models["BailingMoeV3ForCausalLM"]
    found = {"status": first, "module": entry.module_name, "ling": "ling" in QUANTIZATION_METHODS}
    print("report", json.dumps(found), flush=True)

for case in json.loads(sys.argv[1]):
    child = os.fork()
    if not child:
        report(*case)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit(f"{case} failed")
"""
ACTIVE: tuple[str, dict[str, str]] = ("", {})
INACTIVE: dict[str, tuple[str, dict[str, str], str]] = {
    "disabled": ("", {"VLLM_LING_DISABLE": "1"}, "VLLM_LING_DISABLE"),
    "window": (
        "from vllm_ling import compat; compat.installed_vllm = lambda: '0.99.0'",
        {},
        "outside the supported window",
    ),
    "no vllm": (
        "from vllm_ling import compat; compat.installed_vllm = lambda: None",
        {},
        "no vllm distribution",
    ),
    "raises": (
        "import vllm_ling.hf_config as c; c.register_hf_config = lambda: 1 / 0",
        {},
        "ZeroDivisionError",
    ),
    "import fails": ("import sys; sys.modules['vllm_ling.quant.claim'] = None", {}, "ModuleNotFoundError"),
}


@pytest.fixture(scope="module")
def reports() -> dict[str, dict[str, Any]]:
    """What register(), called twice in a process of its own, left behind: by case, and "active" for the sound one."""
    cases = {"active": ACTIVE} | {name: case[:2] for name, case in INACTIVE.items()}
    done = subprocess.run(
        [sys.executable, "-c", REPORTS, json.dumps(list(cases.values()))],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [line.removeprefix("report ") for line in done.stdout.splitlines() if line.startswith("report ")]
    return dict(zip(cases, map(json.loads, lines), strict=True))


def test_active(reports: dict[str, dict[str, Any]]) -> None:
    report = reports["active"]
    assert report["status"]["state"] == "active"
    assert report["module"] == "vllm_ling.models.ling" and report["ling"]


@pytest.mark.parametrize("name", INACTIVE)
def test_inactive_leaves_stock(name: str, reports: dict[str, dict[str, Any]]) -> None:
    report, word = reports[name], INACTIVE[name][2]
    assert report["status"]["state"] == "inactive" and word in report["status"]["reason"]
    assert report["status"]["active"] == {}
    assert report["module"] == "vllm.model_executor.models.bailing_moe_v3" and not report["ling"]


@pytest.mark.parametrize(
    ("version", "supported"),
    [
        ("0.32.0", True),
        ("0.32.0+cpu", True),
        ("0.33.1", True),
        ("0.33.0.dev7", True),
        ("0.31.9", False),
        ("0.34.0", False),
    ],
)
def test_window(version: str, supported: bool) -> None:
    assert (compat.check_window(version) is None) is supported


def test_every_workaround_is_documented() -> None:
    for entry in compat.WORKAROUNDS:
        assert all(len(text) > 20 for text in (entry.what, entry.why, entry.upstream, entry.remove_when))
