// SPDX-License-Identifier: Apache-2.0
// A head's BF16 projection into or out of the latent space for up to 8 tokens: a CTA's share of the outputs, from shared memory.
// Compile-time: TOKENS; THREADS of the CTA.
#pragma once
#include "norm.cuh"

// y[n][o] = sum over k of x[n][k] w(k, o), FP32. The weights lie as [OUT][K] if OUTPUT_ROWS, else as [K][OUT].
template <int K, int OUT, bool OUTPUT_ROWS>
struct Product {
  static constexpr int WIDTH = OUTPUT_ROWS ? K : OUT, HEIGHT = OUTPUT_ROWS ? OUT : K;
  static constexpr int SLICES = OUTPUT_ROWS ? THREADS / OUT : THREADS * 2 / OUT;  // threads that share an output, or a pair
  static constexpr int SLICE = K / SLICES;
  static_assert(WIDTH % 8 == 0 && THREADS % OUT == 0 && K % SLICES == 0 && SLICE % 8 == 0, "mla_attention.py: shape");

  uint4 weight[HEIGHT][WIDTH / 8 + 1];  // 16 bytes of padding put neighbouring rows into different banks
  float x[TOKENS][K];
  float sums[SLICES][TOKENS][OUT];

  // Asks for the weights; `stride` elements a row. They are there after wait_copies<0>() and a barrier.
  __device__ __forceinline__ void fetch(const bf16_t *from, long long stride) {
#pragma unroll 8
    for (int i = threadIdx.x; i < HEIGHT * (WIDTH / 8); i += THREADS)
      copy_async(&weight[i / (WIDTH / 8)][i % (WIDTH / 8)], from + i / (WIDTH / 8) * stride + i % (WIDTH / 8) * 8);
    commit_copies();
  }

  // Forms the sums of all slices. Rows of x from `tokens` on hold whatever is there; nobody reads their sums.
  __device__ __forceinline__ void multiply() {
    if (OUTPUT_ROWS) {
      int out = threadIdx.x % OUT, slice = threadIdx.x / OUT;
      float sum[TOKENS] = {};
#pragma unroll 2
      for (int k = slice * SLICE; k < (slice + 1) * SLICE; k += 8) {
        uint4 w = weight[out][k / 8];
#pragma unroll
        for (int n = 0; n < TOKENS; n++) {
          float4 a = *(const float4 *)&x[n][k], b = *(const float4 *)&x[n][k + 4];
          sum[n] += (a.x * low_of(w.x) + a.y * high_of(w.x)) + (a.z * low_of(w.y) + a.w * high_of(w.y)) +
                    (b.x * low_of(w.z) + b.y * high_of(w.z)) + (b.z * low_of(w.w) + b.w * high_of(w.w));
        }
      }
#pragma unroll
      for (int n = 0; n < TOKENS; n++) sums[slice][n][out] = sum[n];
    } else {
      int pair = threadIdx.x % (OUT / 2), slice = threadIdx.x / (OUT / 2);
      float sum[TOKENS][2] = {};
#pragma unroll 2
      for (int k = slice * SLICE; k < (slice + 1) * SLICE; k += 4) {
        uint32_t w[4];
#pragma unroll
        for (int i = 0; i < 4; i++) w[i] = *((const uint32_t *)weight[k + i] + pair);
#pragma unroll
        for (int n = 0; n < TOKENS; n++) {
          float4 a = *(const float4 *)&x[n][k];
          sum[n][0] += a.x * low_of(w[0]) + a.y * low_of(w[1]) + a.z * low_of(w[2]) + a.w * low_of(w[3]);
          sum[n][1] += a.x * high_of(w[0]) + a.y * high_of(w[1]) + a.z * high_of(w[2]) + a.w * high_of(w[3]);
        }
      }
#pragma unroll
      for (int n = 0; n < TOKENS; n++) *(float2 *)&sums[slice][n][pair * 2] = make_float2(sum[n][0], sum[n][1]);
    }
  }

  // After multiply() and a barrier: two neighbouring outputs as BF16.
  __device__ __forceinline__ uint32_t pair_of(int token, int pair) const {
    float2 total = make_float2(0.f, 0.f);
#pragma unroll
    for (int i = 0; i < SLICES; i++) {
      float2 v = *(const float2 *)&sums[i][token][pair * 2];
      total.x += v.x, total.y += v.y;
    }
    return pack_bf16(total.x, total.y);
  }
};
