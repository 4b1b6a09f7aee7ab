# SPDX-License-Identifier: Apache-2.0
"""tiny-ling's tokenizer: byte-level BPE learned from problems, one token per digit, Ling's role markers.

Every byte has a token of its own, so any UTF-8 text can be encoded and comes back unchanged.
"""

from collections.abc import Iterator
from itertools import islice

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from vllm_ling.errors import LingError
from vllm_ling.tiny.problems import problems

VOCAB_SIZE = 1024
BOS, PAD, EOS = "<|startoftext|>", "<|endoftext|>", "<|role_end|>"
ROLE_OPEN, ROLE_CLOSE = "<role>", "</role>"
SPECIAL_TOKENS = (BOS, PAD, EOS, ROLE_OPEN, ROLE_CLOSE)
ROLES = {"system": "SYSTEM", "user": "HUMAN", "assistant": "ASSISTANT", "tool": "OBSERVATION"}

# The same text as `render_chat`, as the Jinja template that servers read.
CHAT_TEMPLATE = (
    "{%- set roles = {'system': 'SYSTEM', 'user': 'HUMAN', 'assistant': 'ASSISTANT', "
    "'tool': 'OBSERVATION'} -%}"
    "{%- for message in messages -%}"
    "{{- '<role>' + roles[message['role']] + '</role>' + message['content'] + '<|role_end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<role>ASSISTANT</role>' -}}{%- endif -%}"
)


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a token that the tokenizer must have.

    Raises:
        LingError: it has not.
    """
    number = tokenizer.token_to_id(token)
    if number is None:
        raise LingError(f"tokenizer.json: token {token!r} is missing")
    return int(number)


def render_chat(question: str, answer: str | None = None) -> str:
    """One exchange in Ling's role format; without an answer it ends where the assistant starts to write."""
    text = f"<role>{ROLES['user']}</role>{question}{EOS}<role>{ROLES['assistant']}</role>"
    return text if answer is None else f"{text}{answer}{EOS}"


def build_tokenizer(items: int = 20_000, seed: int = 7) -> Tokenizer:
    """Learns the vocabulary from `items` generated exchanges; the same arguments give the same tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(items, seed), trainer)
    return tokenizer


def _corpus(items: int, seed: int) -> Iterator[str]:
    for problem in islice(problems(seed, heldout=False), items):
        yield render_chat(problem.question, problem.answer)
    # Rare in the problems, common around them.
    yield from [" ".join(ROLES.values()), *ROLES.values()] * 50
