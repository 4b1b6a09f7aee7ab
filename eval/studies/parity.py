# SPDX-License-Identifier: Apache-2.0
"""Do stock vLLM, vllm-ling and the fp32 reference agree on the same mini checkpoints?

Run as `python -m vllm_ling.eval.studies.parity`.

Per format two checkpoints: clamps that no gate reaches, where plugin and stock compute the same function, and clamps
that bite, where they must not (stock clamps routed experts before SiLU). Random weights amplify rounding, and FP8
activations flip routing decisions, so agreement is judged against what stock itself loses to fp32. The head stays BF16
in the compared runs; one more run has everything on and must show its proofs.
"""

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from vllm_ling.checkpoint.synthetic import make_checkpoint
from vllm_ling.eval.provenance import provenance
from vllm_ling.eval.studies.engines import EngineRun, EngineSpec, run_engines
from vllm_ling.reference.load import from_checkpoint

# Two runs of the same BF16 arithmetic in another order stay well below what BF16 itself costs against fp32.
NOISE_SHARE = 0.5
# The plugin may not be further from the fp32 reference than stock vLLM is, up to the spread of one seed.
NO_WORSE = 1.1
FORMATS = ("bf16", "fp8", "fp4", "int4")


def prompts(vocab: int) -> list[list[int]]:
    """Twelve deterministic token prompts of 1 to 70 tokens."""
    lengths = (1, 2, 3, 5, 8, 16, 17, 31, 33, 48, 64, 70)
    return [[(7 * i * i + 13 * i + 5 * n) % (vocab - 8) + 4 for i in range(n)] for n in lengths]


def reference_logits(folder: Path, asked: list[list[int]], **controls: Any) -> torch.Tensor:
    """Logits [prompts, vocab] of the token after each prompt, from the independent fp32 model."""
    model = from_checkpoint(folder, **controls)
    with torch.inference_mode():
        return torch.stack([model(torch.tensor([prompt]))[0, -1].float() for prompt in asked])


def relative_rms(ours: Any, theirs: Any) -> float:
    """RMS(ours - theirs) / RMS(theirs)."""
    ours, theirs = torch.as_tensor(ours), torch.as_tensor(theirs)
    return float(((ours - theirs).square().mean() / theirs.square().mean()).sqrt())


def specs_for(fmt: str, clamp: float, work: Path) -> tuple[EngineSpec, EngineSpec, EngineSpec]:
    """(stock, plugin with a BF16 head, plugin with everything on) for one new checkpoint."""
    folder = make_checkpoint(work / f"{fmt}-{clamp:g}", shape="flash", fmt=fmt, seed=1, mtp=True, clamp=clamp)
    vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
    stock = EngineSpec(f"{fmt} {clamp:g}", str(folder), prompts(vocab), "bfloat16", 24, first_logits=True)
    ours = replace(stock, options={"lm_head": "bf16"})
    engine = {"quantization": "ling"} if fmt == "bf16" else {}
    name = f"{stock.name} all on"
    full = replace(
        stock, name=name, options={"lm_head": "fp8"}, draft_tokens=3, first_logits=False, engine=engine
    )
    return stock, ours, full


def compare(specs: tuple[EngineSpec, EngineSpec, EngineSpec], runs: dict[str, EngineRun]) -> dict[str, Any]:
    """Relative RMS of each pair of engines on one checkpoint, and what the full run proved."""
    stock, ours, full = (runs[key] for key in (f"stock {specs[0].name}", specs[1].name, specs[2].name))
    fmt, clamp = specs[0].name.split()
    row: dict[str, Any] = {"format": fmt, "clamp": float(clamp)}
    errors = {run.name: run.error for run in (stock, ours, full) if run.error}
    if errors:
        return row | {"errors": errors}
    exact = reference_logits(Path(specs[0].model), specs[0].prompts)
    return row | {
        "plugin_vs_stock": relative_rms(ours.logits, stock.logits),
        "plugin_vs_reference": relative_rms(ours.logits, exact),
        "stock_vs_reference": relative_rms(stock.logits, exact),
        "all_on": _summary(full),
        "choices": ours.status["choices"],
    }


def _summary(run: EngineRun) -> dict[str, Any]:
    status = run.status
    return {
        "accept_length": run.accept_length,
        "proofs": status["proofs"],
        "faults": status["faults"],
        "lm_head": status["choices"].get("lm_head"),
    }


def verdict(row: dict[str, Any]) -> list[str]:
    """What is wrong with a row; empty if it shows what it must."""
    if "errors" in row:
        return [f"{name} failed: {error.strip().splitlines()[-1]}" for name, error in row["errors"].items()]
    noise, ours, apart = row["stock_vs_reference"], row["plugin_vs_reference"], row["plugin_vs_stock"]
    wrong = []
    if ours > NO_WORSE * noise:
        wrong.append(f"plugin is further from the reference ({ours:.3f}) than stock ({noise:.3f})")
    if apart > NOISE_SHARE * noise:
        wrong.append(f"plugin and stock differ by {apart:.3f}, more than rounding explains ({noise:.3f})")
    if row["clamp"] < 100 and apart == 0:
        wrong.append("clamps bite, yet plugin and stock agree to the bit: the trained clamp is not in effect")
    if row["all_on"]["faults"] or {"draft_head", "head_probe"} - row["all_on"]["proofs"].keys():
        wrong.append(
            f"with everything on: faults {row['all_on']['faults']}, proofs {row['all_on']['proofs']}"
        )
    return wrong


def main() -> int:
    """Runs the comparison, writes JSON, returns 1 if a row fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--formats", default=",".join(FORMATS))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        triples = [
            specs_for(fmt, clamp, Path(work)) for fmt in args.formats.split(",") for clamp in (1e4, 0.3)
        ]
        runs = {
            f"stock {run.name}": run
            for run in run_engines([t[0] for t in triples], stock=True, keep_going=True)
        }
        runs |= {run.name: run for run in run_engines([s for t in triples for s in t[1:]], keep_going=True)}
        rows = [compare(triple, runs) for triple in triples]
    for row in rows:
        row["wrong"] = verdict(row)
        print(json.dumps({k: v for k, v in row.items() if k != "choices"}), flush=True)
    args.out.write_text(json.dumps({"provenance": provenance(), "rows": rows}, indent=1) + "\n")
    return int(any(row["wrong"] for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
