# SPDX-License-Identifier: Apache-2.0
"""Fragment layout: bit-exact both ways, and each value where the tensor-core step expects it."""

import pytest
import torch

from vllm_ling.quant.layout import from_fragment_scales, from_fragments, to_fragment_scales, to_fragments


@pytest.mark.parametrize(("experts", "rows", "cols"), [(1, 64, 16), (3, 128, 160), (2, 1536, 256)])
def test_round_trip(experts: int, rows: int, cols: int) -> None:
    codes = torch.randint(0, 256, (experts, rows, cols // 2), dtype=torch.uint8)
    words = to_fragments(codes)
    assert words.shape == (experts, cols // 16, rows // 64, 32, 4) and words.nbytes == codes.nbytes
    assert torch.equal(from_fragments(words), codes)
    scales = torch.randint(0, 255, (experts, rows, 5), dtype=torch.uint8)
    assert torch.equal(from_fragment_scales(to_fragment_scales(scales)), scales)


def test_values_lie_where_the_fragment_says() -> None:
    rows, cols = 128, 48
    values = torch.randint(0, 16, (rows, cols), dtype=torch.uint8)
    words = to_fragments((values[:, 0::2] | (values[:, 1::2] << 4))[None])[0]
    for k16, n64, lane, j in [(0, 0, 0, 0), (2, 1, 31, 3), (1, 0, 13, 2), (2, 1, 6, 1)]:
        g, t = divmod(lane, 4)
        word = int(words[k16, n64, lane, j]) & 0xFFFFFFFF
        for nibble in range(8):
            i6, i4, i5 = nibble // 4, nibble // 2 % 2, nibble % 2
            row, col = n64 * 64 + 16 * j + g + 8 * i4, k16 * 16 + 2 * t + 8 * i5 + i6
            assert (word >> (4 * nibble)) & 15 == values[row, col]


@pytest.mark.parametrize("shape", [(1, 60, 32), (1, 64, 12)])
def test_odd_shapes_are_refused(shape: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="fragments need"):
        to_fragments(torch.zeros(shape, dtype=torch.uint8))
