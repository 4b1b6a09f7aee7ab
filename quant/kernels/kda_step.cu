// SPDX-License-Identifier: Apache-2.0
// KDA between its two projections, for decode and verification, in one launch: short convolutions and SiLU of q, k and v, their
// state; l2-norms; decay gate; beta; the delta-rule recurrence over a sequence's tokens, the state after each of them; gated RMSNorm.
//
// A cluster of four CTAs does one head of one sequence, 32 rows of the 128 x 128 state each; only the norm's sum of squares
// crosses CTAs. A thread holds 16 numbers of one state row: lane l of 8 has columns 4 (l + 8 j) + {0..3}. What does not depend on
// the producer (state, convolution history, weights) is read before waiting for it.
//
// State slots: token n of a sequence leaves its state in slots[n]; the state before the first token is in slots[accepted - 1], and
// the convolution history `accepted - 1` entries into that of slots[0]. Without verification both are slot 0 of the list.
// Compile-time: HEADS, HIDDEN, TOKENS (of one sequence, at most 8), SAFE_GATE, USE_PDL.
#include "norm.cuh"

#define DIM 128       // of a head
#define SPLIT 4       // CTAs a head
#define ROWS 32       // state rows of a CTA
#define THREADS 256
#define WARPS 8
#define PROJECTED (5 * HEADS * DIM)  // q, k, v, f, g of one token
#define B_WORDS ((HIDDEN / 2 + THREADS - 1) / THREADS)

struct ConvState {
  bf16_t *at;
  long long slot, channel, token;  // strides in elements
};

struct Shared {
  float q[TOKENS][DIM], k[TOKENS][DIM], decay[TOKENS][DIM], v[TOKENS][ROWS];
  float squares[TOKENS][2][4];  // of q and k, by warp
  float beta[TOKENS][WARPS];
  float o[TOKENS][ROWS];
  float norm[SPLIT][TOKENS];    // sums of squares of o, pushed by each CTA of the cluster
  int slots[TOKENS];
};

__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
// Stores into the shared memory of another CTA of the cluster.
__device__ __forceinline__ void store_remote(float *local, int cta, float value) {
  uint32_t at;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"((uint32_t)__cvta_generic_to_shared(local)), "r"(cta));
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(at), "f"(value) : "memory");
}

// One channel's convolution: history and weights first, then the tokens.
struct Channel {
  float4 weight;
  float old[3];
  bf16_t *state;

  __device__ __forceinline__ void load(const ConvState &conv, const float *weights, int channel_of_weights, int channel, int slot, int offset) {
    weight = __ldg((const float4 *)weights + channel_of_weights);
    state = conv.at + slot * conv.slot + channel * conv.channel;
#pragma unroll
    for (int i = 0; i < 3; i++) old[i] = to_float(state[(offset + i) * conv.token]);
  }
  // x[n] <- silu(conv(x)).
  __device__ __forceinline__ void run(float x[TOKENS]) {
    float a = old[0], b = old[1], c = old[2];
#pragma unroll
    for (int n = 0; n < TOKENS; n++) {
      float now = x[n], y = weight.x * a + weight.y * b + weight.z * c + weight.w * now;
      x[n] = y * sigmoid(y);
      a = b, b = c, c = now;
    }
  }
  // The two newest of the history, then the tokens: what `accepted - 1` entries on is the history of the next step.
  __device__ __forceinline__ void save(const ConvState &conv, const bf16_t *x, int count) const {
    state[0] = to_bf16(old[1]), state[conv.token] = to_bf16(old[2]);
#pragma unroll
    for (int n = 0; n < TOKENS; n++)
      if (n < count) state[(n + 2) * conv.token] = to_bf16(load_fresh(x + (size_t)n * PROJECTED));
  }
};

