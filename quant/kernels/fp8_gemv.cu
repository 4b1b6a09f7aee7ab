// SPDX-License-Identifier: Apache-2.0
// y[tokens, N] = x[tokens, K] W[N, K]^T for 1 to 8 tokens, W in E4M3 as stored: the output head (one scale per row, applied
// once at the end) and block-FP8 projections (one scale per 128x128 block, applied per block). BF16 activations, FP32 sums.
//
// A warp owns 16 rows at a time and streams them through a ring of registers that always has AHEAD loads in flight, across
// row-tile borders too. Compile-time shape: K, TOKENS, ROW_SCALES, ARGMAX, USE_PDL, WARPS (per CTA).
#include "common.cuh"

#define COLUMNS 8
#define X_STRIDE (K + 8)  // 16 bytes of padding put the token rows into different banks
#define CHUNKS (K / 64)
#define AHEAD (CHUNKS % 5 == 0 ? 5 : CHUNKS % 4 == 0 ? 4 : 2)

__device__ __forceinline__ uint32_t word_of(const uint4 &v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// Scales: ROW_SCALES ? [N] : [ceil(N / 128)][K / 128], FP32.
// y: BF16 [tokens][N]; with ARGMAX instead best[warps of the grid][COLUMNS] of (value, row).
extern "C" __global__ void __launch_bounds__(WARPS * 32)
    fp8_gemv(const bf16_t *__restrict__ x, const uint8_t *__restrict__ w, const float *__restrict__ scales,
             bf16_t *__restrict__ y, float2 *__restrict__ best, int tokens, int rows) {
  __shared__ __align__(16) bf16_t xs[TOKENS * X_STRIDE];
  int lane = threadIdx.x & 31, warp = blockIdx.x * WARPS + (threadIdx.x >> 5), g = lane >> 2, t = lane & 3;
  int tiles = (rows + 15) / 16, stride = gridDim.x * WARPS;
  let_consumer_start();

  uint4 low[AHEAD], high[AHEAD];
  auto fetch = [&](int slot, int tile, int chunk) {
    tile = min(tile, tiles - 1);
    const uint8_t *row = w + (size_t)min(tile * 16 + g, rows - 1) * K + chunk * 64 + 16 * t;
    const uint8_t *row8 = w + (size_t)min(tile * 16 + g + 8, rows - 1) * K + chunk * 64 + 16 * t;
    low[slot] = load_stream((const uint4 *)row);
    high[slot] = load_stream((const uint4 *)row8);
  };
  // Weights do not depend on the producer: ask for them before waiting for x.
#pragma unroll
  for (int i = 0; i < AHEAD; i++) fetch(i, warp, i);
  wait_for_producer();
  // Values are stored as 0, 2, 1, 3 within each four, so that byte pairs of W and value pairs of x agree.
  for (int i = threadIdx.x; i < tokens * K / 4; i += WARPS * 32) {
    int token = i / (K / 4), k = i % (K / 4) * 4;
    uint2 v = *(const uint2 *)(x + (size_t)token * K + k);
    *(uint2 *)(xs + token * X_STRIDE + k) = make_uint2(__byte_perm(v.x, v.y, 0x5410), __byte_perm(v.x, v.y, 0x7632));
  }
  __syncthreads();

  bool used = g < tokens;
  const uint4 *column = (const uint4 *)(xs + (used ? g : 0) * X_STRIDE) + 2 * t;
#if ARGMAX
  float top[2] = {-3.4e38f, -3.4e38f};
  int where[2] = {0x7FFFFFFF, 0x7FFFFFFF};
#endif
  for (int tile = warp; tile < tiles; tile += stride) {
    float acc[4] = {};
    for (int base = 0; base < CHUNKS; base += AHEAD) {
#pragma unroll
      for (int i = 0; i < AHEAD; i++) {
        int chunk = base + i;
        uint4 b[2] = {make_uint4(0u, 0u, 0u, 0u), make_uint4(0u, 0u, 0u, 0u)};
        if (used) b[0] = column[chunk * 8], b[1] = column[chunk * 8 + 1];
#if !ROW_SCALES
        float part[4] = {};
#endif
#pragma unroll
        for (int j = 0; j < 4; j++) {
          uint32_t l = word_of(low[i], j), h = word_of(high[i], j);
          uint32_t a[4] = {mul_bf16x2(e4m3_pair_even(l), E4M3_MULTIPLIER), mul_bf16x2(e4m3_pair_even(h), E4M3_MULTIPLIER),
                           mul_bf16x2(e4m3_pair_odd(l), E4M3_MULTIPLIER), mul_bf16x2(e4m3_pair_odd(h), E4M3_MULTIPLIER)};
#if ROW_SCALES
          mma_16816(acc, a, word_of(b[j / 2], j % 2 * 2), word_of(b[j / 2], j % 2 * 2 + 1));
        }
#else
          mma_16816(part, a, word_of(b[j / 2], j % 2 * 2), word_of(b[j / 2], j % 2 * 2 + 1));
        }
        float scale = __ldg(scales + tile * 16 / 128 * (K / 128) + chunk / 2);
#pragma unroll
        for (int j = 0; j < 4; j++) acc[j] += scale * part[j];
#endif
        int next = chunk + AHEAD;
        fetch(i, next < CHUNKS ? tile : tile + stride, next < CHUNKS ? next : next - CHUNKS);
      }
    }
    // acc: rows g (0, 1) and g + 8 (2, 3), tokens 2 t and 2 t + 1.
#pragma unroll
    for (int i = 0; i < 4; i++) {
      int row = tile * 16 + g + (i >> 1) * 8, token = 2 * t + (i & 1);
      if (row >= rows || token >= tokens) continue;
#if ROW_SCALES
      acc[i] *= __ldg(scales + row);
#endif
#if ARGMAX
      float value = to_float(to_bf16(acc[i]));
      if (value > top[i & 1] || (value == top[i & 1] && row < where[i & 1])) top[i & 1] = value, where[i & 1] = row;
#else
      y[(size_t)token * rows + row] = to_bf16(acc[i]);
#endif
    }
  }
#if ARGMAX
#pragma unroll
  for (int i = 0; i < 2; i++) {
#pragma unroll
    for (int offset = 4; offset < 32; offset <<= 1) {
      float value = __shfl_xor_sync(~0u, top[i], offset);
      int row = __shfl_xor_sync(~0u, where[i], offset);
      if (value > top[i] || (value == top[i] && row < where[i])) top[i] = value, where[i] = row;
    }
    if (g == 0) best[(size_t)warp * COLUMNS + 2 * t + i] = make_float2(top[i], __int_as_float(where[i]));
  }
#endif
}

#if ARGMAX
// Last step of the argmax variant: the best of all warps, lowest row on ties. One CTA per token.
extern "C" __global__ void __launch_bounds__(256)
    argmax_of_best(const float2 *__restrict__ best, long long *__restrict__ ids, int candidates) {
  __shared__ float2 found[256];
  float2 winner = make_float2(-3.4e38f, __int_as_float(0x7FFFFFFF));
  wait_for_producer();
  for (int i = threadIdx.x; i < candidates; i += 256) {
    float2 c = best[(size_t)i * COLUMNS + blockIdx.x];
    if (c.x > winner.x || (c.x == winner.x && __float_as_int(c.y) < __float_as_int(winner.y))) winner = c;
  }
  found[threadIdx.x] = winner;
  __syncthreads();
  for (int half = 128; half; half >>= 1) {
    if (threadIdx.x < half) {
      float2 c = found[threadIdx.x + half], m = found[threadIdx.x];
      if (c.x > m.x || (c.x == m.x && __float_as_int(c.y) < __float_as_int(m.y))) found[threadIdx.x] = c;
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) ids[blockIdx.x] = __float_as_int(found[0].y);
}
#endif
