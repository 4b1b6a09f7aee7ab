# SPDX-License-Identifier: Apache-2.0
"""Do stock vLLM, vllm-ling and the fp32 reference agree on the same mini checkpoints? `python -m vllm_ling.eval.parity`

Per format two checkpoints. Where no gate reaches its clamp, all three must agree. Where clamps bite, only the plugin may
agree with the reference: stock vLLM clamps routed experts before SiLU. The head stays BF16 in the compared runs, so that
nothing but the model is compared; one more run has everything on and must show its proofs.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from vllm_ling.checkpoint.synthetic import make_checkpoint
from vllm_ling.eval.engines import EngineRun, EngineSpec, run_engines
from vllm_ling.eval.provenance import provenance
from vllm_ling.reference.load import from_checkpoint

# BF16 rounds every layer output to 8 bits of mantissa; over six layers two correct engines drift this far apart.
BF16_RMS = 0.03
# Block-FP8 GEMMs on a GPU also round the activations to e4m3 (3 mantissa bits), which the reference does not.
W8A8_RMS = 0.10
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


def compare(fmt: str, clamp: float, work: Path) -> dict[str, Any]:
    """One checkpoint through stock, plugin and reference; returns the relative RMS of each pair."""
    folder = make_checkpoint(work / f"{fmt}-{clamp:g}", shape="flash", fmt=fmt, seed=1, mtp=True, clamp=clamp)
    vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
    asked = prompts(vocab)
    spec = EngineSpec(
        name=f"{fmt} clamp {clamp:g}",
        model=str(folder),
        prompts=asked,
        dtype="bfloat16",
        max_tokens=24,
        first_logits=True,
        options={"lm_head": "bf16"},
    )
    stock = run_engines([_stock(spec)], stock=True)[0]
    ours, full = run_engines([spec, _everything_on(spec, fmt)])
    exact = reference_logits(folder, asked)
    return {
        "format": fmt,
        "clamp": clamp,
        "plugin_vs_stock": relative_rms(ours.logits, stock.logits),
        "plugin_vs_reference": relative_rms(ours.logits, exact),
        "stock_vs_reference": relative_rms(stock.logits, exact),
        "all_on": _summary(full),
        "choices": ours.status["choices"],
    }


def _stock(spec: EngineSpec) -> EngineSpec:
    return EngineSpec(**{**spec.__dict__, "options": {}})


def _everything_on(spec: EngineSpec, fmt: str) -> EngineSpec:
    changes = {
        "name": f"{spec.name} all on",
        "options": {"lm_head": "fp8"},
        "draft_tokens": 3,
        "first_logits": False,
    }
    if fmt == "bf16":
        changes["engine"] = {**spec.engine, "quantization": "ling"}
    return EngineSpec(**{**spec.__dict__, **changes})


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
    bound = W8A8_RMS if row["format"] in ("fp8", "fp4") else BF16_RMS
    wrong = []
    if row["plugin_vs_reference"] > bound:
        wrong.append(f"plugin differs from the reference by {row['plugin_vs_reference']:.3f} > {bound}")
    bites = row["clamp"] < 100
    if not bites and row["plugin_vs_stock"] > bound:
        wrong.append(
            f"plugin differs from stock by {row['plugin_vs_stock']:.3f} > {bound} although no clamp bites"
        )
    if bites and row["stock_vs_reference"] < 1.5 * row["plugin_vs_reference"]:
        wrong.append("the clamps do not bite: stock is as close to the reference as the plugin")
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
    rows = []
    with tempfile.TemporaryDirectory() as work:
        for fmt in args.formats.split(","):
            for clamp in (1e4, 0.3):
                row = compare(fmt, clamp, Path(work))
                row["wrong"] = verdict(row)
                rows.append(row)
                print(json.dumps({k: v for k, v in row.items() if k != "choices"}), flush=True)
                args.out.write_text(json.dumps({"provenance": provenance(), "rows": rows}, indent=1) + "\n")
    return int(any(row["wrong"] for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
