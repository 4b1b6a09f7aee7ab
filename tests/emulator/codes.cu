// SPDX-License-Identifier: Apache-2.0
// Runs the decoders of common.cuh over all their codes: a thread each, of 256. Of a word one place holds the code, the others its
// complement.
#include "common.cuh"

// e4m3, scale, range: [256][4], [256][4], [256]. e2m1: [16 codes][8 places], FP16.
extern "C" __global__ void codes(float *e4m3, unsigned short *e2m1, float *scale, float *range) {
  int code = threadIdx.x;
  for (int i = 0; i < 4; i++) {
    uint32_t word = 0;
    for (int j = 0; j < 4; j++) word |= (uint32_t)(i == j ? code : code ^ 0xFF) << 8 * j;
    uint32_t pair = mul_bf16x2(i % 2 ? e4m3_pair_odd(word) : e4m3_pair_even(word), E4M3_MULTIPLIER);
    e4m3[code * 4 + i] = __uint_as_float(i / 2 ? pair & 0xFFFF0000u : pair << 16);
    scale[code * 4 + i] = e8m0(word, i);
  }
  range[code] = to_half_range(code) * from_half_range(code);
  if (code < 128) {
    uint32_t pair[4], word = 0;
    for (int j = 0; j < 8; j++) word |= (uint32_t)(j == code % 8 ? code / 8 : code / 8 ^ 0xF) << 4 * j;
    e2m1_pairs(pair, word);
    e2m1[code] = pair[code % 4] >> code % 8 / 4 * 16;
  }
}
