# SPDX-License-Identifier: Apache-2.0
"""The lm-eval task loads from the package and scores a model that is right on a known share of the items."""

from pathlib import Path

import pytest

import vllm_ling.eval
from vllm_ling.tiny.evaluate import load_heldout

lm_eval = pytest.importorskip("lm_eval")


def test_task_scores_a_fake_model() -> None:
    from lm_eval.api.model import LM
    from lm_eval.tasks import TaskManager

    answers = {item["question"]: item["answer"] for item in load_heldout()}
    wrong = set(list(answers)[:2])

    class Parrot(LM):
        """Knows every answer, but gives two wrong ones."""

        def generate_until(self, requests, disable_tqdm=False):
            assert all(r.args[1]["until"] == ["<|role_end|>"] for r in requests)
            questions = [r.args[0] for r in requests]
            return [answers[q].split("####")[0] + "#### -1" if q in wrong else answers[q] for q in questions]

        def loglikelihood(self, requests, disable_tqdm=False):
            raise NotImplementedError

        def loglikelihood_rolling(self, requests, disable_tqdm=False):
            raise NotImplementedError

    tasks = Path(vllm_ling.eval.__file__).parent / "tasks"
    result = lm_eval.simple_evaluate(
        model=Parrot(),
        tasks=["tiny_ling"],
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        limit=10,
        bootstrap_iters=0,
    )
    assert result["results"]["tiny_ling"]["exact_match,final-number"] == pytest.approx(0.8)
    assert result["n-samples"]["tiny_ling"] == {"original": 300, "effective": 10}
