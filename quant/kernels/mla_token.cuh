// SPDX-License-Identifier: Apache-2.0
// What every token of an MLA layer needs before attention, a warp each: RMSNorm of its latent, rotary embedding of neighbouring
// pairs, the gate of a head's output. Compile-time: HIDDEN, LATENT, ROPE.
#pragma once
#include "norm.cuh"

static_assert(LATENT % 128 == 0 && ROPE == 64 && HIDDEN % 256 == 0, "mla_prepare.py: shape");

// Lane i turns pair i of the 32; cos_sin: BF16 [positions][cosines, sines].
struct Turn {
  float cosine, sine;
  __device__ __forceinline__ Turn(const bf16_t *cos_sin, long long position) {
    const bf16_t *at = cos_sin + (size_t)position * ROPE + (threadIdx.x & 31);
    cosine = to_float(at[0]), sine = to_float(at[ROPE / 2]);
  }
  __device__ __forceinline__ uint32_t of(uint32_t pair) const {
    float a = low_of(pair), b = high_of(pair);
    return pack_bf16(a * cosine - b * sine, b * cosine + a * sine);
  }
};

// out = in / rms(in) * weight, LATENT values as pairs, rounded to BF16 after both steps as vLLM's kernel does.
__device__ __forceinline__ void norm_latent(uint32_t *out, const uint32_t *in, const bf16_t *weight, float eps) {
  int lane = threadIdx.x & 31;
  uint32_t v[LATENT / 64];
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < LATENT / 64; i++) {
    v[i] = load_fresh(in + i * 32 + lane);
    sum += low_of(v[i]) * low_of(v[i]) + high_of(v[i]) * high_of(v[i]);
  }
  float f = rsqrtf(warp_sum(sum) / LATENT + eps);
#pragma unroll
  for (int i = 0; i < LATENT / 64; i++) {
    uint32_t w = ((const uint32_t *)weight)[i * 32 + lane], n = pack_bf16(f * low_of(v[i]), f * high_of(v[i]));
    out[i * 32 + lane] = pack_bf16(low_of(n) * low_of(w), high_of(n) * high_of(w));
  }
}

// Sigmoid of a row of the gate's weight times x, BF16 [HIDDEN] each; the weight is loaded ahead.
struct Gate {
  uint4 weight[HIDDEN / 256], x[HIDDEN / 256];
  __device__ __forceinline__ void load_weight(const bf16_t *row) {
#pragma unroll
    for (int i = 0; i < HIDDEN / 256; i++) weight[i] = *((const uint4 *)row + i * 32 + (threadIdx.x & 31));
  }
  __device__ __forceinline__ void load(const bf16_t *row) {
#pragma unroll
    for (int i = 0; i < HIDDEN / 256; i++) x[i] = load_fresh((const uint4 *)row + i * 32 + (threadIdx.x & 31));
  }
  __device__ __forceinline__ float value() const {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < HIDDEN / 256; i++)
#pragma unroll
      for (int j = 0; j < 4; j++)
        sum += low_of(word_of(x[i], j)) * low_of(word_of(weight[i], j)) + high_of(word_of(x[i], j)) * high_of(word_of(weight[i], j));
    return sigmoid(warp_sum(sum));
  }
};
