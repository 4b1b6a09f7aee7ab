// SPDX-License-Identifier: Apache-2.0
// The block-FP8 shared expert as items of 16 rows x 128 k, a warp each, in the launch of the routed experts.
#pragma once
#include "moe_shape.cuh"

// One item's codes: lane (g, t) holds 16 bytes of rows g and g + 8 at k = 16 t of both 64-k halves. And their scale.
struct SharedItem {
  uint4 low[2], high[2];
  float scale;
  // Unpacking begins here: moved up, it would wait for memory there.
  __device__ __forceinline__ void use_from_here() {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      asm volatile("" : "+r"(low[half].x), "+r"(low[half].y), "+r"(low[half].z), "+r"(low[half].w));
      asm volatile("" : "+r"(high[half].x), "+r"(high[half].y), "+r"(high[half].z), "+r"(high[half].w));
    }
  }
};

template <int K>
__device__ __forceinline__ void fetch_item(SharedItem &item, const uint8_t *w, const float *scales, int index, int tiles) {
  int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, tile = min(index / (K / 128), tiles - 1);
  item.scale = __ldg(scales + tile * 16 / 128 * (K / 128) + index % (K / 128));
  const uint8_t *at = w + (size_t)(tile * 16 + g) * K + index % (K / 128) * 128 + 16 * t;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    item.low[half] = load_stream((const uint4 *)(at + 64 * half));
    item.high[half] = load_stream((const uint4 *)(at + (size_t)8 * K + 64 * half));
  }
}

// The item times x: sums[16 rows][TOKENS]. x: shared memory, `stride` elements a token, 0, 2, 1, 3 within each four values,
// so that byte pairs of the codes and value pairs of x agree.
template <int K>
__device__ __forceinline__ void multiply_item(float *sums, const SharedItem &item, int index, const bf16_t *x, int stride, int tokens) {
  int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, block = index % (K / 128);
  float acc[4] = {};
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const uint4 *column = (const uint4 *)(x + g * stride + block * 128 + half * 64) + 2 * t;
    uint4 b[2] = {make_uint4(0u, 0u, 0u, 0u), make_uint4(0u, 0u, 0u, 0u)};
    if (g < tokens) b[0] = column[0], b[1] = column[1];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      uint32_t l = word_of(item.low[half], i), h = word_of(item.high[half], i);
      uint32_t a[4] = {mul_bf16x2(e4m3_pair_even(l), E4M3_MULTIPLIER), mul_bf16x2(e4m3_pair_even(h), E4M3_MULTIPLIER),
                       mul_bf16x2(e4m3_pair_odd(l), E4M3_MULTIPLIER), mul_bf16x2(e4m3_pair_odd(h), E4M3_MULTIPLIER)};
      mma_16816(acc, a, word_of(b[i / 2], i % 2 * 2), word_of(b[i / 2], i % 2 * 2 + 1));
    }
  }
#pragma unroll
  for (int i = 0; i < 4; i++) {
    int token = 2 * t + (i & 1);
    if (token < TOKENS) sums[token * 16 + g + (i >> 1) * 8] = item.scale * acc[i];
  }
}

// Runs the CTA's items, QUOTA of them, into sums[item][TOKENS][16]; `first` holds the first WARPS items.
template <int K, int TILES, int QUOTA>
__device__ __forceinline__ void shared_items(float *sums, const SharedItem &first, const uint8_t *w, const float *scales, const bf16_t *x,
                                             int stride, int tokens) {
  int warp = threadIdx.x >> 5;
  SharedItem item = first;
#pragma unroll 1
  for (int i = warp; i < QUOTA; i += WARPS) {
    int index = blockIdx.x * QUOTA + i;
    if (index >= TILES * (K / 128)) break;
    if (i >= WARPS) fetch_item<K>(item, w, scales, index, TILES);
    multiply_item<K>(sums + i * TOKENS * 16, item, index, x, stride, tokens);
  }
}

// Which CTAs a tile's items belong to: the first, and how many. CTA `first + i` stores part i.
template <int ITEMS, int QUOTA>
__device__ constexpr int first_part(int tile) { return tile * ITEMS / QUOTA; }
template <int ITEMS, int QUOTA>
__device__ constexpr int shared_parts(int tile) {
  return (tile * ITEMS + ITEMS - 1) / QUOTA - first_part<ITEMS, QUOTA>(tile) + 1;
}

// Adds the items of each tile and stores them as this CTA's part: parts[tile][part][token][16]. The last threads: in down the
// first ones store the routed experts' sums meanwhile.
template <int K, int TILES, int QUOTA>
__device__ __forceinline__ void store_shared_parts(const float *sums, Tagged (*parts)[SHARED_PARTS][TOKENS][16], int tokens, uint32_t tag) {
  constexpr int ITEMS = K / 128;
  int begin = blockIdx.x * QUOTA, end = min(begin + QUOTA, TILES * ITEMS);
  int first = begin / ITEMS, count = begin < end ? (end - 1) / ITEMS - first + 1 : 0;
#pragma unroll 1
  for (int i = THREADS - 1 - threadIdx.x; i < count * TOKENS * 16; i += THREADS) {
    int tile = first + i / (TOKENS * 16), token = i / 16 % TOKENS, row = i % 16;
    if (token >= tokens) continue;
    float sum = 0.f;
#pragma unroll 1
    for (int item = max(begin, tile * ITEMS); item < min(end, (tile + 1) * ITEMS); item++)
      sum += sums[((item - begin) * TOKENS + token) * 16 + row];
    store_tagged(&parts[tile][blockIdx.x - first_part<ITEMS, QUOTA>(tile)][token][row], __float_as_uint(sum), tag);
  }
}
