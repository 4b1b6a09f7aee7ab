# SPDX-License-Identifier: Apache-2.0
"""lm-eval's OpenAI models with another way to send: streamed, timed, recorded and resumable.

Prompts and request bodies are lm-eval's own; so are the scores. Import this module only where lm-eval is installed.
"""

import copy
import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI

from vllm_ling.eval.runs.asking import Request

Send = Callable[[Sequence[Request]], dict[str, str]]


class _Sending:
    """The part that both models share; `send` takes all requests and gives the texts by request id."""

    send: Send
    extra: dict[str, Any]
    create_message: Any
    _create_payload: Any
    _seed: int

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Answers in the order of `requests`, as lm-eval expects them."""
        asked = [self._request(request) for request in requests]
        texts = self.send(asked)
        return [texts[request.id] for request in asked]

    def _request(self, instance: Any) -> Request:
        context, settings = instance.args
        body = self._create_payload(
            self.create_message([context]),
            generate=True,
            gen_kwargs=copy.deepcopy(settings),
            seed=self._seed,
            eos=None,
        )
        body = {**body, **self.extra}
        digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
        return Request(id=str(instance.doc_id), body=body, digest=digest[:16])


class StreamingChat(_Sending, LocalChatCompletion):
    """`local-chat-completions`."""


class StreamingCompletions(_Sending, LocalCompletionsAPI):
    """`local-completions`; prompts are sent as text."""


def streaming_model(chat: bool, url: str, model: str, seed: int, extra: dict[str, Any], send: Send) -> Any:
    """The lm-eval model for a server.

    Args:
        extra: what every request body carries beside lm-eval's own fields.
        send: asks the requests; see `_Sending`.
    """
    found: Any = (StreamingChat if chat else StreamingCompletions)(
        model=model, base_url=url, tokenizer_backend=None, tokenized_requests=False, seed=seed
    )
    found.send, found.extra = send, extra
    return found
