// SPDX-License-Identifier: Apache-2.0
// Router: logits in FP32, then sigmoid, biased grouped top-k, renormalized and scaled weights, the list of distinct experts.
#pragma once
#include "moe_shape.cuh"

#define ROW_WARPS 4                            // warps that share one row of the gate
#define ROWS_AT_ONCE (WARPS / ROW_WARPS)
constexpr int ROWS_PER_CTA = ceil_div(EXPERTS, GRID);
constexpr int GATE_PIECES = ceil_div(HIDDEN / 128, ROW_WARPS);
constexpr int SEGMENTS = EXPERTS / 32;         // of 32 experts, one a lane
constexpr int SEGMENTS_PER_WARP = ceil_div(SEGMENTS, WARPS);

__device__ __forceinline__ float4 load4(const float *p) {
  uint4 v = load_stream((const uint4 *)p);
  return make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w));
}
__device__ __forceinline__ float4 load4(const bf16_t *p) {
  uint2 v = load_stream((const uint2 *)p);
  return make_float4(__uint_as_float(v.x << 16), __uint_as_float(v.x & 0xFFFF0000u), __uint_as_float(v.y << 16),
                     __uint_as_float(v.y & 0xFFFF0000u));
}

// This lane's share of the CTA's rows number pass * ROWS_AT_ONCE + warp / ROW_WARPS.
__device__ __forceinline__ void fetch_gate(float4 w[GATE_PIECES], const GATE_TYPE *gate, int pass) {
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  int row = min((int)blockIdx.x * ROWS_PER_CTA + pass * ROWS_AT_ONCE + warp / ROW_WARPS, EXPERTS - 1);
#pragma unroll
  for (int i = 0; i < GATE_PIECES; i++) {
    int piece = min(warp % ROW_WARPS + i * ROW_WARPS, HIDDEN / 128 - 1);
    w[i] = load4(gate + (size_t)row * HIDDEN + piece * 128 + lane * 4);
  }
}

// Logits of this CTA's rows from s.x8; `w` holds the first pass.
__device__ __forceinline__ void router_logits(Shared &s, Scratch *scratch, const GATE_TYPE *gate, float4 w[GATE_PIECES], int tokens) {
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll 1
  for (int pass = 0; pass < ceil_div(ROWS_PER_CTA, ROWS_AT_ONCE); pass++) {
    if (pass) fetch_gate(w, gate, pass);
    float sum[TOKENS] = {};
#pragma unroll
    for (int i = 0; i < GATE_PIECES; i++) {
      int piece = warp % ROW_WARPS + i * ROW_WARPS;
      if (piece >= HIDDEN / 128) break;
#pragma unroll
      for (int token = 0; token < TOKENS; token++) {
        uint2 v = *(const uint2 *)(s.x8 + token * X8_STRIDE + piece * 128 + lane * 4);  // (0, 2), (1, 3)
        sum[token] += w[i].x * __uint_as_float(v.x << 16) + w[i].z * __uint_as_float(v.x & 0xFFFF0000u) +
                      w[i].y * __uint_as_float(v.y << 16) + w[i].w * __uint_as_float(v.y & 0xFFFF0000u);
      }
    }
#pragma unroll
    for (int token = 0; token < TOKENS; token++) {
#pragma unroll
      for (int offset = 16; offset; offset >>= 1) sum[token] += __shfl_xor_sync(~0u, sum[token], offset);
      if (lane == 0) s.sums[warp * TOKENS + token] = sum[token];
    }
    __syncthreads();
    if (threadIdx.x < ROWS_AT_ONCE * TOKENS) {
      int token = threadIdx.x % TOKENS, row = threadIdx.x / TOKENS, in_cta = pass * ROWS_AT_ONCE + row;
      float total = 0.f;
#pragma unroll
      for (int i = 0; i < ROW_WARPS; i++) total += s.sums[(row * ROW_WARPS + i) * TOKENS + token];
      int expert = blockIdx.x * ROWS_PER_CTA + in_cta;
      if (in_cta < ROWS_PER_CTA && expert < EXPERTS && token < tokens) scratch->logits[token][expert] = total;
    }
    __syncthreads();
  }
}

