// SPDX-License-Identifier: Apache-2.0
// 16 rows x 128 k of E4M3 weights as a warp handles them: 2 KB in shared memory, and the tensor-core steps that multiply it.
#pragma once
#include "norm.cuh"

// Asks for block `block` of the 16 rows at `from` (k values each). Odd rows have their halves swapped against bank conflicts.
// Rows after `last` repeat it.
__device__ __forceinline__ void fetch_tile(uint4 *slot, const uint8_t *from, int k, int block, int last) {
  int lane = threadIdx.x & 31;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    int row = i * 4 + lane / 8, chunk = lane % 8;
    copy_async(slot + row * 8 + (chunk ^ ((row & 1) << 2)), from + (size_t)min(row, last) * k + block * 128 + chunk * 16);
  }
}

// sum[c][i] += the tile times columns 8 c to 8 c + 7 of x: BF16 rows of `stride` elements in shared memory, 0, 2, 1, 3 within each
// four values. A lane has rows g (i = 0, 1) and g + 8 (2, 3), columns 2 t and 2 t + 1 of each eight; columns from `tokens` on give 0.
template <int GROUPS_OF_8>
__device__ __forceinline__ void multiply_tile(float sum[GROUPS_OF_8][4], const uint4 *slot, const bf16_t *x, int stride, int block,
                                              int tokens) {
  int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    int chunk = (half * 4 + t) ^ ((g & 1) << 2);
    uint4 low = slot[g * 8 + chunk], high = slot[(g + 8) * 8 + chunk], b[GROUPS_OF_8][2];
#pragma unroll
    for (int c = 0; c < GROUPS_OF_8; c++) {
      b[c][0] = b[c][1] = make_uint4(0u, 0u, 0u, 0u);
      const uint4 *column = (const uint4 *)(x + (c * 8 + g) * stride + block * 128 + half * 64) + 2 * t;
      if (c * 8 + g < tokens) b[c][0] = column[0], b[c][1] = column[1];
    }
#pragma unroll
    for (int j = 0; j < 4; j++) {
      uint32_t l = word_of(low, j), h = word_of(high, j);
      uint32_t a[4] = {mul_bf16x2(e4m3_pair_even(l), E4M3_MULTIPLIER), mul_bf16x2(e4m3_pair_even(h), E4M3_MULTIPLIER),
                       mul_bf16x2(e4m3_pair_odd(l), E4M3_MULTIPLIER), mul_bf16x2(e4m3_pair_odd(h), E4M3_MULTIPLIER)};
#pragma unroll
      for (int c = 0; c < GROUPS_OF_8; c++) mma_16816(sum[c], a, word_of(b[c][j / 2], j % 2 * 2), word_of(b[c][j / 2], j % 2 * 2 + 1));
    }
  }
}
