# SPDX-License-Identifier: Apache-2.0
"""`vllm-ling eval gsm8k`: lm-eval's scores, and speed and acceptance of the same answers, item by item."""

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_ling.errors import LingError
from vllm_ling.eval.files import write_json
from vllm_ling.eval.provenance import provenance, versions
from vllm_ling.eval.report.result_file import Item, ResultFile, make
from vllm_ling.eval.runs.asking import Request, Sending, ask_items
from vllm_ling.eval.runs.journal import Journal
from vllm_ling.eval.runs.lm_tasks import FILTERS, INVALID, TaskName, data_hash, load_task, task_manager
from vllm_ling.eval.runs.progress import RunProgress
from vllm_ling.eval.serving.client import CHAT, COMPLETIONS, READ_TIMEOUT_S
from vllm_ling.eval.serving.served import Served

_SEED = 1234  # lm-eval's default, for examples and requests


@dataclass(frozen=True)
class Gsm8k:
    """What is asked, and how.

    Attributes:
        task: lm-eval's task.
        data, fewshot_data: see `lm_tasks.load_task`.
        fewshot: examples before each question, None for the task's own number.
        limit: only the first items, None for all.
        chat: chat completions with the server's template; else plain completions.
        thinking: `enable_thinking` for the chat template, None to leave it alone.
        max_tokens: budget of one answer, reasoning included.
        sampling: request fields such as temperature, top_p, top_k; greedy without.
        concurrency, retries, timeout_s: see `asking.Sending`.
    """

    task: TaskName = "gsm8k"
    data: Path | None = None
    fewshot_data: Path | None = None
    fewshot: int | None = None
    limit: int | None = None
    chat: bool = True
    thinking: bool | None = None
    max_tokens: int = 4096
    sampling: dict[str, float] = field(default_factory=dict)
    concurrency: int = 1
    retries: int = 2
    timeout_s: float = READ_TIMEOUT_S

    def settings(self, served: Served, data_sha256: str) -> dict[str, Any]:
        """What the answers depend on."""
        return {
            **served.identity(),
            "task": self.task,
            "data_sha256": data_sha256,
            "fewshot": self.fewshot,
            "limit": self.limit,
            "chat": self.chat,
            "thinking": self.thinking,
            "max_tokens": self.max_tokens,
            "sampling": self.sampling,
            "concurrency": self.concurrency,
        }


def evaluate(what: Gsm8k, served: Served, out: Path, *, label: str | None, restart: bool) -> ResultFile:
    """Asks everything that the journal beside `out` does not hold yet, scores it all, writes `out`.

    Args:
        label: name of the run in reports.
        restart: throw away what an interrupted run left.

    Raises:
        LingError: unusable data or settings, or a server that stopped answering (what it answered is kept).
    """
    with quiet():
        task = load_task(what.task, what.data, what.fewshot_data, what.fewshot)
        import lm_eval

        from vllm_ling.eval.runs.lm_model import streaming_model

    settings = what.settings(served, data_hash(task))
    how = Sending(
        url=served.url,
        path=CHAT if what.chat else COMPLETIONS,
        concurrency=what.concurrency,
        retries=what.retries,
        timeout_s=what.timeout_s,
    )
    extra: dict[str, Any] = {**what.sampling, "max_tokens": what.max_tokens}
    if what.thinking is not None:
        extra["chat_template_kwargs"] = {"enable_thinking": what.thinking}
    entries: dict[str, dict[str, Any]] = {}
    with (
        Journal(out.with_name(out.name + ".partial"), settings, restart) as journal,
        RunProgress(what.task) as progress,
    ):

        def send(requests: Sequence[Request]) -> dict[str, str]:
            entries.update(ask_items(requests, how, journal, progress))
            return {name: entry["text"] for name, entry in entries.items()}

        with quiet():
            scores = lm_eval.simple_evaluate(
                model=streaming_model(what.chat, served.url, served.model, _SEED, extra, send),
                tasks=[task],
                task_manager=task_manager(what.task),
                limit=what.limit,
                apply_chat_template=what.chat,
                fewshot_as_multiturn=what.chat,
                bootstrap_iters=0,
                fewshot_random_seed=_SEED,
            )
        result = make(
            {
                **provenance(),
                **({"label": label} if label else {}),
                "workload": what.task,
                "settings": settings,
                "data_sha256": settings["data_sha256"],
                "server": served.facts(),
                "lm_eval": _scores(scores, what.task),
            },
            judge(entries, scores["samples"][what.task], FILTERS[what.task]),
        )
        write_json(out, result.model_dump())
        # With errors the journal stays: the same command then asks for what failed, and for nothing else.
        if not result.summary.transport_errors:
            journal.finish(out)
    return result


def judge(entries: dict[str, dict[str, Any]], samples: Sequence[dict[str, Any]], chosen: str) -> list[Item]:
    """Items in the task's order: figures from the journal, outcome from lm-eval's filter `chosen`."""
    items = []
    for sample in samples:
        if sample["filter"] != chosen:
            continue
        entry = entries[str(sample["doc_id"])]
        figures = {name: value for name, value in entry.items() if name not in ("digest", "text")}
        if entry.get("error"):
            items.append(Item(**figures, correct=None))
        else:
            invalid = sample["filtered_resps"][0] == INVALID
            items.append(Item(**figures, correct=bool(sample["exact_match"]), invalid=invalid))
    return sorted(items, key=lambda item: int(item.id))


def _scores(found: dict[str, Any], task: str) -> dict[str, Any]:
    """lm-eval's own figures; it has no word for a request that failed and counts it as wrong."""
    kept = {
        name: float(value)
        for name, value in found["results"][task].items()
        if isinstance(value, int | float) and "stderr" not in name
    }
    return {
        "version": versions(["lm-eval"])["lm-eval"],
        "task_version": found["versions"].get(task),
        "num_fewshot": found["n-shot"].get(task),
        "filter": FILTERS[task],
        "scores": kept,
    }


@contextmanager
def quiet() -> Iterator[None]:
    """Silences lm-eval and datasets, which talk and draw bars; errors still come through."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TQDM_DISABLE", "1")
    loggers = [logging.getLogger(name) for name in ("lm_eval", "datasets", "lm_eval.models.api_models")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        from datasets.utils.logging import disable_progress_bar

        disable_progress_bar()
    except ImportError as error:
        raise LingError("lm-eval is not installed: pip install 'vllm-ling[eval]'") from error
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
