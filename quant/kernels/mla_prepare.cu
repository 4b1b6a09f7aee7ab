// SPDX-License-Identifier: Apache-2.0
// What lies between an MLA layer's first projection and vLLM's attention, in one launch: RMSNorm of the latent, rotary embedding of
// queries and key, the head-wise output gate. CTA 0 of a token does the latent and the key, the others a head per warp.
// Compile-time: HEADS, HIDDEN, NOPE, ROPE, LATENT (dimensions of a head's query and of the cache), USE_PDL.
#include "mla_token.cuh"

#define WARPS 4
#define QUERY (NOPE + ROPE)
#define PROJECTED (HEADS * QUERY + LATENT + ROPE)  // queries, latent, key of one token
static_assert(NOPE % 64 == 0 && HEADS % WARPS == 0, "mla_prepare.py: shape");

// gate: FP32 [tokens][HEADS], the sigmoid of gate_weight (BF16 [HEADS][HIDDEN]) times x.
extern "C" __global__ void __launch_bounds__(WARPS * 32)
    mla_prepare(const bf16_t *__restrict__ projected, const bf16_t *__restrict__ normed, const long long *__restrict__ positions,
                const bf16_t *__restrict__ cos_sin, const bf16_t *__restrict__ latent_norm, const bf16_t *__restrict__ gate_weight,
                bf16_t *__restrict__ query, bf16_t *__restrict__ latent, bf16_t *__restrict__ key, float *__restrict__ gate, float eps) {
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, token = blockIdx.y;
  let_consumer_start();
  const bf16_t *from = projected + (size_t)token * PROJECTED;
  Turn turn(cos_sin, positions[token]);
  if (blockIdx.x == 0) {
    wait_for_producer();
    const uint32_t *in = (const uint32_t *)(from + HEADS * QUERY);
    if (warp == 0) norm_latent((uint32_t *)(latent + (size_t)token * LATENT), in, latent_norm, eps);
    if (warp == 1) ((uint32_t *)(key + (size_t)token * ROPE))[lane] = turn.of(load_fresh(in + LATENT / 2 + lane));
    return;
  }
  int head = (blockIdx.x - 1) * WARPS + warp;
  Gate gate_of;
  gate_of.load_weight(gate_weight + (size_t)head * HIDDEN);
  wait_for_producer();
  const uint32_t *in = (const uint32_t *)(from + head * QUERY);
  uint32_t *out = (uint32_t *)(query + ((size_t)token * HEADS + head) * QUERY);
  // All loads first: each takes a trip to L2.
  uint32_t q[QUERY / 64];
#pragma unroll
  for (int i = 0; i < QUERY / 64; i++) q[i] = load_fresh(in + i * 32 + lane);
  gate_of.load(normed + (size_t)token * HIDDEN);
#pragma unroll
  for (int i = 0; i < NOPE / 64; i++) out[i * 32 + lane] = q[i];
  out[NOPE / 2 + lane] = turn.of(q[NOPE / 64]);
  float value = gate_of.value();
  if (lane == 0) gate[token * HEADS + head] = value;
}
