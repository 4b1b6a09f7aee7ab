# SPDX-License-Identifier: Apache-2.0
"""Training rows for tiny-ling as two dense tensors: token ids and how much each token counts in the loss."""

import os
import re
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from multiprocessing import get_context
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from vllm_ling.tiny.problems import problems
from vllm_ling.tiny.tokenizer import PAD, ROLE_CLOSE, render_chat, token_id

ROW_LENGTH = 128
DRILL_SHARE = 0.25
DRILL_PROBLEMS = 6
# Kinds of token, stored as bytes: padding, text that is given, text that has to be produced.
PADDING, GIVEN, PRODUCED = 0, 1, 2
KIND_WEIGHT = (0.0, 0.1, 1.0)


def build_corpus(tokenizer_file: Path, rows: int, seed: int, workers: int) -> tuple[Tensor, Tensor]:
    """Generates and encodes `rows` training rows; the result does not depend on `workers`.

    Returns:
        tokens [rows, ROW_LENGTH] int16 and kinds [rows, ROW_LENGTH] uint8, padded on the right.
    """
    part = 5_000
    jobs = [
        (str(tokenizer_file), min(part, rows - start), seed * 1_000_003 + start)
        for start in range(0, rows, part)
    ]
    if workers <= 1:
        parts = [_encode_part(job) for job in jobs]
    else:
        with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
            parts = list(pool.map(_encode_part, jobs))
    tokens, kinds = zip(*parts, strict=True)
    flat_tokens = torch.frombuffer(bytearray(b"".join(tokens)), dtype=torch.int16)
    flat_kinds = torch.frombuffer(bytearray(b"".join(kinds)), dtype=torch.uint8)
    return flat_tokens.view(-1, ROW_LENGTH), flat_kinds.view(-1, ROW_LENGTH)


def _encode_part(job: tuple[str, int, int]) -> tuple[bytes, bytes]:
    """One job's rows as raw little-endian bytes, which travel between processes faster than tensors."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    file, rows, seed = job
    tokenizer = Tokenizer.from_file(file)
    pad, start, equals, newline = (token_id(tokenizer, t) for t in (PAD, ROLE_CLOSE, "=", "Ċ"))
    ids = torch.full((rows, ROW_LENGTH), pad, dtype=torch.int16)
    kinds = torch.zeros(rows, ROW_LENGTH, dtype=torch.uint8)
    texts = list(islice(_texts(seed), rows))
    for row, ((text, drill), encoding) in enumerate(
        zip(texts, tokenizer.encode_batch([text for text, _ in texts]), strict=True)
    ):
        encoded = encoding.ids[:ROW_LENGTH]
        if drill:
            marks = _after(encoded, equals, newline)
        else:
            assert len(encoding.ids) <= ROW_LENGTH, f"a problem has {len(encoding.ids)} tokens: {text}"
            answer = len(encoded) - encoded[::-1].index(start)
            marks = [GIVEN] * answer + [PRODUCED] * (len(encoded) - answer)
        ids[row, : len(encoded)] = torch.tensor(encoded, dtype=torch.int16)
        kinds[row, : len(encoded)] = torch.tensor(marks, dtype=torch.uint8)
    return ids.numpy().tobytes(), kinds.numpy().tobytes()


def _texts(seed: int) -> Iterator[tuple[str, bool]]:
    """(text, whether it is a drill). A drill is the bare equations of a few problems, one a line."""
    stream = problems(seed, heldout=False)
    drills = 0
    for count, problem in enumerate(stream, start=1):
        yield render_chat(problem.question, problem.answer), False
        if drills < count * DRILL_SHARE / (1 - DRILL_SHARE):
            drills += 1
            answers = [p.answer for p in islice(stream, DRILL_PROBLEMS)]
            yield "\n".join(re.findall(r"\d+[-+*/]\d+=\d+", "\n".join(answers))), True


def _after(ids: list[int], opening: int, closing: int) -> list[int]:
    """PRODUCED for the tokens after `opening` up to and including `closing`, GIVEN for the others."""
    marks, inside = [], False
    for token in ids:
        marks.append(PRODUCED if inside else GIVEN)
        inside = token == opening or (inside and token != closing)
    return marks
