// SPDX-License-Identifier: Apache-2.0
// The parts of kda_step.cu: a cluster of four CTAs does one head of one sequence, 32 rows of the 128 x 128 state each. A thread
// holds 16 numbers of one state row: lane l of 8 has columns 4 (l + 8 j) + {0..3}.
//
// State slots: token n of a sequence leaves its state in slots[n]; the state before the first token is in slots[accepted - 1], and
// the convolution history `accepted - 1` entries into that of slots[0]. Without verification both are slot 0 of the list.
// Compile-time: HEADS, HIDDEN, TOKENS (of one sequence, at most 8), SAFE_GATE.
#pragma once
#include "cluster.cuh"
#include "norm.cuh"

#define DIM 128       // of a head
#define SPLIT 4       // CTAs a head
#define ROWS 32       // state rows of a CTA
#define WARPS 8
#define THREADS (WARPS * 32)
#define PROJECTED (5 * HEADS * DIM)  // q, k, v, f, g of one token

struct ConvState {
  bf16_t *at;
  long long slot, channel, token;  // strides in elements
};

struct StepShared {
  float q[TOKENS][DIM], k[TOKENS][DIM], decay[TOKENS][DIM], v[TOKENS][ROWS];
  float squares[TOKENS][2][4];  // of q and k, in four parts
  float beta[TOKENS][WARPS];    // parts of its logit, one a warp
  float o[TOKENS][ROWS];
  float norm[SPLIT][TOKENS];    // sums of squares of o, pushed by each CTA of the cluster
  unsigned long long norms_in;  // completes when `norm` is whole
  int slots[TOKENS];
};
static_assert(TOKENS <= WARPS, "a warp norms one token");

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
  // y[n] = silu(conv(x)).
  __device__ __forceinline__ void run(float y[TOKENS], const float x[TOKENS]) const {
    float a = old[0], b = old[1], c = old[2];
#pragma unroll
    for (int n = 0; n < TOKENS; n++) {
      float sum = weight.x * a + weight.y * b + weight.z * c + weight.w * x[n];
      y[n] = sum * sigmoid(sum);
      a = b, b = c, c = x[n];
    }
  }
  // The two newest of the history, then the tokens: what `accepted - 1` entries on is the history of the next step.
  __device__ __forceinline__ void save(const ConvState &conv, const float x[TOKENS], int count) const {
    state[0] = to_bf16(old[1]), state[conv.token] = to_bf16(old[2]);
#pragma unroll
    for (int n = 0; n < TOKENS; n++)
      if (n < count) state[(n + 2) * conv.token] = to_bf16(x[n]);
  }
};

// Factor exp(g) of the state's columns, from the projection f of the layer.
__device__ __forceinline__ float decay_of(float f, float bias, float rate, float lower_bound) {
  float g = f + bias;
#if SAFE_GATE
  g = lower_bound * sigmoid(rate * g);
#else
  g = -rate * (g > 20.f ? g : __logf(1.f + __expf(g)));
#endif
  return __expf(g);
}

// This thread's part of the state: `at` elements into a slot.
struct StateRow {
  float4 h[4];
  int l, row;
  size_t at;

  __device__ __forceinline__ void load(const float *states, long long state_slot, int slot, int head, int part) {
    int lane = threadIdx.x & 31;
    l = lane % 8, row = (threadIdx.x >> 5) * 4 + lane / 8;
    at = ((size_t)head * DIM + part * ROWS + row) * DIM + l * 4;
#pragma unroll
    for (int j = 0; j < 4; j++) h[j] = *(const float4 *)(states + (size_t)slot * state_slot + at + j * 32);
  }
  // The recurrence over the tokens; outputs go to s.o.
  __device__ __forceinline__ void run(StepShared &s, float *states, long long state_slot, int count) {
#pragma unroll 1
    for (int n = 0; n < count; n++) {
      const float *q2 = s.squares[n][0], *k2 = s.squares[n][1], *logits = s.beta[n];
      float q_norm = rsqrtf(q2[0] + q2[1] + q2[2] + q2[3] + 1e-6f) * 0.08838834764831845f;  // 128 ** -0.5
      float k_norm = rsqrtf(k2[0] + k2[1] + k2[2] + k2[3] + 1e-6f);
      float logit = 0.f;
#pragma unroll
      for (int i = 0; i < WARPS; i++) logit += logits[i];
      float beta = sigmoid(logit);
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
  }
};

// o / rms(o) * weight * sigmoid(gate) of token `warp` into `out` (the CTA's first number of the head), the norm over the head:
// every CTA tells the others its part. `gate` and `weight` are this lane's. When it returns, all CTAs are done with the tokens, and
// none will touch this one again.
__device__ __forceinline__ void write_normed(StepShared &s, bf16_t *out, float gate, float weight, float eps, int part, int count) {
  int lane = threadIdx.x & 31, n = threadIdx.x >> 5;
  float o = n < count ? s.o[n][lane] : 0.f, sum = warp_sum(o * o);
  cluster_wait();
  if (n < count && lane < SPLIT) push(&s.norm[part][n], &s.norms_in, lane, sum);
  wait_pushed(&s.norms_in);
  if (n >= count) return;
  float f = rsqrtf(((s.norm[0][n] + s.norm[1][n]) + (s.norm[2][n] + s.norm[3][n])) / DIM + eps);
  out[(size_t)n * (HEADS * DIM) + lane] = to_bf16(o * f * weight * sigmoid(gate));
}
