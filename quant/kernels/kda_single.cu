// SPDX-License-Identifier: Apache-2.0
// KDA of a single sequence from the residual stream to what its output projection multiplies, in one launch: RMSNorm, the projections
// q, k, v, f and g (block-FP8) and all that kda_step.cu does. A CTA computes the 32 rows of each projection that belong to its rows of
// the state: ten tiles of 16 rows, a warp each, streamed through a ring in shared memory; q, k and decay are then told to the other
// three CTAs of the head. One CTA has a whole SM, and its ring is filled before it waits for its producer.
// Compile-time: see kda_state.cuh, and STAGES, SHARED_BYTES, USE_PDL.
#define BETA_PARTS 5
#include "fp8_tile.cuh"
#include "kda_state.cuh"

#define WARPS 10
#define THREADS (WARPS * 32)
#define BLOCKS (HIDDEN / 128)
#define X_STRIDE (HIDDEN + 8)
#define WIDE (HEADS * DIM)
constexpr int QUADS = HIDDEN / 4, B_QUADS = (QUADS + 159) / 160;  // of x, and of a lane of the five warps that compute beta

struct Shared {
  uint4 ring[WARPS][STAGES][128];
  bf16_t x[TOKENS * X_STRIDE];
  StepShared step;
  float projected[TOKENS][5][ROWS];  // rounded to BF16, as the convolution's history is
  float parts[TOKENS * BLOCKS];
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "kda_single.py: shared memory size");
static_assert(TOKENS <= 8, "eight columns");

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    kda_single(const bf16_t *x, const bf16_t *__restrict__ norm_weight, const uint8_t *__restrict__ w_qkv, const uint8_t *__restrict__ w_f,
               const uint8_t *__restrict__ w_g, const float *__restrict__ s_qkv, const float *__restrict__ s_f,
               const float *__restrict__ s_g, const bf16_t *__restrict__ b_weight, const float *__restrict__ q_conv,
               const float *__restrict__ k_conv, const float *__restrict__ v_conv, const float *__restrict__ a_log,
               const float *__restrict__ dt_bias, const bf16_t *__restrict__ o_norm, bf16_t *conv_at, float *states,
               const int *__restrict__ slots, const int *__restrict__ query_start, const int *__restrict__ accepted,
               bf16_t *__restrict__ out, long long conv_slot, long long conv_channel, long long conv_token, long long state_slot,
               int tokens, float lower_bound, float norm_eps, float eps) {
  extern __shared__ uint4 dynamic[];
  Shared &s = *(Shared *)dynamic;
  int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, g = lane >> 2, t = lane & 3;
  int head = blockIdx.x / SPLIT, part = blockIdx.x % SPLIT, channel = head * DIM + part * ROWS + lane;
  let_consumer_start();

  // This warp's tile: rows 16 (warp % 2) of the CTA's 32 of projection warp / 2.
  int matrix = warp / 2, first_row = head * DIM + part * ROWS + warp % 2 * 16;
  if (matrix < 3) first_row += matrix * WIDE;
  const uint8_t *from = (matrix < 3 ? w_qkv : matrix == 3 ? w_f : w_g) + (size_t)first_row * HIDDEN;
  const float *scales = (matrix < 3 ? s_qkv : matrix == 3 ? s_f : s_g) + first_row / 128 * BLOCKS;
  auto fetch = [&](int block) {
    if (block < BLOCKS) fetch_tile(s.ring[warp][block % STAGES], from, HIDDEN, block, 15);
    commit_copies();
  };
#pragma unroll
  for (int i = 0; i < STAGES; i++) fetch(i);

  int count = query_start ? min(query_start[1], TOKENS) : 1;
  int offset = accepted ? max(accepted[0] - 1, 0) : 0, slot = slots[offset], conv_from = slots[0];
  if (slot <= 0 || count <= 0) {  // a padded sequence; the same for the whole cluster
    wait_copies<0>();
    wait_for_producer();
    for (int n = warp; n < tokens; n += WARPS) out[(size_t)n * WIDE + channel] = bf16_t{0};
    return;
  }
  cluster_arrive();  // waited for before the first remote store: the others have started
  StateRow state;
  if (tid < STATE_THREADS) state.load(states, state_slot, slot, head, part);
  // Warps 0, 1 and 2 convolve q, k and v; 3 has the decay, the last five beta.
  ConvState conv = {conv_at, conv_slot, conv_channel, conv_token};
  Channel mine;
  if (warp < 3) mine.load(conv, warp == 0 ? q_conv : warp == 1 ? k_conv : v_conv, channel, warp * WIDE + channel, conv_from, offset);
  float rate = __expf(a_log[head]), bias = dt_bias[channel], o_weight = to_float(o_norm[part * ROWS + lane]);
  uint2 b[B_QUADS];
#pragma unroll
  for (int i = 0; i < B_QUADS; i++) {
    int quad = (warp - 5) * 32 + lane + i * 160;
    b[i] = warp >= 5 && quad < QUADS ? *((const uint2 *)(b_weight + (size_t)head * HIDDEN) + quad) : make_uint2(0u, 0u);
  }
  if (tid < TOKENS) s.step.slots[tid] = slots[query_start && tid < count ? tid : 0];
  {
    typedef Rows<TOKENS, HIDDEN, THREADS> XRows;
    XRows rows, weight;
    weight.load_weight(norm_weight);
    wait_for_producer();
    rows.load(x, tokens);
    rows.normalize(weight, s.parts, norm_eps);
#pragma unroll
    for (int r = 0; r < XRows::ROUNDS; r++) {
      int i = XRows::quad(r);
      if (i >= TOKENS * XRows::QUADS) break;
      *(uint2 *)(s.x + i / XRows::QUADS * X_STRIDE + i % XRows::QUADS * 4) = in_fp8_order(rows.v[r]);
    }
  }
  __syncthreads();

  float acc[4] = {};
#pragma unroll 1
  for (int block = 0; block < BLOCKS; block++) {
    wait_copies<STAGES - 1>();
    float sum[1][4] = {};
    multiply_tile<1>(sum, s.ring[warp][block % STAGES], s.x, X_STRIDE, block, tokens);
    float scale = __ldg(scales + block);
#pragma unroll
    for (int i = 0; i < 4; i++) acc[i] += scale * sum[0][i];
    __syncwarp();
    fetch(block + STAGES);
  }
#pragma unroll
  for (int i = 0; i < 4; i++) {
    int token = 2 * t + (i & 1);
    if (token < TOKENS) s.projected[token][matrix][warp % 2 * 16 + g + (i >> 1) * 8] = to_float(to_bf16(acc[i]));
  }
  __syncthreads();

  float xs[TOKENS], ys[TOKENS];
  if (warp < 4) {
#pragma unroll
    for (int n = 0; n < TOKENS; n++) xs[n] = s.projected[n < count ? n : 0][warp][lane];
  }
  if (warp < 3) mine.run(ys, xs);
  if (warp >= 5) {
#pragma unroll
    for (int n = 0; n < TOKENS; n++) {
      float sum = 0.f;
#pragma unroll
      for (int i = 0; i < B_QUADS; i++) {
        int quad = min((warp - 5) * 32 + lane + i * 160, QUADS - 1);
        uint2 v = *(const uint2 *)(s.x + n * X_STRIDE + quad * 4), w = in_fp8_order(b[i]);
        sum += low_of(v.x) * low_of(w.x) + high_of(v.x) * high_of(w.x) + low_of(v.y) * low_of(w.y) + high_of(v.y) * high_of(w.y);
      }
      sum = warp_sum(sum);
      if (lane == 0) s.step.beta[n][warp - 5] = sum;
    }
  }
  cluster_wait();
  int at = part * ROWS + lane;
#pragma unroll
  for (int n = 0; n < TOKENS; n++) {
    if (warp == 2) {
      s.step.v[n][lane] = ys[n];
    } else if (warp < 4) {
      float value = warp == 3 ? decay_of(xs[n], bias, rate, lower_bound) : ys[n];
      float *to = (warp == 0 ? s.step.q : warp == 1 ? s.step.k : s.step.decay)[n] + at;
#pragma unroll
      for (int cta = 0; cta < SPLIT; cta++) store_remote(to, cta, value);
      float squares = warp_sum(value * value);
      if (warp < 2 && lane < SPLIT) store_remote(&s.step.squares[n][warp][part], lane, squares);
    }
  }
  cluster_arrive();
  if (warp < 3) mine.save(conv, xs, count);
  cluster_wait();
  if (tid < STATE_THREADS) state.run(s.step, states, state_slot, count);
  __syncthreads();
  write_normed<WARPS>(
      s.step, out + head * DIM + part * ROWS, [&](int n) { return s.projected[n][4][lane]; }, o_weight, eps, part, count);
}
