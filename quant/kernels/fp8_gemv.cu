// SPDX-License-Identifier: Apache-2.0
// y[tokens, N] = x[tokens, K] W[N, K]^T for 1 to 8 tokens, W in E4M3 as stored: the output head (one scale per row, applied
// once at the end) and block-FP8 projections (one scale per 128x128 block, applied per block). BF16 activations, FP32 sums.
//
// Compile-time shape: K, TOKENS, WARPS (per CTA, splitting k), TILES (16-row tiles per CTA), ROW_SCALES, ARGMAX, USE_PDL.
#include "common.cuh"

#define COLUMNS 8
#define X_STRIDE (K + 8)
#define CHUNKS (K / 64)
#define MINE ((CHUNKS + WARPS - 1) / WARPS)

__device__ __forceinline__ uint32_t word_of(const uint4 &v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// Scales: ROW_SCALES ? [N] : [ceil(N / 128)][K / 128], FP32.
// y: BF16 [tokens][N]; with ARGMAX instead best[gridDim.x][COLUMNS] of (value, row) per CTA.
extern "C" __global__ void __launch_bounds__(WARPS * 32)
    fp8_gemv(const bf16_t *__restrict__ x, const uint8_t *__restrict__ w, const float *__restrict__ scales,
             bf16_t *__restrict__ y, float2 *__restrict__ best, int tokens, int rows) {
  extern __shared__ uint4 smem[];
  bf16_t *xs = (bf16_t *)smem;
  float *partial = (float *)(xs + TOKENS * X_STRIDE);  // [WARPS][TILES * 16][COLUMNS]
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  int first = blockIdx.x * TILES * 16;
  let_consumer_start();

  // The first tile's weights do not depend on the producer: ask for them before waiting for x.
  uint4 low[MINE], high[MINE];
  auto fetch = [&](int tile) {
    int row = min(first + tile * 16 + g, rows - 1), row8 = min(first + tile * 16 + g + 8, rows - 1);
#pragma unroll
    for (int i = 0; i < MINE; i++) {
      int chunk = warp + i * WARPS;
      if (chunk >= CHUNKS) break;
      low[i] = load_stream((const uint4 *)(w + (size_t)row * K + chunk * 64 + 16 * t));
      high[i] = load_stream((const uint4 *)(w + (size_t)row8 * K + chunk * 64 + 16 * t));
    }
  };
  fetch(0);
  wait_for_producer();
  for (int i = threadIdx.x; i < tokens * K / 4; i += blockDim.x) {
    int token = i / (K / 4), k = i % (K / 4) * 4;
    uint2 v = *(const uint2 *)(x + (size_t)token * K + k);
    *(uint2 *)(xs + token * X_STRIDE + k) = make_uint2(__byte_perm(v.x, v.y, 0x5410), __byte_perm(v.x, v.y, 0x7632));
  }
  __syncthreads();

  bool used = g < tokens;
  const uint2 *column = (const uint2 *)(xs + (used ? g : 0) * X_STRIDE);
#pragma unroll
  for (int tile = 0; tile < TILES; tile++) {
    float acc[4] = {};
#pragma unroll
    for (int i = 0; i < MINE; i++) {
      int chunk = warp + i * WARPS;
      if (chunk >= CHUNKS) break;
#if !ROW_SCALES
      float part[4] = {};
#endif
#pragma unroll
      for (int j = 0; j < 4; j++) {
        uint32_t l = word_of(low[i], j), h = word_of(high[i], j);
        uint32_t a[4] = {mul_bf16x2(e4m3_pair_even(l), E4M3_MULTIPLIER), mul_bf16x2(e4m3_pair_even(h), E4M3_MULTIPLIER),
                         mul_bf16x2(e4m3_pair_odd(l), E4M3_MULTIPLIER), mul_bf16x2(e4m3_pair_odd(h), E4M3_MULTIPLIER)};
        uint2 b = used ? column[chunk * 16 + 4 * t + j] : make_uint2(0u, 0u);
#if ROW_SCALES
        mma_16816(acc, a, b.x, b.y);
#else
        mma_16816(part, a, b.x, b.y);
#endif
      }
#if !ROW_SCALES
      float scale = scales[(first + tile * 16) / 128 * (K / 128) + chunk / 2];
#pragma unroll
      for (int j = 0; j < 4; j++) acc[j] += scale * part[j];
#endif
    }
    if (tile + 1 < TILES) fetch(tile + 1);
#pragma unroll
    for (int i = 0; i < 4; i++)
      partial[(warp * TILES * 16 + tile * 16 + g + (i >> 1) * 8) * COLUMNS + 2 * t + (i & 1)] = acc[i];
  }
  __syncthreads();

#if ARGMAX
  __shared__ float2 candidates[TILES * 16 * COLUMNS];
#endif
  for (int i = threadIdx.x; i < TILES * 16 * tokens; i += blockDim.x) {
    int local = i % (TILES * 16), token = i / (TILES * 16), row = first + local;
    if (row >= rows) continue;
    float sum = 0.f;
#pragma unroll
    for (int v = 0; v < WARPS; v++) sum += partial[(v * TILES * 16 + local) * COLUMNS + token];
#if ROW_SCALES
    sum *= scales[row];
#endif
#if ARGMAX
    candidates[token * TILES * 16 + local] = make_float2(to_float(to_bf16(sum)), __int_as_float(row));
#else
    y[(size_t)token * rows + row] = to_bf16(sum);
#endif
  }
#if ARGMAX
  __syncthreads();
  if (threadIdx.x < tokens) {
    float2 winner = candidates[threadIdx.x * TILES * 16];
    for (int i = 1; i < min(TILES * 16, rows - first); i++) {
      float2 c = candidates[threadIdx.x * TILES * 16 + i];
      if (c.x > winner.x) winner = c;
    }
    best[blockIdx.x * COLUMNS + threadIdx.x] = winner;
  }
#endif
}

#if ARGMAX
// Last step of the argmax variant: the best of all CTAs, lowest row on ties. One CTA per token.
extern "C" __global__ void __launch_bounds__(256)
    argmax_of_best(const float2 *__restrict__ best, long long *__restrict__ ids, int ctas) {
  __shared__ float2 found[256];
  float2 winner = make_float2(-3.4e38f, __int_as_float(0x7FFFFFFF));
  wait_for_producer();
  for (int i = threadIdx.x; i < ctas; i += 256) {
    float2 c = best[i * COLUMNS + blockIdx.x];
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
