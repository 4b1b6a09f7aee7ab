# SPDX-License-Identifier: Apache-2.0
"""Hands the packaged held-out problems to lm-eval, wherever the package is installed."""

import json
from typing import Any

from datasets import Dataset, DatasetDict

from vllm_ling.tiny.problems import HELDOUT_PATH


def load_heldout(**_: Any) -> DatasetDict:
    """{"test": rows with question and answer}."""
    rows = [json.loads(line) for line in HELDOUT_PATH.read_text(encoding="utf-8").splitlines()]
    return DatasetDict({"test": Dataset.from_list(rows)})
