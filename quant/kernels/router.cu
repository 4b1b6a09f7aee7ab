// SPDX-License-Identifier: Apache-2.0
// Router of 1 to 8 tokens in two launches: logits = x W^T in FP32; then sigmoid, biased grouped top-k, renormalized and
// scaled weights, and the list of distinct experts that moe_decode.cu works through.
//
// Compile-time shape: HIDDEN, EXPERTS, TOP_K, GROUPS, TOP_GROUPS, TOKENS, GATE_TYPE (float or bf16_t), USE_PDL.
#include "common.cuh"

#define COLUMNS 8
#define ROUTER_WARPS 4
#define PER_LANE (EXPERTS / 32)
#define LANES_PER_GROUP (32 / GROUPS)

struct Schedule {
  int unique;
  int expert[TOKENS * TOP_K];
  uint32_t tokens[TOKENS * TOP_K];
  float weight[TOKENS * TOP_K][COLUMNS];
};

__device__ __forceinline__ float4 load4(const float *p) { return *(const float4 *)p; }
__device__ __forceinline__ float4 load4(const bf16_t *p) {
  uint2 v = *(const uint2 *)p;
  return make_float4(__uint_as_float(v.x << 16), __uint_as_float(v.x & 0xFFFF0000u), __uint_as_float(v.y << 16),
                     __uint_as_float(v.y & 0xFFFF0000u));
}

// One warp per expert row.
extern "C" __global__ void __launch_bounds__(ROUTER_WARPS * 32)
    router_logits(const bf16_t *__restrict__ x, const GATE_TYPE *__restrict__ gate, float *__restrict__ logits,
                  int tokens) {
  int lane = threadIdx.x & 31, row = blockIdx.x * ROUTER_WARPS + (threadIdx.x >> 5);
  let_consumer_start();
  const GATE_TYPE *w = gate + (size_t)row * HIDDEN;
  float sum[TOKENS] = {};
  float4 part[HIDDEN / 128];
#pragma unroll
  for (int i = 0; i < HIDDEN / 128; i++) part[i] = load4(w + (i * 32 + lane) * 4);
  wait_for_producer();
#pragma unroll
  for (int i = 0; i < HIDDEN / 128; i++) {
#pragma unroll
    for (int token = 0; token < TOKENS; token++) {
      if (token >= tokens) break;
      float4 v = load4(x + (size_t)token * HIDDEN + (i * 32 + lane) * 4);
      sum[token] += part[i].x * v.x + part[i].y * v.y + part[i].z * v.z + part[i].w * v.w;
    }
  }
#pragma unroll
  for (int token = 0; token < TOKENS; token++) {
    if (token >= tokens) break;
#pragma unroll
    for (int offset = 16; offset; offset >>= 1) sum[token] += __shfl_xor_sync(~0u, sum[token], offset);
    if (lane == 0) logits[token * EXPERTS + row] = sum[token];
  }
}

// One CTA; warp n routes token n, then all threads build the schedule. Lane l holds experts l * PER_LANE + i.
extern "C" __global__ void __launch_bounds__(EXPERTS > 32 * TOKENS ? EXPERTS : 32 * TOKENS)
    route(const float *__restrict__ logits, const float *__restrict__ bias, Schedule *__restrict__ schedule,
          float *__restrict__ topk_weights, int *__restrict__ topk_ids, int tokens, float scaling) {
  __shared__ uint32_t mask[EXPERTS];
  __shared__ float weight[TOKENS][EXPERTS];
  __shared__ int count[(EXPERTS + 31) / 32];
  int lane = threadIdx.x & 31, token = threadIdx.x >> 5;
  let_consumer_start();
  for (int i = threadIdx.x; i < EXPERTS; i += blockDim.x) mask[i] = 0;
  wait_for_producer();
  __syncthreads();

  if (token < tokens) {
    float score[PER_LANE], biased[PER_LANE], first = -1e30f, second = -1e30f;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
      int e = lane * PER_LANE + i;
      score[i] = 1.f / (1.f + __expf(-logits[token * EXPERTS + e]));
      biased[i] = score[i] + bias[e];
      second = fmaxf(second, fminf(first, biased[i]));
      first = fmaxf(first, biased[i]);
    }
    // Group score: the sum of the two best biased scores of its experts.
#pragma unroll
    for (int offset = 1; offset < LANES_PER_GROUP; offset <<= 1) {
      float f = __shfl_xor_sync(~0u, first, offset), s = __shfl_xor_sync(~0u, second, offset);
      second = fmaxf(fmaxf(second, s), fminf(first, f));
      first = fmaxf(first, f);
    }
    float group = first + second;
    int better = 0;
#pragma unroll
    for (int other = 0; other < GROUPS; other++) {
      float s = __shfl_sync(~0u, group, other * LANES_PER_GROUP);
      int mine = lane / LANES_PER_GROUP;
      better += s > group || (s == group && other < mine);
    }
    if (better >= TOP_GROUPS)
#pragma unroll
      for (int i = 0; i < PER_LANE; i++) biased[i] = -1e30f;

    float total = 0.f, chosen[TOP_K];
    int ids[TOP_K];
#pragma unroll
    for (int k = 0; k < TOP_K; k++) {
      float best = -2e30f;
      int id = 0;
#pragma unroll
      for (int i = 0; i < PER_LANE; i++)
        if (biased[i] > best) best = biased[i], id = lane * PER_LANE + i;
#pragma unroll
      for (int offset = 16; offset; offset >>= 1) {
        float b = __shfl_xor_sync(~0u, best, offset);
        int other = __shfl_xor_sync(~0u, id, offset);
        if (b > best || (b == best && other < id)) best = b, id = other;
      }
      float s = 0.f;
#pragma unroll
      for (int i = 0; i < PER_LANE; i++)
        if (lane * PER_LANE + i == id) s = score[i], biased[i] = -3e30f;
      chosen[k] = __shfl_sync(~0u, s, id / PER_LANE);
      ids[k] = id;
      total += chosen[k];
    }
    if (lane < TOP_K) {
      float w = 0.f;
      int id = 0;
#pragma unroll
      for (int k = 0; k < TOP_K; k++)
        if (k == lane) w = chosen[k] / total * scaling, id = ids[k];
      atomicOr(&mask[id], 1u << token);
      weight[token][id] = w;
      topk_weights[token * TOP_K + lane] = w;
      topk_ids[token * TOP_K + lane] = id;
    }
  }
  __syncthreads();

  // Distinct experts in ascending order, so that sums are formed in the same order every time.
  int e = threadIdx.x;
  bool present = e < EXPERTS && mask[e] != 0;
  uint32_t ballot = __ballot_sync(~0u, present);
  if (lane == 0 && e < EXPERTS) count[e / 32] = __popc(ballot);
  __syncthreads();
  if (e >= EXPERTS) return;
  int before = __popc(ballot & ((1u << lane) - 1)), all = 0;
  for (int i = 0; i < (EXPERTS + 31) / 32; i++) {
    if (i < e / 32) before += count[i];
    all += count[i];
  }
  if (e == 0) schedule->unique = all;
  if (!present) return;
  schedule->expert[before] = e;
  schedule->tokens[before] = mask[e];
  for (int n = 0; n < COLUMNS; n++)
    schedule->weight[before][n] = n < TOKENS && ((mask[e] >> n) & 1) ? weight[n][e] : 0.f;
}
