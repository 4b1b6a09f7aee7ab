// SPDX-License-Identifier: Apache-2.0
// Between an MLA layer's first projection and mla_attend.cu, in one launch: queries brought into the latent space (each head's
// NOPE values times its key projection), rotary embedding, the norm of the latent, the new rows of the cache, the output gate.
//
// A CTA does 128 columns of a head's latent query, for all tokens, and, by its place among the head's CTAs, one of the small jobs.
// Its weights are on their way to shared memory before it waits for the projection.
// Compile-time: HEADS, HIDDEN, NOPE, ROPE, LATENT, LATENT_CONTIGUOUS (how key_weight lies), TOKENS (at most 8), USE_PDL, SHARED_BYTES.
#include "mla_token.cuh"

#define WARPS 8
#define THREADS (WARPS * 32)
#include "mla_product.cuh"

#define PARTS (LATENT / 128)  // CTAs of a head
#define QUERY (NOPE + ROPE)
#define WIDTH (LATENT + ROPE)  // of a latent query, and of a row of the cache
#define PROJECTED (HEADS * QUERY + WIDTH)
typedef Product<NOPE, 128, !LATENT_CONTIGUOUS> Shared;
static_assert(sizeof(Shared) <= SHARED_BYTES, "mla_attention.py: shared memory size");
static_assert(NOPE % 64 == 0 && TOKENS <= WARPS, "mla_attention.py: shape");

// key_weight: BF16 [HEADS][NOPE][LATENT], or [HEADS][LATENT][NOPE] unless LATENT_CONTIGUOUS, with strides. query: BF16
// [tokens][HEADS][WIDTH]. Row `slots[token]` of the cache, blocks of `block_size` rows of WIDTH values, receives latent and key;
// negative: none.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    mla_absorb(const bf16_t *__restrict__ projected, const bf16_t *__restrict__ normed, const long long *__restrict__ positions,
               const bf16_t *__restrict__ cos_sin, const bf16_t *__restrict__ latent_norm, const bf16_t *__restrict__ gate_weight,
               const bf16_t *__restrict__ key_weight, const long long *__restrict__ slots, bf16_t *__restrict__ query,
               bf16_t *__restrict__ cache, float *__restrict__ gate, long long head_stride, long long row_stride, long long block_stride,
               int block_size, int tokens, float eps) {
  extern __shared__ uint4 dynamic[];
  Shared &s = *(Shared *)dynamic;
  int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, head = blockIdx.x / PARTS, part = blockIdx.x % PARTS;
  let_consumer_start();
  s.fetch(key_weight + head * head_stride + part * 128 * (LATENT_CONTIGUOUS ? 1 : row_stride), row_stride);
  bool turns = part == 0 && warp < tokens, gates = part == 1 % PARTS && warp < tokens;
  Turn turn(cos_sin, positions[min(warp, tokens - 1)]);
  Gate gate_of;
  if (gates) gate_of.load_weight(gate_weight + (size_t)head * HIDDEN);
  wait_for_producer();

  const uint32_t *row = (const uint32_t *)(projected + (size_t)min(warp, tokens - 1) * PROJECTED);
  uint32_t mine = turns ? load_fresh(row + (head * QUERY + NOPE) / 2 + lane) : 0u;
  if (gates) gate_of.load(normed + (size_t)warp * HIDDEN);
#pragma unroll
  for (int i = tid; i < TOKENS * NOPE / 2; i += THREADS) {
    int token = i / (NOPE / 2), pair = i % (NOPE / 2);
    if (token >= tokens) break;
    uint32_t v = load_fresh((const uint32_t *)(projected + (size_t)token * PROJECTED + head * QUERY) + pair);
    *(float2 *)&s.x[token][pair * 2] = make_float2(low_of(v), high_of(v));
  }
  if (turns) ((uint32_t *)(query + ((size_t)warp * HEADS + head) * WIDTH + LATENT))[lane] = turn.of(mine);
  if (gates) {
    float value = gate_of.value();
    if (lane == 0) gate[warp * HEADS + head] = value;
  }
  // The cache's rows, a token for each head's CTA: two warps.
  if (part == 2 % PARTS && warp < 2)
#pragma unroll 1
    for (int token = head; token < tokens; token += HEADS) {
      long long slot = slots[token];
      if (slot < 0) continue;
      const uint32_t *in = (const uint32_t *)(projected + (size_t)token * PROJECTED + HEADS * QUERY);
      uint32_t *out = (uint32_t *)(cache + slot / block_size * block_stride + slot % block_size * WIDTH);
      if (warp == 0) norm_latent(out, in, latent_norm, eps);
      if (warp == 1) out[LATENT / 2 + lane] = Turn(cos_sin, positions[token]).of(load_fresh(in + LATENT / 2 + lane));
    }
  wait_copies<0>();
  __syncthreads();

  s.multiply();
  __syncthreads();
#pragma unroll 1
  for (int i = tid; i < tokens * 64; i += THREADS)
    ((uint32_t *)(query + ((size_t)(i / 64) * HEADS + head) * WIDTH + part * 128))[i % 64] = s.pair_of(i / 64, i % 64);
}
