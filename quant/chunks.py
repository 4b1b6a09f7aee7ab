# SPDX-License-Identifier: Apache-2.0
"""Cuts matrices into runs of rows, so that a codec's float32 temporaries do not grow with the tensor."""

from collections.abc import Iterator
from math import prod

import torch

# 32 MiB in float32; a codec holds a handful of such temporaries.
CHUNK_ELEMENTS = 2**23


def as_rows(tensor: torch.Tensor) -> torch.Tensor:
    """[..., K] -> [rows, K], also where K or the number of rows is 0."""
    return tensor.reshape(prod(tensor.shape[:-1]), tensor.shape[-1])


def row_chunks(rows: int, row_elements: int, multiple: int = 1) -> Iterator[slice]:
    """Consecutive slices that cover `rows`: about CHUNK_ELEMENTS each, whole groups of `multiple` rows."""
    step = max(CHUNK_ELEMENTS // max(row_elements, 1) // multiple, 1) * multiple
    for begin in range(0, rows, step):
        yield slice(begin, min(begin + step, rows))
