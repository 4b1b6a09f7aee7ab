// SPDX-License-Identifier: Apache-2.0
// KDA between its two projections, for decode and verification of several sequences, in one launch: short convolutions and SiLU of
// q, k and v, their state; l2-norms; decay gate; beta; the delta-rule recurrence over a sequence's tokens, the state after each of
// them; gated RMSNorm. What does not depend on the producer (state, convolution history, weights) is read before waiting for it.
// Compile-time: see kda_state.cuh, and USE_PDL.
#include "kda_state.cuh"

#define B_WORDS ((HIDDEN / 2 + THREADS - 1) / THREADS)

extern "C" __global__ void __launch_bounds__(THREADS)
    kda_step(const bf16_t *__restrict__ projected, const bf16_t *__restrict__ normed, const bf16_t *__restrict__ b_weight,
             const float *__restrict__ q_conv, const float *__restrict__ k_conv, const float *__restrict__ v_conv,
             const float *__restrict__ a_log, const float *__restrict__ dt_bias, const bf16_t *__restrict__ o_norm, bf16_t *conv_at,
             float *states, const int *__restrict__ slots, const int *__restrict__ query_start, const int *__restrict__ accepted,
             bf16_t *__restrict__ out, long long conv_slot, long long conv_channel, long long conv_token, long long state_slot, int slots_stride,
             float lower_bound, float eps) {
  __shared__ StepShared s;
  int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  int head = blockIdx.x / SPLIT, part = blockIdx.x % SPLIT, sequence = blockIdx.y;
  let_consumer_start();
  const int *mine = slots + (size_t)sequence * slots_stride;
  int first = query_start ? query_start[sequence] : sequence, count = query_start ? query_start[sequence + 1] - first : 1;
  int offset = accepted ? max(accepted[sequence] - 1, 0) : 0, from = mine[offset], conv_from = mine[0];
  count = min(count, TOKENS);
  if (from <= 0 || count <= 0) {  // a padded sequence; the same for the whole cluster
    wait_for_producer();
    for (int n = warp; n < count; n += WARPS) out[(size_t)(first + n) * (HEADS * DIM) + head * DIM + part * ROWS + lane] = bf16_t{0};
    return;
  }
  expect_pushed(&s.norms_in, SPLIT * count * (int)sizeof(float));

  StateRow state;
  state.load(states, state_slot, from, head, part);
  // Threads 0 to 127 convolve q, the others k; the first 32 v too.
  ConvState conv = {conv_at, conv_slot, conv_channel, conv_token};
  bool is_k = tid >= DIM;
  int c = tid % DIM, qk_channel = head * DIM + c, v_channel = head * DIM + part * ROWS + lane;
  Channel qk, value;
  qk.load(conv, is_k ? k_conv : q_conv, qk_channel, (is_k ? HEADS * DIM : 0) + qk_channel, conv_from, offset);
  if (warp == 0) value.load(conv, v_conv, v_channel, 2 * HEADS * DIM + v_channel, conv_from, offset);
  float rate = __expf(a_log[head]), bias = dt_bias[qk_channel];
  uint32_t b[B_WORDS];
#pragma unroll
  for (int i = 0; i < B_WORDS; i++)
    b[i] = tid + i * THREADS < HIDDEN / 2 ? *((const uint32_t *)(b_weight + (size_t)head * HIDDEN) + tid + i * THREADS) : 0u;
  float norm_weight = to_float(o_norm[part * ROWS + lane]);
  if (tid < TOKENS) s.slots[tid] = mine[query_start && tid < count ? tid : 0];

  wait_for_producer();
  const bf16_t *x = projected + (size_t)first * PROJECTED;
  float xs[TOKENS], vs[TOKENS], f[TOKENS];
#pragma unroll
  for (int n = 0; n < TOKENS; n++) {
    const bf16_t *token = x + (size_t)(n < count ? n : 0) * PROJECTED;
    xs[n] = load_fresh(token + (is_k ? HEADS * DIM : 0) + qk_channel);
    if (warp == 0) vs[n] = load_fresh(token + 2 * HEADS * DIM + v_channel);
    if (is_k) f[n] = load_fresh(token + 3 * HEADS * DIM + qk_channel);
  }
  float gate = warp < count ? load_fresh(x + (size_t)warp * PROJECTED + 4 * HEADS * DIM + v_channel) : 0.f;
  // beta's logit, for every CTA of the head by itself.
  float logit[TOKENS] = {};
  uint32_t words[B_WORDS][TOKENS];
#pragma unroll
  for (int i = 0; i < B_WORDS; i++)
#pragma unroll
    for (int n = 0; n < TOKENS; n++)
      words[i][n] = load_fresh((const uint32_t *)(normed + (size_t)(first + (n < count ? n : 0)) * HIDDEN) + min(tid + i * THREADS, HIDDEN / 2 - 1));
#pragma unroll
  for (int i = 0; i < B_WORDS; i++)  // b is zero from HIDDEN / 2 on
#pragma unroll
    for (int n = 0; n < TOKENS; n++) logit[n] += low_of(words[i][n]) * low_of(b[i]) + high_of(words[i][n]) * high_of(b[i]);
#pragma unroll
  for (int n = 0; n < TOKENS; n++) {
    float sum = warp_sum(logit[n]);
    if (lane == 0) s.beta[n][warp] = sum;
  }
  // Places after the last token hold copies of the first, which nobody uses.
  float ys[TOKENS];
  qk.run(ys, xs);
#pragma unroll
  for (int n = 0; n < TOKENS; n++) {
    (is_k ? s.k : s.q)[n][c] = ys[n];
    float squares = warp_sum(ys[n] * ys[n]);
    if (lane == 0) s.squares[n][is_k][warp % 4] = squares;
    if (is_k) s.decay[n][c] = decay_of(f[n], bias, rate, lower_bound);
  }
  if (warp == 0) {
    value.run(ys, vs);
#pragma unroll
    for (int n = 0; n < TOKENS; n++) s.v[n][lane] = ys[n];
  }
  __syncthreads();
  state.run(s, states, state_slot, count);
  __syncthreads();
  write_normed(s, out + (size_t)first * (HEADS * DIM) + head * DIM + part * ROWS, gate, norm_weight, eps, part, count);
  // All CTAs have read the history by now.
  if (part == 0) qk.save(conv, xs, count);
  if (warp == 0) value.save(conv, vs, count);
}
