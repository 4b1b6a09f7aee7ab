# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU worker with a draft gate."""

from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_ling.spec_decode.gated_worker import GatedSteps


class GatedCPUWorker(GatedSteps, CPUWorker):
    """The CPU worker."""
