# SPDX-License-Identifier: Apache-2.0
"""What an ablation publishes of the environment."""

import pytest

from vllm_ling.eval.ablation.command import environment


def test_secrets_stay_out_of_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VLLM_API_KEY", "VLLM_HTTP_PASSWORD", "VLLM_SOME_TOKEN", "VLLM_USE_DEEP_GEMM", "HOME"):
        monkeypatch.setenv(name, "value")
    found = environment()
    assert "VLLM_USE_DEEP_GEMM" in found
    assert not {"VLLM_API_KEY", "VLLM_HTTP_PASSWORD", "VLLM_SOME_TOKEN", "HOME"} & found.keys()
