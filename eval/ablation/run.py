# SPDX-License-Identifier: Apache-2.0
"""`vllm-ling eval ablate`: a server per stage, GSM8K and synthetic loads on each.

Every stage has a folder under `--out` with its result files, journals and server logs; the same command goes on where
an interrupted one stopped, and one with more stages adds them.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console

from vllm_ling.errors import LingError
from vllm_ling.eval.ablation.stages import AblationStage, not_its_drafts, not_what_it_says
from vllm_ling.eval.files import write_json
from vllm_ling.eval.provenance import clocks, public_data
from vllm_ling.eval.report.result_file import ResultFile, load
from vllm_ling.eval.runs import gsm8k, synthetic
from vllm_ling.eval.runs.gsm8k import Gsm8k
from vllm_ling.eval.runs.synthetic import Synthetic
from vllm_ling.eval.serving.served import Served, describe
from vllm_ling.eval.serving.servers import ServerError
from vllm_ling.eval.serving.target import SERVE, target

_STARTS = 2  # of one stage's server, before the ablation gives up
_SERVER = "server.json"


@dataclass(frozen=True)
class StageFiles:
    """What was measured of a stage: GSM8K if it was asked, and by label of the synthetic load a file a round.

    `server` is what the stage's server said of itself after the last of it.
    """

    stage: AblationStage
    gsm8k: ResultFile | None
    synthetic: dict[str, list[ResultFile]]
    server: dict[str, Any]


@dataclass(frozen=True)
class Ablation:
    """What to do.

    Attributes:
        serve: MODEL and the flags that all stages share.
        questions: None asks none.
        loads: the synthetic loads, each with a label of its own.
        rounds: how often every stage's synthetic loads are measured, in alternating order.
        env: variables of every server.
        command: what `serve` is appended to.
    """

    stages: Sequence[AblationStage]
    serve: Sequence[str]
    questions: Gsm8k | None
    loads: Sequence[Synthetic]
    rounds: int = 1
    env: Mapping[str, str] | None = None
    command: Sequence[str] = SERVE

    def signature(self) -> dict[str, Any]:
        """What the results in a folder depend on, as plain JSON data."""
        stages = [asdict(stage) for stage in self.stages]
        plain = {"stages": stages, "serve": list(self.serve), "rounds": self.rounds}
        plain |= {"questions": self.questions and asdict(self.questions)}
        plain |= {"loads": [asdict(load) for load in self.loads]}
        found: dict[str, Any] = json.loads(json.dumps(plain, default=str))
        return found


def run(
    what: Ablation,
    out: Path,
    *,
    restart: bool,
    console: Console,
    failures: dict[str, str] | None = None,
) -> list[StageFiles]:
    """Measures what is missing under `out` and returns it all, in the order of the stages.

    Args:
        failures: where given, a stage that fails is recorded here by name, and the others go on; it is not returned.

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
            missing = [path for path in _files(what, out, stage, number) if not path.exists()]
            if missing and stage.name not in (failures or ()):
                console.print(f"round {number + 1} of {what.rounds}, {stage.name}", markup=False)
                try:
                    _measure_stage(what, stage, missing, console)
                except LingError as error:
                    if failures is None:
                        raise
                    failures[stage.name] = str(error)
                    console.print(f"{stage.name}: {error}; going on", markup=False, soft_wrap=True)
    found = [_found(what, out, stage) for stage in what.stages if stage.name not in (failures or ())]
    asked = [one.gsm8k for one in found if one.gsm8k]
    loads = [[file for one in found for file in one.synthetic[load.label]] for load in what.loads]
    for workload in (asked, *loads):
        if len({file.provenance.get("data_sha256") for file in workload}) > 1:
            raise LingError(
                f"{out}: --data or --text was changed between the stages, so they cannot be compared; "
                "choose another --out, or --restart"
            )
    return found


