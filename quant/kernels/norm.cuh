// SPDX-License-Identifier: Apache-2.0
// RMSNorm of token rows on their way into shared memory, by every CTA for itself: cheaper than a launch of its own.
#pragma once
#include "common.cuh"

__device__ __forceinline__ float low_of(uint32_t bf16x2) { return __uint_as_float(bf16x2 << 16); }
__device__ __forceinline__ float high_of(uint32_t bf16x2) { return __uint_as_float(bf16x2 & 0xFFFF0000u); }
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  return (uint32_t)to_bf16(low).bits | (uint32_t)to_bf16(high).bits << 16;
}
// BF16 values 0, 1, 2, 3 as 0, 2, 1, 3, so that byte pairs of FP8 weights and value pairs of x agree.
__device__ __forceinline__ uint2 in_fp8_order(const uint2 &v) {
  return make_uint2(__byte_perm(v.x, v.y, 0x5410), __byte_perm(v.x, v.y, 0x7632));
}
__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.f, 1.f + __expf(-x)); }
__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int offset = 16; offset; offset >>= 1) v += __shfl_xor_sync(~0u, v, offset);
  return v;
}

// Rows of WIDTH BF16 values, four a thread and round. A row is a whole number of warps wide.
template <int ROWS, int WIDTH, int THREADS_>
struct Rows {
  static constexpr int QUADS = WIDTH / 4, ROUNDS = (ROWS * QUADS + THREADS_ - 1) / THREADS_, PARTS = WIDTH / 128;
  static_assert(WIDTH % 128 == 0, "rows are whole warps");
  uint2 v[ROUNDS];

  static __device__ __forceinline__ int quad(int round) { return threadIdx.x + round * THREADS_; }

  __device__ __forceinline__ void load(const bf16_t *x, int rows) {
#pragma unroll
    for (int r = 0; r < ROUNDS; r++) v[r] = quad(r) < rows * QUADS ? load_fresh((const uint2 *)x + quad(r)) : make_uint2(0u, 0u);
  }
  // The same row for all: a weight vector. ptxas puts off other loads until after wait_for_producer, where they take longer than x.
  __device__ __forceinline__ void load_weight(const bf16_t *w) {
#pragma unroll
    for (int r = 0; r < ROUNDS; r++) v[r] = load_fresh((const uint2 *)w + quad(r) % QUADS);
  }
  // v <- v / rms(v) * w, rounded to BF16 after both steps as vLLM's kernel does. `parts`: ROWS x PARTS floats in shared memory.
  __device__ __forceinline__ void normalize(const Rows &w, float *parts, float eps) {
#pragma unroll
    for (int r = 0; r < ROUNDS; r++) {
      float a = low_of(v[r].x), b = high_of(v[r].x), c = low_of(v[r].y), d = high_of(v[r].y), sum = warp_sum(a * a + b * b + c * c + d * d);
      if ((threadIdx.x & 31) == 0 && quad(r) < ROWS * QUADS) parts[quad(r) / 32] = sum;
    }
    __syncthreads();
#pragma unroll
    for (int r = 0; r < ROUNDS; r++) {
      const float *mine = parts + min(quad(r) / QUADS, ROWS - 1) * PARTS;
      float sum = 0.f;
#pragma unroll
      for (int i = 0; i < PARTS; i++) sum += mine[i];
      float f = rsqrtf(sum / WIDTH + eps);
      v[r] = make_uint2(times(pack_bf16(f * low_of(v[r].x), f * high_of(v[r].x)), w.v[r].x),
                        times(pack_bf16(f * low_of(v[r].y), f * high_of(v[r].y)), w.v[r].y));
    }
  }

 private:
  static __device__ __forceinline__ uint32_t times(uint32_t a, uint32_t b) {
    return pack_bf16(low_of(a) * low_of(b), high_of(a) * high_of(b));
  }
};