// A float as an unsigned key of the same order; numbers have keys of at least 0x007FFFFF.
__device__ __forceinline__ uint32_t key_of(float value) {
  uint32_t bits = __float_as_uint(value);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// Scores of all tokens, a lane per expert of each 32: s.keys of the biased scores, s.best the two best of each group's part.
__device__ __forceinline__ void score_experts(Shared &s, const float (*logits)[EXPERTS], float score[SEGMENTS_PER_WARP][TOKENS],
                                              int tokens) {
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
  for (int i = 0; i < SEGMENTS_PER_WARP; i++) {
    int segment = min(warp + i * WARPS, SEGMENTS - 1), expert = segment * 32 + lane;
#pragma unroll
    for (int token = 0; token < TOKENS; token++) score[i][token] = token < tokens ? load_fresh(&logits[token][expert]) : 0.f;
#pragma unroll
    for (int token = 0; token < TOKENS; token++) {
      score[i][token] = __fdividef(1.f, 1.f + __expf(-score[i][token]));
      float biased = score[i][token] + s.bias[expert], first = biased, second = -1e30f;
      s.keys[token][expert] = key_of(biased);
#pragma unroll
      for (int offset = 1; offset < PART; offset <<= 1) {
        float f = __shfl_xor_sync(~0u, first, offset), n = __shfl_xor_sync(~0u, second, offset);
        second = fmaxf(fmaxf(second, n), fminf(first, f));
        first = fmaxf(first, f);
      }
      if (lane % PART == 0) s.best[token][segment * (32 / PART) + lane / PART] = make_float2(first, second);
    }
  }
}

// Bit g of the result: group g is among the TOP_GROUPS with the largest sum of their two best scores, of equal ones the first.
__device__ __forceinline__ uint32_t eligible_groups(const float2 *best) {
  constexpr int PARTS = EXPERTS / GROUPS / PART;
  int lane = threadIdx.x & 31, better = 0;
  float2 top = best[min(lane, GROUPS - 1) * PARTS];
#pragma unroll
  for (int i = 1; i < PARTS; i++) {
    float2 other = best[min(lane, GROUPS - 1) * PARTS + i];
    top = make_float2(fmaxf(top.x, other.x), fmaxf(fmaxf(top.y, other.y), fminf(top.x, other.x)));
  }
  float sum = top.x + top.y;
  if ((__float_as_uint(sum) & 0x7FFFFFFFu) > 0x7F800000u) sum = -__int_as_float(0x7F800000);  // NaN is below all numbers
#pragma unroll 8
  for (int other = 0; other < GROUPS; other++) {
    float o = __shfl_sync(~0u, sum, other);
    better += o > sum || (o == sum && other < lane);
  }
  return __ballot_sync(~0u, lane < GROUPS && better < TOP_GROUPS);
}

// How many of COUNT keys are better than number `index`: larger, or equal and before it.
template <int COUNT>
__device__ __forceinline__ int rank_among(const uint32_t *keys, int index) {
  const uint4 *four = (const uint4 *)keys;
  uint32_t mine = keys[index];
  int better = 0;
#pragma unroll 8
  for (int j = 0; j < COUNT / 4; j++) {
    uint4 k = four[j];
    uint32_t bar = mine - (j < index / 4);  // larger than mine - 1 is mine or larger
    better += (k.x > bar) + (k.y > bar) + (k.z > bar) + (k.w > bar);
  }
#pragma unroll
  for (int i = 0; i < 3; i++) better += i < index % 4 && keys[index / 4 * 4 + i] == mine;
  return better;
}

// Top-k of all tokens by counting: an expert's rank is the number of better ones, first among its 32 neighbours, then, if that is
// good enough, among all such candidates. Of equal scores the lower expert is better.
__device__ __forceinline__ void choose_experts(Shared &s, const float (*logits)[EXPERTS], int tokens) {
  constexpr int PER_GROUP = EXPERTS / GROUPS, LISTS_PER_GROUP = PER_GROUP / PART;
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  float score[SEGMENTS_PER_WARP][TOKENS];
  score_experts(s, logits, score, tokens);
  __syncthreads();
#pragma unroll 1
  for (int token = warp; token < tokens; token += WARPS) {
    uint32_t groups = eligible_groups(s.best[token]);
    if (lane == 0) s.groups[token] = groups;
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < SEGMENTS_PER_WARP; i++)
#pragma unroll
    for (int token = 0; token < TOKENS; token++) {
      int segment = warp + i * WARPS, group = (segment * 32 + lane) / PER_GROUP;
      uint32_t groups = s.groups[token];
      bool eligible = groups >> group & 1;
      // Groups of 32 and more: lists of the eligible ones only. Smaller groups share a list; the others' keys become smaller than
      // that of any number, and stay different.
      if (segment >= SEGMENTS || token >= tokens || (PART == 32 && !eligible)) continue;
      uint32_t *keys = s.keys[token] + segment * 32;
      if (PART < 32 && !eligible) keys[lane] = 32 - lane;
      __syncwarp();
      int rank = rank_among<32>(keys, lane);
      int list = PART < 32 ? segment : __popc(groups & ((1u << group) - 1)) * LISTS_PER_GROUP + segment % LISTS_PER_GROUP;
      if (rank < TOP_K) {
        s.candidate_keys[token][list * TOP_K + rank] = keys[lane];
        s.candidates[token][list * TOP_K + rank] = {score[i][token], segment * 32 + lane};
      }
    }
  __syncthreads();
#pragma unroll 1
  for (int c = threadIdx.x; c < tokens * CANDIDATES; c += THREADS) {
    int token = c / CANDIDATES, index = c % CANDIDATES, rank = rank_among<CANDIDATES>(s.candidate_keys[token], index);
    if (rank < TOP_K) s.chosen[token][rank] = s.candidates[token][index].expert, s.chosen_weight[token][rank] = s.candidates[token][index].score;
  }
}

// Fills s.schedule from the logits of all experts. `expert_map` (or null): global expert -> local one, negative if elsewhere.
__device__ __forceinline__ void route(Shared &s, const Scratch *scratch, const int *expert_map, float *topk_weights, int *topk_ids,
                                      int tokens, float scaling) {
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  choose_experts(s, scratch->logits, tokens);
  if (threadIdx.x >= THREADS - EXPERTS / 32) s.present[THREADS - 1 - threadIdx.x] = 0;
#pragma unroll 1
  for (int i = threadIdx.x; i < MAX_UNIQUE * TOKENS; i += THREADS) s.schedule.weight[0][i] = 0.f;
#pragma unroll 1
  for (int i = threadIdx.x; i < MAX_UNIQUE; i += THREADS) s.schedule.tokens[i] = 0;
  __syncthreads();
  int pair = threadIdx.x, id = -1, local = -1;
  float weight = 0.f;
  if (pair < tokens * TOP_K) {
    id = s.chosen[0][pair];
    local = expert_map ? expert_map[id] : id;
    if (local >= 0) atomicOr(&s.present[id / 32], 1u << (id % 32));
    float total = 0.f;
#pragma unroll
    for (int k = 0; k < TOP_K; k++) total += s.chosen_weight[pair / TOP_K][k];
    weight = s.chosen_weight[0][pair] * (scaling / total);
    if (topk_ids && blockIdx.x == 0) topk_ids[pair] = id, topk_weights[pair] = weight;
  }
  __syncthreads();
  if (pair < ceil_div(TOKENS * TOP_K, 32) * 32) {
    // Distinct experts before each 32 of them: a scan by every warp that needs it.
    uint32_t word = lane < EXPERTS / 32 ? s.present[lane] : 0;
    int count = __popc(word), before = count;
#pragma unroll
    for (int offset = 1; offset < 32; offset <<= 1) {
      int n = __shfl_up_sync(~0u, before, offset);
      if (lane >= offset) before += n;
    }
    int unique = __shfl_sync(~0u, before, 31);
    int rank = __shfl_sync(~0u, before - count, id / 32 & 31);
    rank += __popc(__shfl_sync(~0u, word, id / 32 & 31) & ((1u << (id & 31)) - 1));
    if (local >= 0) {
      s.schedule.expert[rank] = local;
      s.schedule.weight[rank][pair / TOP_K] = weight;
      atomicOr(&s.schedule.tokens[rank], 1u << (pair / TOP_K));
    }
    if (pair == 0) s.schedule.unique = unique;
  }
  __syncthreads();
  // before[u]: a scan over up to 128 experts, four a lane.
  if (warp == 0) {
    int count[4], sum = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) sum += count[i] = lane * 4 + i < MAX_UNIQUE ? __popc(s.schedule.tokens[lane * 4 + i]) : 0;
    int before = sum;
#pragma unroll
    for (int offset = 1; offset < 32; offset <<= 1) {
      int n = __shfl_up_sync(~0u, before, offset);
      if (lane >= offset) before += n;
    }
    before -= sum;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (lane * 4 + i <= MAX_UNIQUE) s.schedule.before[lane * 4 + i] = before;
      before += count[i];
    }
  } else if (threadIdx.x < 32 + 3) {
    int unique = s.schedule.unique, which = threadIdx.x - 32;
    s.divisors[which] = Divisor(which == 0   ? larger(ceil_div(unique * UP_UNITS * UP_STEPS, GRID), UP_LEAST)
                                : which == 1 ? larger(ceil_div(DOWN_UNITS * unique * BLOCKS, GRID), 1)
                                             : larger(unique * BLOCKS, 1));
  }
  __syncthreads();
}