extern "C" __global__ void __launch_bounds__(THREADS)
    kda_step(const bf16_t *__restrict__ projected, const bf16_t *__restrict__ normed, const bf16_t *__restrict__ b_weight,
             const float *__restrict__ q_conv, const float *__restrict__ k_conv, const float *__restrict__ v_conv,
             const float *__restrict__ a_log, const float *__restrict__ dt_bias, const bf16_t *__restrict__ o_norm, bf16_t *conv_at,
             float *states, const int *__restrict__ slots, const int *__restrict__ query_start, const int *__restrict__ accepted,
             bf16_t *__restrict__ out, const void *next0, const void *next1, const void *next2, int next0_bytes, int next1_bytes,
             int next2_bytes, long long conv_slot, long long conv_channel, long long conv_token, long long state_slot, int slots_stride,
             float lower_bound, float eps) {
  __shared__ Shared s;
  int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  int head = blockIdx.x / SPLIT, part = blockIdx.x % SPLIT, sequence = blockIdx.y;
  let_consumer_start();
  if (warp == WARPS - 1) {  // this launch leaves memory nearly idle
    int cta = blockIdx.y * gridDim.x + blockIdx.x, ctas = gridDim.x * gridDim.y;
    prefetch_l2(next0, next0_bytes, cta, ctas), prefetch_l2(next1, next1_bytes, cta, ctas), prefetch_l2(next2, next2_bytes, cta, ctas);
  }
  const int *mine = slots + (size_t)sequence * slots_stride;
  int first = query_start ? query_start[sequence] : sequence, count = query_start ? query_start[sequence + 1] - first : 1;
  int offset = accepted ? max(accepted[sequence] - 1, 0) : 0, from = mine[offset], conv_from = mine[0];
  count = min(count, TOKENS);
  if (from <= 0 || count <= 0) {  // a padded sequence; the same for the whole cluster
    wait_for_producer();
    for (int n = warp; n < count; n += WARPS) out[(size_t)(first + n) * (HEADS * DIM) + head * DIM + part * ROWS + lane] = bf16_t{0};
    return;
  }
  cluster_arrive();  // waited for before the first remote store: the others have started

  // Row `row` of the state, columns 4 (l + 8 j).
  int l = lane % 8, row = warp * 4 + lane / 8;
  size_t at = ((size_t)head * DIM + part * ROWS + row) * DIM + l * 4;
  float4 h[4];
#pragma unroll
  for (int j = 0; j < 4; j++) h[j] = *(const float4 *)(states + (size_t)from * state_slot + at + j * 32);
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
  // beta's logit, for every CTA of the head by itself.
  float logit[TOKENS] = {};
#pragma unroll
  for (int i = 0; i < B_WORDS; i++) {
    if (tid + i * THREADS >= HIDDEN / 2) break;
    uint32_t v[TOKENS];
#pragma unroll
    for (int n = 0; n < TOKENS; n++)
      v[n] = load_fresh((const uint32_t *)(normed + (size_t)(first + (n < count ? n : 0)) * HIDDEN) + tid + i * THREADS);
#pragma unroll
    for (int n = 0; n < TOKENS; n++) logit[n] += low_of(v[n]) * low_of(b[i]) + high_of(v[n]) * high_of(b[i]);
  }
#pragma unroll
  for (int n = 0; n < TOKENS; n++) {
    float sum = warp_sum(logit[n]);
    if (lane == 0) s.beta[n][warp] = sum;
  }
  // Places after the last token hold copies of the first, which nobody uses.
  qk.run(xs);
  if (warp == 0) value.run(vs);
#pragma unroll
  for (int n = 0; n < TOKENS; n++) {
    (is_k ? s.k : s.q)[n][c] = xs[n];
    float squares = warp_sum(xs[n] * xs[n]);
    if (lane == 0) s.squares[n][is_k][warp % 4] = squares;
    if (warp == 0) s.v[n][lane] = vs[n];
    if (is_k) {
      float g = f[n] + bias;
#if SAFE_GATE
      g = lower_bound * sigmoid(rate * g);
#else
      g = -rate * (g > 20.f ? g : __logf(1.f + __expf(g)));
#endif
      s.decay[n][c] = __expf(g);
    }
  }
  __syncthreads();

#pragma unroll 1
  for (int n = 0; n < count; n++) {
    const float *q2 = s.squares[n][0], *k2 = s.squares[n][1], *logits = s.beta[n];
    float q_norm = rsqrtf(q2[0] + q2[1] + q2[2] + q2[3] + 1e-6f) * 0.08838834764831845f;  // 128 ** -0.5
    float k_norm = rsqrtf(k2[0] + k2[1] + k2[2] + k2[3] + 1e-6f);
    float beta = sigmoid(((logits[0] + logits[1]) + (logits[2] + logits[3])) + ((logits[4] + logits[5]) + (logits[6] + logits[7])));
    float4 k[4];
    float dot = 0.f;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      float4 d = *(const float4 *)&s.decay[n][l * 4 + j * 32];
      k[j] = *(const float4 *)&s.k[n][l * 4 + j * 32];
      h[j].x *= d.x, h[j].y *= d.y, h[j].z *= d.z, h[j].w *= d.w;
      dot += h[j].x * k[j].x + h[j].y * k[j].y + h[j].z * k[j].z + h[j].w * k[j].w;
    }
#pragma unroll
    for (int step = 1; step < 8; step <<= 1) dot += __shfl_xor_sync(~0u, dot, step);
    float update = beta * (s.v[n][row] - dot * k_norm) * k_norm, o = 0.f;
    int to = s.slots[n];
    float *into = states + (size_t)to * state_slot + at;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      float4 q = *(const float4 *)&s.q[n][l * 4 + j * 32];
      h[j].x += update * k[j].x, h[j].y += update * k[j].y, h[j].z += update * k[j].z, h[j].w += update * k[j].w;
      o += h[j].x * q.x + h[j].y * q.y + h[j].z * q.z + h[j].w * q.w;
      if (to > 0) *(float4 *)(into + j * 32) = h[j];
    }
#pragma unroll
    for (int step = 1; step < 8; step <<= 1) o += __shfl_xor_sync(~0u, o, step);
    if (l == 0) s.o[n][row] = o * q_norm;
  }
  __syncthreads();

  // The norm runs over the head's 128 numbers: every CTA tells the others its part.
  cluster_wait();
#pragma unroll 1
  for (int n = warp; n < count; n += WARPS) {
    float sum = warp_sum(s.o[n][lane] * s.o[n][lane]);
    if (lane < SPLIT) store_remote(&s.norm[part][n], lane, sum);
  }
  cluster_arrive();
  cluster_wait();
#pragma unroll 1
  for (int n = warp; n < count; n += WARPS) {
    float f = rsqrtf(((s.norm[0][n] + s.norm[1][n]) + (s.norm[2][n] + s.norm[3][n])) / DIM + eps);
    float gate = load_fresh(x + (size_t)n * PROJECTED + 4 * HEADS * DIM + v_channel);
    out[(size_t)(first + n) * (HEADS * DIM) + v_channel] = to_bf16(s.o[n][lane] * f * norm_weight * sigmoid(gate));
  }
  // Everybody has read the history by now.
  if (part == 0) qk.save(conv, x + (is_k ? HEADS * DIM : 0) + qk_channel, count);
  if (warp == 0) value.save(conv, x + 2 * HEADS * DIM + v_channel, count);
}
