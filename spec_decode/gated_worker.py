# SPDX-License-Identifier: Apache-2.0
"""vLLM's worker with a draft gate between scheduler and model runner; see `gate_setup`."""

from typing import Any

from vllm.v1.outputs import AsyncModelRunnerOutput, DraftTokenIds
from vllm.v1.worker.gpu_worker import Worker

from vllm_ling.spec_decode.gate_graphs import capture_every_length
from vllm_ling.spec_decode.gate_setup import build
from vllm_ling.spec_decode.served_gate import ServedGate


class GatedSteps:
    """What a gated worker does in every step; mixed in before one of vLLM's worker classes."""

    vllm_config: Any
    model_runner: Any
    _gate: ServedGate | None = None

    def compile_or_warm_up_model(self) -> Any:
        """As vLLM's; the gate starts after warm-up, whose batches are not requests."""
        done = super().compile_or_warm_up_model()  # type: ignore[misc]
        self._gate = build(self.vllm_config, self.model_runner)
        return done

    def execute_model(self, scheduler_output: Any) -> Any:
        """As vLLM's, drafting as many tokens at the end of the step as the gate asks for."""
        if self._gate is not None and not scheduler_output.num_scheduled_tokens:
            self._gate.rest(scheduler_output.finished_req_ids)
        elif self._gate is not None:
            scheduler_output.num_spec_tokens_to_schedule = self._gate.begin(
                scheduler_output.num_scheduled_tokens,
                scheduler_output.scheduled_spec_decode_tokens,
                scheduler_output.finished_req_ids,
            )
        return super().execute_model(scheduler_output)  # type: ignore[misc]

    def sample_tokens(self, grammar_output: Any) -> Any:
        """As vLLM's; the gate learns what was accepted."""
        output = super().sample_tokens(grammar_output)  # type: ignore[misc]
        if self._gate is None:
            return output
        if isinstance(output, AsyncModelRunnerOutput):  # the V2 runner's, whatever the scheduling
            output = output.get_output()
        tokens = getattr(output, "sampled_token_ids", None)
        if tokens:
            self._gate.end({request: tokens[row] for request, row in output.req_id_to_index.items()})
        return output

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """As vLLM's, without the tokens that are not worth verifying."""
        drafts: DraftTokenIds | None = super().take_draft_token_ids()  # type: ignore[misc]
        if self._gate is None or drafts is None:
            return drafts
        return DraftTokenIds(drafts.req_ids, self._gate.trim(drafts.req_ids, drafts.draft_token_ids))


class GatedWorker(GatedSteps, Worker):
    """The GPU worker."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """As vLLM's; before anything is captured, every length is asked for."""
        if self.vllm_config.use_v2_model_runner:
            capture_every_length()
        super().load_model(*args, **kwargs)