def _found(what: Ablation, out: Path, stage: AblationStage) -> StageFiles:
    folder = out / stage.name
    return StageFiles(
        stage,
        load(folder / "gsm8k.json") if what.questions else None,
        {
            one.label: [load(_load_file(folder, one, number)) for number in range(what.rounds)]
            for one in what.loads
        },
        json.loads((folder / _SERVER).read_text(encoding="utf-8")),
    )


def _files(what: Ablation, out: Path, stage: AblationStage, number: int) -> list[Path]:
    """What a round leaves behind; the questions are asked in the first only. The server's own record is the last."""
    folder = out / stage.name
    asked = [folder / "gsm8k.json"] if what.questions and number == 0 else []
    return [*asked, *(_load_file(folder, one, number) for one in what.loads), folder / _SERVER]


def _load_file(folder: Path, load: Synthetic, number: int) -> Path:
    return folder / f"{'text' if load.text else 'random'}-{number + 1}.json"


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
        measured: list[Path] = []
        for path in missing:
            if path.exists() or path.name == _SERVER:
                continue  # measured before the server had to be started anew
            try:
                result = _measure(what, served, path, stage.name)
            except LingError as error:
                raise _StoppedAnsweringError(str(error)) if _gone(served) else error from None
            failed, figure = result.summary.transport_errors, result.summary.tok_per_s
            if failed and _gone(served):  # too near the end for the run to see it by itself
                path.unlink()
                raise _StoppedAnsweringError(f"{failed} requests failed, and now it is gone (log: {log})")
            measured.append(path)
            drafts = sum(item.drafts or 0 for item in result.items)
            if problem := not_its_drafts(stage, result.summary.accept_length, drafts):
                _reject(stage, problem, [path])
            speed = "no speed" if figure is None else f"{figure:.1f} tok/s"
            console.print(f"  {path.stem}: {speed}", markup=False)
        # Some checks are made on the first batches, and a path can be given up while serving.
        after = describe(served.url, served.model)
        if problem := not_what_it_says(stage, after):
            _reject(stage, f"after {len(measured)} measurements, {problem}", measured)
        write_json(missing[0].parent / _SERVER, public_data(after.facts() | {"clocks": clocks()}))


def _measure(what: Ablation, served: Served, path: Path, label: str) -> ResultFile:
    if what.questions and path.stem == "gsm8k":
        return gsm8k.evaluate(what.questions, served, path, label=label, restart=False)
    (asked,) = (one for one in what.loads if path.stem.startswith("text") == bool(one.text))
    return synthetic.measure(asked, served, path, label=label, restart=False)


def _check(stage: AblationStage, served: Served) -> None:
    """A stage that is not what it says would be worse than none."""
    if problem := not_what_it_says(stage, served):
        _reject(stage, f"{problem}; see vllm-ling doctor --url for the cause", [])


def _reject(stage: AblationStage, problem: str, results: Sequence[Path]) -> NoReturn:
    for path in results:
        path.unlink()
    raise LingError(f"stage {stage.name}: {problem}")


def _gone(served: Served) -> bool:
    import httpx

    try:
        return not httpx.get(f"{served.url}/health", timeout=10, trust_env=False).is_success
    except httpx.HTTPError:
        return True


def _claim(path: Path, signature: dict[str, Any], restart: bool) -> None:
    """Ties a folder to one ablation, whose stages may come one after the other."""
    known: list[dict[str, Any]] = []
    if path.exists() and not restart:
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            known = found["stages"]
            names = {stage["name"]: stage for stage in known}
        except (ValueError, KeyError, TypeError):
            found, names = {}, {}
        for name, value in signature.items():
            if name == "stages":
                same = bool(names) and all(names.get(one["name"], one) == one for one in value)
            else:
                same = found.get(name) == value
            if not same:
                raise LingError(
                    f"{path.parent} holds an ablation with other {name}; choose another --out, or --restart to "
                    "throw it away"
                )
    asked = {stage["name"] for stage in signature["stages"]}
    earlier = [stage for stage in known if stage["name"] not in asked]
    write_json(path, signature | {"stages": [*earlier, *signature["stages"]]})
