# SPDX-License-Identifier: Apache-2.0
"""lm-eval's own tasks: GSM8K as it stands, from the hub or from a file, and tiny-ling's."""

import hashlib
from pathlib import Path
from typing import Any, Literal

import vllm_ling.eval
from vllm_ling.errors import LingError
from vllm_ling.eval.runs.questions import read_rows

TaskName = Literal["gsm8k", "gsm8k_cot", "tiny_ling"]
# The filter whose outcome is an item's `correct`: answers in any form count, as chat models seldom write "#### 5".
FILTERS = {"gsm8k": "flexible-extract", "gsm8k_cot": "flexible-extract", "tiny_ling": "final-number"}
INVALID = "[invalid]"  # what lm-eval's regex filter gives where nothing matches


def load_task(name: TaskName, data: Path | None, fewshot_data: Path | None, fewshot: int | None) -> Any:
    """An lm-eval task and nothing else of the harness's registry loaded.

    Args:
        data: jsonl with question and answer to evaluate on, None for the task's own data set.
        fewshot_data: jsonl that the examples come from, for tasks that take them from a training split.
        fewshot: number of examples, None for the task's default.

    Raises:
        LingError: lm-eval is missing, a file is unusable, or the data set cannot be had.
    """
    if name == "tiny_ling" and (data or fewshot_data or fewshot):
        raise LingError("tiny_ling has its own questions and no examples; leave --data and --fewshot out")
    manager = task_manager(name)
    spec = name if data is None else _from_files(manager, name, data, fewshot_data, fewshot)
    try:
        task = manager.load([spec])["tasks"][name]
    except (OSError, ValueError) as error:
        raise LingError(
            f"{name}: lm-eval cannot load its data set ({error}); without a network use --data FILE (jsonl)"
        ) from None
    if fewshot is not None:
        task.set_config(key="num_fewshot", value=fewshot)
    return task


def task_manager(name: TaskName) -> Any:
    """lm-eval's task manager over the folder of one task: an index of all its tasks takes seconds.

    Raises:
        LingError: lm-eval is missing.
    """
    try:
        import lm_eval.tasks
        from lm_eval.tasks import TaskManager
    except ImportError:
        raise LingError("lm-eval is not installed: pip install 'vllm-ling[eval]'") from None
    ours, theirs = Path(vllm_ling.eval.__file__).parent / "tasks", Path(lm_eval.tasks.__file__).parent
    folder = ours if name == "tiny_ling" else theirs / "gsm8k"
    return TaskManager(include_path=str(folder), include_defaults=False)


def _from_files(
    manager: Any, name: str, data: Path, fewshot_data: Path | None, fewshot: int | None
) -> dict[str, Any]:
    """The task's own YAML with the data set replaced; everything that makes prompts and scores stays."""
    import yaml

    config = yaml.safe_load(Path(manager.task_index[name].yaml_path).read_text(encoding="utf-8"))
    splits = {"test": read_rows(data)}
    if fewshot_data is not None:
        splits["train"] = read_rows(fewshot_data)
    from_train = "fewshot_config" not in config
    if from_train and fewshot != 0 and fewshot_data is None:
        raise LingError(
            f"{name} takes its examples from a training split: give --fewshot-data FILE, --fewshot 0 or "
            "--task gsm8k_cot, which brings its own"
        )

    def load(**_: Any) -> Any:
        from datasets import Dataset, DatasetDict

        return DatasetDict({split: Dataset.from_list(rows) for split, rows in splits.items()})

    if "train" not in splits:
        config.pop("training_split", None)
        config.pop("fewshot_split", None)
    return {**config, "dataset_path": None, "dataset_name": None, "custom_dataset": load}


def data_hash(task: Any) -> str:
    """SHA-256 over the questions and answers in their order; two runs can be paired if it is the same."""
    digest = hashlib.sha256()
    for doc in task.eval_docs:
        digest.update(f"{doc['question']}\0{doc['answer']}\0".encode())
    return digest.hexdigest()
