# SPDX-License-Identifier: Apache-2.0
"""Part `head`: the FP8 output head against the BF16 head, on random hidden states and a small model's real ones."""

import torch

from vllm_ling.checkpoint.shapes import LingShape
from vllm_ling.doctor.finding import Outcome
from vllm_ling.quant.head_probe import HeadProbe, ProbeResult
from vllm_ling.reference.load import StoredTensors, from_checkpoint
from vllm_ling.verify.finding import Finding, judged
from vllm_ling.verify.head_layer import fp8_rows, head_source, stored_rows
from vllm_ling.verify.prompts import chat_prompts
from vllm_ling.verify.settings import Verification
from vllm_ling.verify.small_model import too_large

_FIX = (
    "a stored FP8 head: download or quantize it again (vllm-ling quantize --head fp8); else serve with "
    '--additional-config \'{"ling": {"lm_head": "bf16"}}\''
)
_REAL_PROMPTS = 16
_REAL_STATES = 512


def run(what: Verification) -> Finding:
    """Judges by the bounds that also hold at load; without a BF16 head to compare with the outcome is unknown."""
    stored = StoredTensors(what.folder)
    source = head_source(stored)
    other = what.reference_folder
    exact = StoredTensors(other) if other else stored
    if head_source(exact) != "fp8_online":
        why = "--reference stores it in FP8 too" if other else "the checkpoint stores the head in FP8 only"
        return Finding(
            part="head",
            outcome="unknown",
            evidence=f"no BF16 head to compare with: {why}",
            fix="give --reference FOLDER with the BF16 checkpoint (its lm_head.weight is all that is read)",
        )
    device = torch.device(what.device)
    large = too_large(what.folder)
    real = None if large else _real_states(what)
    results = {"random hidden states": _probe(exact, stored, device, None)}
    if real is not None:
        results["real hidden states"] = _probe(exact, stored, device, real)
    problems: list[tuple[Outcome, str]] = []
    said = [f"FP8 head ({source}) against the BF16 head{' of --reference' if other else ''}"]
    for name, result in results.items():
        count = len(real) if name.startswith("real") and real is not None else 256
        if result.ok:
            said.append(f"{count} {name}: {result}")
        else:
            problems.append(("fail", f"on {count} {name} the FP8 head drifts from the BF16 head: {result}"))
    if large:
        said.append(f"no real hidden states: {large}")
    figures = {
        "source": source,
        **{name: {"top1": r.top1, "mean_kl": r.mean_kl, "rms": r.rms} for name, r in results.items()},
    }
    return judged("head", problems, said, figures, _FIX)


def _probe(
    exact: StoredTensors, stored: StoredTensors, device: torch.device, states: torch.Tensor | None
) -> ProbeResult:
    hidden = stored.read("lm_head.weight").shape[1]
    probe = HeadProbe(hidden, device, states=states)
    for (_, reference), (_, candidate) in zip(stored_rows(exact), fp8_rows(stored), strict=True):
        probe.update(reference.to(device), candidate.to(device))
    return probe.result()


def _real_states(what: Verification) -> torch.Tensor:
    """What the head of a small model meets on word problems, by the fp32 reference: [states, hidden]."""
    vocab = LingShape.from_folder(what.folder).vocab_size
    prompts, _ = chat_prompts(what.folder, _REAL_PROMPTS, vocab)
    model = from_checkpoint(what.folder)
    with torch.inference_mode():
        states = torch.cat([model.hidden(torch.tensor([prompt]))[0] for prompt in prompts])
    return states[:_REAL_STATES]
