// SPDX-License-Identifier: Apache-2.0
// What lies between an MLA layer's first projection and its attention, in one launch: RMSNorm of the latent, rotary embedding of
// queries and key (neighbouring pairs), the head-wise output gate. CTA 0 of a token does the latent and the key, the others a head
// per warp. Compile-time: HEADS, HIDDEN, NOPE, ROPE, LATENT (dimensions of a head's query and of the cache), USE_PDL.
#include "norm.cuh"

#define WARPS 4
#define QUERY (NOPE + ROPE)
#define PROJECTED (HEADS * QUERY + LATENT + ROPE)  // queries, latent, key of one token
static_assert(LATENT % 128 == 0 && NOPE % 64 == 0 && ROPE == 64 && HEADS % WARPS == 0 && HIDDEN % 256 == 0, "mla_prepare.py: shape");

// A pair of values by a cosine and a sine.
__device__ __forceinline__ uint32_t turned(uint32_t pair, float c, float s) {
  float a = low_of(pair), b = high_of(pair);
  return pack_bf16(a * c - b * s, b * c + a * s);
}

// cos_sin: BF16 [positions][cosines, sines]. gate: FP32 [tokens][HEADS], the sigmoid of gate_weight (BF16 [HEADS][HIDDEN]) times x.
extern "C" __global__ void __launch_bounds__(WARPS * 32)
    mla_prepare(const bf16_t *__restrict__ projected, const bf16_t *__restrict__ normed, const long long *__restrict__ positions,
                const bf16_t *__restrict__ cos_sin, const bf16_t *__restrict__ latent_norm, const bf16_t *__restrict__ gate_weight,
                bf16_t *__restrict__ query, bf16_t *__restrict__ latent, bf16_t *__restrict__ key, float *__restrict__ gate, float eps) {
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, token = blockIdx.y;
  let_consumer_start();
  const bf16_t *turn = cos_sin + (size_t)positions[token] * ROPE, *from = projected + (size_t)token * PROJECTED;
  float cosine = to_float(turn[lane]), sine = to_float(turn[ROPE / 2 + lane]);  // lane i turns pair i of the 32
  if (blockIdx.x == 0) {
    wait_for_producer();
    const uint32_t *in = (const uint32_t *)(from + HEADS * QUERY);
    if (warp == 0) {
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
        uint32_t w = ((const uint32_t *)latent_norm)[i * 32 + lane], n = pack_bf16(f * low_of(v[i]), f * high_of(v[i]));
        ((uint32_t *)(latent + (size_t)token * LATENT))[i * 32 + lane] = pack_bf16(low_of(n) * low_of(w), high_of(n) * high_of(w));
      }
    } else if (warp == 1) {
      ((uint32_t *)(key + (size_t)token * ROPE))[lane] = turned(load_fresh(in + LATENT / 2 + lane), cosine, sine);
    }
    return;
  }
  int head = (blockIdx.x - 1) * WARPS + warp;
  uint4 w[HIDDEN / 256];
#pragma unroll
  for (int i = 0; i < HIDDEN / 256; i++) w[i] = *((const uint4 *)(gate_weight + (size_t)head * HIDDEN) + i * 32 + lane);
  wait_for_producer();
  const uint32_t *in = (const uint32_t *)(from + head * QUERY);
  uint32_t *out = (uint32_t *)(query + ((size_t)token * HEADS + head) * QUERY);
  // All loads first: each takes a trip to L2.
  uint32_t q[QUERY / 64];
  uint4 x[HIDDEN / 256];
#pragma unroll
  for (int i = 0; i < QUERY / 64; i++) q[i] = load_fresh(in + i * 32 + lane);
#pragma unroll
  for (int i = 0; i < HIDDEN / 256; i++) x[i] = load_fresh((const uint4 *)(normed + (size_t)token * HIDDEN) + i * 32 + lane);
#pragma unroll
  for (int i = 0; i < NOPE / 64; i++) out[i * 32 + lane] = q[i];
  out[NOPE / 2 + lane] = turned(q[NOPE / 64], cosine, sine);
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < HIDDEN / 256; i++)
#pragma unroll
    for (int j = 0; j < 4; j++)
      sum += low_of(word_of(x[i], j)) * low_of(word_of(w[i], j)) + high_of(word_of(x[i], j)) * high_of(word_of(w[i], j));
  sum = warp_sum(sum);
  if (lane == 0) gate[token * HEADS + head] = sigmoid(sum);
}
