# SPDX-License-Identifier: Apache-2.0
"""`vllm-ling eval ablate`: a server per stage, GSM8K and a synthetic load on each, one table.

Every stage has a folder under `--out` with its result files, journals and server logs; the same command goes on where
an interrupted one stopped.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from vllm_ling.errors import LingError
from vllm_ling.eval.ablation.stages import AblationStage, not_what_it_says
from vllm_ling.eval.files import write_json
from vllm_ling.eval.report.result_file import ResultFile, load
from vllm_ling.eval.runs import gsm8k, synthetic
from vllm_ling.eval.runs.gsm8k import Gsm8k
from vllm_ling.eval.runs.synthetic import Synthetic
from vllm_ling.eval.serving.served import Served
from vllm_ling.eval.serving.servers import ServerError
from vllm_ling.eval.serving.target import SERVE, target

_STARTS = 2  # of one stage's server, before the ablation gives up


@dataclass(frozen=True)
class StageFiles:
    """What was measured of a stage: GSM8K, and the synthetic load once a round."""

    stage: AblationStage
    gsm8k: ResultFile
    synthetic: list[ResultFile]


@dataclass(frozen=True)
class Ablation:
    """What to do.

    Attributes:
        serve: MODEL and the flags that all stages share.
        rounds: how often every stage's synthetic load is measured, in alternating order.
        env: variables of every server.
        command: what `serve` is appended to.
    """

    stages: Sequence[AblationStage]
    serve: Sequence[str]
    questions: Gsm8k
    load: Synthetic
    rounds: int = 1
    env: Mapping[str, str] | None = None
    command: Sequence[str] = SERVE

    def signature(self) -> dict[str, Any]:
        """What the results in a folder depend on, as plain JSON data."""
        stages = [asdict(stage) for stage in self.stages]
        plain = {"stages": stages, "serve": list(self.serve), "rounds": self.rounds}
        plain |= {"questions": asdict(self.questions), "load": asdict(self.load)}
        found: dict[str, Any] = json.loads(json.dumps(plain, default=str))
        return found


def run(what: Ablation, out: Path, *, restart: bool, console: Console) -> list[StageFiles]:
    """Measures what is missing under `out` and returns it all, in the order of the stages.

    Raises:
        LingError: `out` holds another ablation, a stage's server does not start or is not what it should be, or it
            stopped answering twice.
    """
    _claim(out / "ablation-settings.json", what.signature(), restart)
    if restart:
        for stage in what.stages:
            for old in (out / stage.name).glob("*.json*"):
                old.unlink()
    for number in range(what.rounds):
        for stage in what.stages if number % 2 == 0 else reversed(what.stages):
            missing = [path for path in _files(out, stage, number) if not path.exists()]
            if missing:
                console.print(f"round {number + 1} of {what.rounds}, {stage.name}", markup=False)
                _measure_stage(what, stage, missing, console)
    found = [
        StageFiles(
            stage,
            load(out / stage.name / "gsm8k.json"),
            [load(out / stage.name / f"synthetic-{number + 1}.json") for number in range(what.rounds)],
        )
        for stage in what.stages
    ]
    for workload in ([one.gsm8k for one in found], [file for one in found for file in one.synthetic]):
        if len({file.provenance.get("data_sha256") for file in workload}) > 1:
            raise LingError(
                f"{out}: --data or --text was changed between the stages, so they cannot be compared; "
                "choose another --out, or --restart"
            )
    return found


def _files(out: Path, stage: AblationStage, number: int) -> list[Path]:
    """What a round leaves behind; the questions are asked in the first only."""
    folder = out / stage.name
    return [*([folder / "gsm8k.json"] if number == 0 else []), folder / f"synthetic-{number + 1}.json"]


def _measure_stage(what: Ablation, stage: AblationStage, missing: Sequence[Path], console: Console) -> None:
    for attempt in range(1, _STARTS + 1):
        try:
            # The log of a server that died is not overwritten by the next one's.
            log = missing[0].parent / ("server.log" if attempt == 1 else f"server-{attempt}.log")
            _serve_and_measure(what, stage, missing, log, console)
            return
        except ServerError as error:
            console.print(error.tail, markup=False)
            raise
        except _StoppedAnsweringError as error:
            if attempt == _STARTS:
                raise LingError(f"{stage.name}: {error}") from None
            console.print(f"{stage.name}: {error}; starting the server anew", markup=False, soft_wrap=True)


class _StoppedAnsweringError(LingError):
    """The server was there and went."""


def _serve_and_measure(
    what: Ablation, stage: AblationStage, missing: Sequence[Path], log: Path, console: Console
) -> None:
    with target(
        None,
        [*what.serve, *stage.serve_flags()],
        model=None,
        log=log,
        command=what.command,
        env={**(what.env or {}), **stage.env()},
    ) as served:
        _check(stage, served)
        for path in missing:
            if path.exists():
                continue  # measured before the server had to be started anew
            try:
                result = _measure(what, stage, served, path)
            except LingError as error:
                raise _StoppedAnsweringError(str(error)) if _gone(served) else error from None
            failed, figure = result.summary.transport_errors, result.summary.tok_per_s
            if failed and _gone(served):  # too near the end for the run to see it by itself
                path.unlink()
                raise _StoppedAnsweringError(f"{failed} requests failed, and now it is gone (log: {log})")
            _check_drafts(stage, result, path)
            speed = "no speed" if figure is None else f"{figure:.1f} tok/s"
            console.print(f"  {path.stem}: {speed}", markup=False)


def _measure(what: Ablation, stage: AblationStage, served: Served, path: Path) -> ResultFile:
    if path.stem == "gsm8k":
        return gsm8k.evaluate(what.questions, served, path, label=stage.name, restart=False)
    return synthetic.measure(what.load, served, path, label=stage.name, restart=False)


def _check(stage: AblationStage, served: Served) -> None:
    """A stage that is not what it says would be worse than none."""
    if problem := not_what_it_says(stage, served):
        raise LingError(f"stage {stage.name}: {problem}; see vllm-ling doctor --url for the cause")


def _check_drafts(stage: AblationStage, result: ResultFile, path: Path) -> None:
    drafted = result.summary.accept_length is not None
    own = any(word.startswith("--speculative-config") for word in stage.flags)
    if drafted != stage.speculates and not own:
        path.unlink()
        seen = "drafts were counted" if drafted else "no draft was counted"
        raise LingError(f"stage {stage.name}: {seen}, which is not what this stage is about")


def _gone(served: Served) -> bool:
    import httpx

    try:
        return not httpx.get(f"{served.url}/health", timeout=10, trust_env=False).is_success
    except httpx.HTTPError:
        return True


def _claim(path: Path, signature: dict[str, Any], restart: bool) -> None:
    """Ties a folder to one ablation."""
    if path.exists() and not restart:
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            found = {}
        for name, value in signature.items():
            if not isinstance(found, dict) or found.get(name) != value:
                raise LingError(
                    f"{path.parent} holds an ablation with other {name}; choose another --out, or --restart to "
                    "throw it away"
                )
    write_json(path, signature)
