# SPDX-License-Identifier: Apache-2.0
"""register(): cheap, idempotent, silent about other models, and never an exception, whatever breaks inside."""

import json
import os
import subprocess
import sys

import pytest

from vllm_ling import compat

REPORT = """
import json
from vllm_ling import plugin, status
{break_it}
plugin.register()
first = status.STATUS.as_dict()
plugin.register()
assert status.STATUS.as_dict() == first, "a second call changed something"
from vllm.model_executor.models import ModelRegistry
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS
entry = ModelRegistry.models["BailingMoeV3ForCausalLM"]
print(json.dumps({{"status": first, "module": entry.module_name, "ling": "ling" in QUANTIZATION_METHODS}}))
"""


def run(break_it: str = "", **env: str) -> dict[str, object]:
    """Runs register() twice in a fresh process and reports what it left behind."""
    done = subprocess.run(
        [sys.executable, "-c", REPORT.format(break_it=break_it)],
        capture_output=True,
        text=True,
        env={**os.environ, **env},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_active() -> None:
    report = run()
    assert report["status"]["state"] == "active"  # type: ignore[index]
    assert report["module"] == "vllm_ling.models.ling" and report["ling"]


@pytest.mark.parametrize(
    ("break_it", "env", "word"),
    [
        ("", {"VLLM_LING_DISABLE": "1"}, "VLLM_LING_DISABLE"),
        (
            "from vllm_ling import compat; compat.installed_vllm = lambda: '0.99.0'",
            {},
            "outside the supported window",
        ),
        ("from vllm_ling import compat; compat.installed_vllm = lambda: None", {}, "no vllm distribution"),
        ("import vllm_ling.hf_config as c; c.register_hf_config = lambda: 1 / 0", {}, "ZeroDivisionError"),
        ("import sys; sys.modules['vllm_ling.quant.claim'] = None", {}, "ModuleNotFoundError"),
    ],
    ids=["disabled", "window", "no vllm", "raises", "import fails"],
)
def test_inactive_leaves_stock(break_it: str, env: dict[str, str], word: str) -> None:
    report = run(break_it, **env)
    status = report["status"]
    assert status["state"] == "inactive" and word in status["reason"]  # type: ignore[index]
    assert status["active"] == {}  # type: ignore[index]
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
