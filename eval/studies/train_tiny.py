# SPDX-License-Identifier: Apache-2.0
"""Trains tiny-ling: `python -m vllm_ling.eval.studies.train_tiny --out DIR [--device cuda]`.

Needs torch, tokenizers and safetensors only. Writes a BF16 checkpoint in the official layout, refreshed
while training together with the full training state, and `train_report.json` at the end. With --resume an
interrupted run goes on where its state was saved, a finished one goes on to larger --steps and --minutes.
"""

import argparse
import json
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from shutil import copyfile
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.func import functional_call

from vllm_ling.reference.config import ReferenceConfig
from vllm_ling.reference.model import LingReference
from vllm_ling.reference.save import FLOAT32_SUFFIXES, official_state_dict, save_checkpoint
from vllm_ling.tiny.assets import MODEL_DIR, TINY_CONFIG
from vllm_ling.tiny.corpus import build_corpus
from vllm_ling.tiny.evaluate import clamp_effect, load_heldout, score
from vllm_ling.tiny.objective import (
    MTP_STEPS,
    MTP_WEIGHT,
    Objective,
    balance_experts,
    init_weights,
    parameter_groups,
    quantized_weights,
)

ASSETS = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
SHARD_BYTES = 15_000_000
# Shares of the run: warm-up, start of the learning-rate decay and of training against quantization.
WARMUP, DECAY_START, QUANTIZE_FROM = 0.03, 0.6, 0.7


@dataclass
class Progress:
    """What survives an interruption besides tensors."""

    step: int = 0
    seconds: float = 0.0
    history: list[dict[str, float]] = field(default_factory=list)

    def share(self, args: argparse.Namespace) -> float:
        """Done share of the run, by steps or by minutes, whichever is further."""
        return max(self.step / float(args.steps), self.seconds / (60 * float(args.minutes)))


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Command line options."""
    parser = argparse.ArgumentParser(
        prog="train_tiny", description="Train tiny-ling on generated word problems."
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint and the report")
    parser.add_argument(
        "--state", type=Path, help="training state for --resume (default: OUT/train_state.pt)"
    )
    parser.add_argument("--resume", action="store_true", help="go on from the training state if there is one")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument(
        "--minutes", type=float, default=5.0, help="training time limit; the schedule fits itself to it"
    )
    parser.add_argument("--batch", type=int, default=256, help="rows of 128 tokens per step")
    parser.add_argument("--rows", type=int, default=0, help="corpus size; 0: steps x batch, at most 600000")
    parser.add_argument("--learning-rate", type=float, default=1.5e-3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16", help="of matrix products")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log-every", type=int, default=50)
    parser.add_argument(
        "--eval-every", type=int, default=500, help="steps between scores on a part of the held-out set"
    )
    parser.add_argument("--save-every", type=float, default=60.0, help="seconds between saved states")
    parser.add_argument("--eval-items", type=int, default=300)
    args = parser.parse_args(argv)
    args.state = args.state or args.out / "train_state.pt"
    args.rows = args.rows or min(args.steps * args.batch, 600_000)
    return args


class Trainer:
    """Model, optimizer, data and their progress."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.device = torch.device(args.device)
        args.out.mkdir(parents=True, exist_ok=True)
        for asset in ASSETS:
            copyfile(MODEL_DIR / asset, args.out / asset)
        self.tokenizer = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
        stored = json.loads((MODEL_DIR / "config.json").read_text(encoding="utf-8"))
        self.config: dict[str, Any] = TINY_CONFIG | {k: stored[k] for k in stored if k.endswith("_token_id")}
        model = LingReference(ReferenceConfig.from_dict(self.config)).set_parallel()
        init_weights(model, args.seed)
        self.model = model.to(self.device)
        self.objective = Objective(self.model).to(self.device).train()
        self.optimizer = torch.optim.AdamW(
            parameter_groups(self.model, weight_decay=0.05), lr=args.learning_rate, betas=(0.9, 0.95)
        )
        self.progress = Progress()
        if args.resume and args.state.exists():
            self._restore()

    def _restore(self) -> None:
        state = torch.load(self.args.state, map_location=self.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.progress = Progress(**state["progress"])
        say(f"resumed at step {self.progress.step}")

    def save(self) -> None:
        """Training state (atomically) and the current weights as a checkpoint."""
        partial = self.args.state.with_suffix(".part")
        torch.save(
            {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "progress": asdict(self.progress),
            },
            partial,
        )
        partial.replace(self.args.state)
        save_checkpoint(self.model, self.config, self.args.out, SHARD_BYTES)

    def learning_rate(self) -> float:
        """Warm-up, constant, then linear decay to 2% of the peak."""
        share = self.progress.share(self.args)
        rise = min(1.0, (self.progress.step + 1) / (WARMUP * self.args.steps))
        fall = min(1.0, max(0.02, (1 - share) / (1 - DECAY_START)))
        return float(self.args.learning_rate * min(rise, fall))

    def step(self, tokens: Tensor, kinds: Tensor) -> tuple[Tensor, Tensor]:
        """One update; returns the two losses without waiting for the device."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate()
        quantize = self.progress.share(self.args) >= QUANTIZE_FROM
        weights = {f"model.{n}": w for n, w in quantized_weights(self.model)} if quantize else {}
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.args.precision == "bf16"):
            main, draft = functional_call(self.objective, weights, (tokens, kinds))
        self.optimizer.zero_grad(set_to_none=True)
        (main + MTP_WEIGHT * draft).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        balance_experts(self.model, 1e-3 if not quantize else 1e-4)
        return main.detach(), draft.detach()

    def train(self) -> None:
        """Runs until the steps or the minutes are used up."""
        args, progress = self.args, self.progress
        if progress.share(args) >= 1:
            return
        began = time.monotonic()
        tokens, kinds = build_corpus(MODEL_DIR / "tokenizer.json", args.rows, args.seed, args.workers)
        tokens, kinds = tokens.to(self.device), kinds.to(self.device)
        say(f"{args.rows} rows in {time.monotonic() - began:.0f} s; training on {device_name(self.device)}")
        # A codec that cannot run on this device should say so now, not when its phase begins.
        dict(quantized_weights(self.model))
        before, started = progress.seconds, time.monotonic()
        saved, logged = started, (progress.step, started)
        while progress.share(args) < 1:
            order = torch.Generator().manual_seed(args.seed * 7_919 + progress.step)
            rows = torch.randint(0, len(tokens), (args.batch,), generator=order).to(self.device)
            losses = self.step(tokens[rows].long(), kinds[rows].long())
            progress.step += 1
            if progress.step % args.log_every == 0 or progress.step == 1:
                main, draft = (float(loss) for loss in losses)
                now = time.monotonic()
                progress.seconds = before + now - started
                pace = (now - logged[1]) / max(1, progress.step - logged[0])
                logged = (progress.step, now)
                self._log(main, draft, pace)
            else:
                progress.seconds = before + time.monotonic() - started
            if progress.step % args.eval_every == 0 and progress.share(args) < 1:
                part = score(self.evaluation_model(False), self.tokenizer, load_heldout(100), MTP_STEPS)
                say(f"  held-out part: {part}")
            if time.monotonic() - saved > args.save_every:
                self.save()
                saved = time.monotonic()
        self.save()

    def _log(self, main: float, draft: float, pace: float) -> None:
        progress = self.progress
        share = progress.share(self.args)
        left = progress.seconds / share * (1 - share)
        if main != main:
            raise SystemExit(f"train_tiny: the loss is NaN at step {progress.step}; lower --learning-rate")
        progress.history.append(
            {"step": progress.step, "loss": round(main, 4), "draft_loss": round(draft, 4)}
        )
        say(
            f"step {progress.step:5d}  {100 * share:5.1f}%  loss {main:.4f}  draft {draft:.4f}  "
            f"{1000 * pace:.0f} ms/step  ETA {max(0.0, left):.0f} s"
        )

    def evaluation_model(self, quantized: bool) -> LingReference:
        """A copy in evaluation mode with the weights as stored: BF16, or rounded to FP4 and FP8 as well."""
        copy = LingReference(self.model.config).set_parallel().to(self.device).eval()
        state = self.model.state_dict()
        copy.load_state_dict(
            {n: v if n.endswith(FLOAT32_SUFFIXES) else v.bfloat16().float() for n, v in state.items()}
        )
        if quantized:
            copy.load_state_dict(dict(quantized_weights(copy)), strict=False)
        return copy

    def report(self) -> dict[str, Any]:
        """Final scores; also written to `train_report.json`."""
        items = load_heldout(self.args.eval_items)
        plain, quantized = self.evaluation_model(False), self.evaluation_model(True)
        content = {
            "steps": self.progress.step,
            "rows": self.args.rows,
            "batch": self.args.batch,
            "seed": self.args.seed,
            "precision": self.args.precision,
            "train_seconds": round(self.progress.seconds, 1),
            "device": device_name(self.device),
            "torch": torch.__version__,
            "parameters": sum(t.numel() for t in official_state_dict(self.model).values()),
            "loss": self.progress.history[-1] if self.progress.history else None,
            "drafts": MTP_STEPS,
            "bf16": asdict(score(plain, self.tokenizer, items, MTP_STEPS)),
            "fake_quantized": asdict(score(quantized, self.tokenizer, items, MTP_STEPS)),
            "clamps_ignored": asdict(clamp_effect(plain, self.tokenizer, items)),
            "history": self.progress.history,
        }
        (self.args.out / "train_report.json").write_text(
            json.dumps(content, indent=1) + "\n", encoding="utf-8"
        )
        return content


def device_name(device: torch.device) -> str:
    """What the run is on, in words."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def say(text: str) -> None:
    """One progress line, shown at once even through a pipe."""
    print(text, flush=True)


def main(argv: list[str] | None = None) -> None:
    """Trains, evaluates and writes everything into --out."""
    args = parse(argv)
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    trainer = Trainer(args)
    trainer.train()
    torch.set_float32_matmul_precision("highest")
    content = trainer.report()
    say(json.dumps({key: value for key, value in content.items() if key != "history"}, indent=1))


if __name__ == "__main__":
    main()
