// SPDX-License-Identifier: Apache-2.0
// Router: logits in FP32, then sigmoid, biased grouped top-k, renormalized and scaled weights, the list of distinct experts.
#pragma once
#include "moe_shape.cuh"

#define ROW_WARPS 4                            // warps that share one row of the gate
#define ROWS_AT_ONCE (WARPS / ROW_WARPS)
constexpr int GATE_PIECES = ceil_div(HIDDEN / 128, ROW_WARPS);
constexpr int SEGMENTS = EXPERTS / 32;         // of 32 experts, one a lane

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

// Logits of this CTA's rows from s.x8; `w` holds the first pass. A CTA without rows says that it is here: it has read x and the tag
// then, as has every CTA whose logits are there.
__device__ __forceinline__ void router_logits(Shared &s, Scratch *scratch, const GATE_TYPE *gate, float4 w[GATE_PIECES], int tokens,
                                              uint32_t tag) {
  constexpr int PASSES = ceil_div(ROWS_PER_CTA, ROWS_AT_ONCE);
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  if (blockIdx.x >= ROUTING_CTAS) {
    if (threadIdx.x == 0) store_tagged(&scratch->here[blockIdx.x - ROUTING_CTAS], 0, tag);
    return;
  }
#pragma unroll 1
  for (int pass = 0; pass < PASSES; pass++) {
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
      if (lane == 0) s.shared_sums[warp * TOKENS + token] = sum[token];  // nobody else uses them before down
    }
    __syncthreads();
    if (threadIdx.x < ROWS_AT_ONCE * TOKENS) {
      int token = threadIdx.x % TOKENS, row = threadIdx.x / TOKENS, in_cta = pass * ROWS_AT_ONCE + row;
      float total = 0.f;
#pragma unroll
      for (int i = 0; i < ROW_WARPS; i++) total += s.shared_sums[(row * ROW_WARPS + i) * TOKENS + token];
      int expert = blockIdx.x * ROWS_PER_CTA + in_cta;
      if (in_cta < ROWS_PER_CTA && expert < EXPERTS && token < tokens)
        store_tagged(&scratch->logits[token][expert], __float_as_uint(total), tag);
    }
    if (pass + 1 < PASSES) __syncthreads();
  }
}

// A float as an unsigned key of the same order, and back. A number's key is at least 0x007FFFFF.
__device__ __forceinline__ uint32_t key_of(float value) {
  uint32_t bits = __float_as_uint(value);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float value_of(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7FFFFFFFu : ~key);
}
__device__ __forceinline__ bool is_nan(float value) { return (__float_as_uint(value) & 0x7FFFFFFFu) > 0x7F800000u; }

// Logits on their way to a warp, by items of 32 experts of a token: number i of a batch is of item `first` + i WARPS. With the
// first batch the signs of CTAs without logits.
struct Logits {
  static constexpr int ITEMS = SEGMENTS * TOKENS, PER_WARP = ceil_div(ITEMS, WARPS), BATCH = PER_WARP < 16 ? PER_WARP : 16;
  static constexpr int HERE = GRID - ROUTING_CTAS, WORDS = BATCH + ceil_div(HERE, THREADS);
  Word word[WORDS];

  __device__ __forceinline__ void start(int first, int tokens, uint32_t tag) {
#pragma unroll
    for (int i = 0; i < WORDS; i++)
      word[i].start(i < BATCH ? first + i * WARPS < tokens * SEGMENTS : first < WARPS && sign(i) < HERE, tag);
  }
  static __device__ __forceinline__ int sign(int i) { return threadIdx.x + (i - BATCH) * THREADS; }
  static __device__ __forceinline__ const Tagged *at(const Scratch *scratch, int first, int i) {
    return i < BATCH ? scratch->logits[0] + (first + i * WARPS) * 32 + (threadIdx.x & 31) : scratch->here + sign(i);
  }
};

// Scores of all experts, a lane each: s.score, s.keys of the biased ones, s.best the keys of the two best of each group's part.
__device__ __forceinline__ void score_experts(Shared &s, const Scratch *scratch, int tokens, uint32_t tag) {
  int lane = threadIdx.x & 31;
  uint32_t part = PART == 32 ? ~0u : ((1u << PART % 32) - 1) << (lane & ~(PART - 1));
#pragma unroll 1
  for (int first = threadIdx.x >> 5; first < tokens * SEGMENTS || first < WARPS; first += Logits::BATCH * WARPS) {
    Logits logits;
    logits.start(first, tokens, tag);
    wait_tagged(logits.word, tag, [&](int i) { return Logits::at(scratch, first, i); });
#pragma unroll
    for (int i = 0; i < Logits::BATCH; i++) {
      int item = first + i * WARPS, token = item / SEGMENTS, expert = item % SEGMENTS * 32 + lane;
      if (item >= tokens * SEGMENTS) break;
      float score = __fdividef(1.f, 1.f + __expf(-logits.word[i].value())), biased = score + s.bias[expert];
      // Not a number: a group's best are found among the others, but such an expert is above them, as in torch.topk.
      uint32_t key = is_nan(biased) ? 0u : key_of(biased), best = __reduce_max_sync(part, key);
      uint32_t who = __ballot_sync(part, key == best);
      uint32_t second = __reduce_max_sync(part, lane == __ffs(who) - 1 ? 0u : key);
      s.score[token][expert] = score;
      s.keys[token][expert] = key ? key : ~0u;
      if (lane % PART == 0) s.best[token][expert / PART] = make_uint2(best, second);
    }
  }
}

// Bit g of the result: group g is among the TOP_GROUPS with the largest sum of their two best scores, of equal ones the first.
__device__ __forceinline__ uint32_t eligible_groups(const uint2 *best) {
  constexpr int PARTS = EXPERTS / GROUPS / PART;
  int lane = threadIdx.x & 31, better = 0;
  uint2 top = best[min(lane, GROUPS - 1) * PARTS];
#pragma unroll
  for (int i = 1; i < PARTS; i++) {
    uint2 other = best[min(lane, GROUPS - 1) * PARTS + i];
    top = make_uint2(max(top.x, other.x), max(max(top.y, other.y), min(top.x, other.x)));
  }
  float sum = value_of(top.x) + value_of(top.y);
  if (is_nan(sum)) sum = -__int_as_float(0x7F800000);  // below all numbers
#pragma unroll 8
  for (int other = 0; other < GROUPS; other++) {
    float o = __shfl_sync(~0u, sum, other);
    better += o > sum || (o == sum && other < lane);
  }
  return __ballot_sync(~0u, lane < GROUPS && better < TOP_GROUPS);
}

// How many of `count` keys are better than number `index`: larger, or equal and before it. Zeros fill up the last four; keys that
// count are larger.
__device__ __forceinline__ int rank_among(const uint32_t *keys, int index, int count) {
  const uint4 *four = (const uint4 *)keys;
  uint32_t mine = keys[index];
  int x = 0, y = 0, z = 0, w = 0;  // four short chains of additions
#pragma unroll 4
  for (int j = 0; j < ceil_div(count, 4); j++) {
    uint4 k = four[j];
    uint32_t bar = mine - (j < index / 4);  // larger than mine - 1 is mine or larger
    x += k.x > bar, y += k.y > bar, z += k.z > bar, w += k.w > bar;
  }
#pragma unroll
  for (int i = 0; i < 3; i++) x += i < index % 4 && keys[index / 4 * 4 + i] == mine;
  return x + y + z + w;
}

// Top-k of a token by one warp: s.chosen and s.chosen_score, best first; of equal scores the lower expert is better.
__device__ __forceinline__ void choose_experts(Shared &s, int token) {
  constexpr int PER_GROUP = EXPERTS / GROUPS, LISTS = TOP_GROUPS * (PER_GROUP / PART);
  int lane = threadIdx.x & 31, count = 0;
  uint32_t groups = eligible_groups(s.best[token]), least = 0;
  // Each eligible list has an expert from its best key on, and two from its second: a bound that TOP_K experts reach, and few more.
  if (2 * LISTS >= TOP_K) {
    uint2 best = s.best[token][min(lane, EXPERTS / PART - 1)];
    bool eligible = lane < EXPERTS / PART && groups >> (lane * PART / PER_GROUP) & 1;
    least = __reduce_min_sync(~0u, !eligible ? ~0u : LISTS >= TOP_K ? best.x : best.y);
  }
  uint32_t *keys = s.keys[token], key[SEGMENTS];
#pragma unroll
  for (int i = 0; i < SEGMENTS; i++) key[i] = keys[i * 32 + lane];
  __syncwarp();
#pragma unroll
  for (int i = 0; i < SEGMENTS; i++) {  // ascending, so that of equal keys the first is the lower expert
    bool candidate = groups >> ((i * 32 + lane) / PER_GROUP) & 1 && key[i] >= least;
    uint32_t who = __ballot_sync(~0u, candidate);
    int at = count + __popc(who & ((1u << lane) - 1));
    if (candidate) keys[at] = key[i], s.candidates[token][at] = i * 32 + lane;
    count += __popc(who);
  }
  if (lane < 3 && count + lane < EXPERTS) keys[count + lane] = 0;
  __syncwarp();
#pragma unroll 1
  for (int c = lane; c < count; c += 32) {
    int rank = rank_among(keys, c, count), expert = s.candidates[token][c];
    if (rank < TOP_K) s.chosen[token][rank] = expert, s.chosen_score[token][rank] = s.score[token][expert];
  }
  __syncwarp();
}

// The token's pairs, a lane each, with renormalized and scaled weights. `expert_map` (or null): global expert -> local one,
// negative if elsewhere.
__device__ __forceinline__ void weigh_experts(Shared &s, int token, const int *expert_map, float *topk_weights, int *topk_ids, float scaling) {
  int lane = threadIdx.x & 31, pair = token * TOP_K + lane;
  if (lane < TOP_K) {
    int id = s.chosen[token][lane], local = expert_map ? expert_map[id] : id;
    float total = 0.f;
#pragma unroll
    for (int k = 0; k < TOP_K; k++) total += s.chosen_score[token][k];
    float weight = s.chosen_score[token][lane] * (scaling / total);
    if (topk_ids && blockIdx.x == 0) topk_ids[pair] = id, topk_weights[pair] = weight;
    s.pair_id[pair] = local < 0 ? NOBODY : id;
    s.pair_local[pair] = local;
    s.pair_weight[pair] = weight;
    if (TOKENS > 1 && local >= 0) atomicOr(&s.present[id / 32], 1u << (id % 32));
  }
}

// Distinct experts in ascending order, a thread per pair; whole warps.
__device__ __forceinline__ void schedule_experts(Shared &s) {
  int lane = threadIdx.x & 31, pair = threadIdx.x, id = s.pair_id[min(pair, PAIRS - 1)], lower[4] = {};
  bool mine = pair < TOKENS * TOP_K && id != NOBODY;
  uint32_t tokens = 0;
#pragma unroll
  for (int j = 0; j < PAIRS / 4; j++) {
    int4 ids = ((const int4 *)s.pair_id)[j];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      int other = i == 0 ? ids.x : i == 1 ? ids.y : i == 2 ? ids.z : ids.w;
      lower[i] += other < id;
      if (other == id) tokens |= 1u << (j * 4 + i) / TOP_K;
    }
  }
  int before = lower[0] + lower[1] + (lower[2] + lower[3]), rank = before, unique;
  if (TOKENS == 1) {
    unique = __popc(__ballot_sync(~0u, mine));
  } else {  // distinct experts before each 32 of them: a scan by every warp that needs it
    uint32_t word = lane < EXPERTS / 32 ? s.present[lane] : 0;
    int sum = __popc(word);
#pragma unroll
    for (int offset = 1; offset < 32; offset <<= 1) {
      int n = __shfl_up_sync(~0u, sum, offset);
      if (lane >= offset) sum += n;
    }
    unique = __shfl_sync(~0u, sum, 31);
    rank = __shfl_sync(~0u, sum - __popc(word), id / 32 & 31) + __popc(__shfl_sync(~0u, word, id / 32 & 31) & ((1u << (id & 31)) - 1));
  }
  if (mine) {
    s.schedule.expert[rank] = s.pair_local[pair];
    s.schedule.tokens[rank] = tokens;
    s.schedule.weight[rank][pair / TOP_K] = s.pair_weight[pair];
    s.schedule.before[rank + 1] = before + __popc(tokens);
  }
  if (pair == 0) s.schedule.before[0] = 0, s.schedule.unique = unique;
}

// What the router needs and x does not change: nobody waits for it.
__device__ __forceinline__ void prepare_route(Shared &s) {
  if (threadIdx.x < PAIRS) s.pair_id[threadIdx.x] = NOBODY;
  if (threadIdx.x < EXPERTS / 32) s.present[threadIdx.x] = 0;
  if (threadIdx.x <= MAX_UNIQUE) s.splits[threadIdx.x] = Split(threadIdx.x);
}

// Fills s.schedule from the logits of all experts.
__device__ __forceinline__ void route(Shared &s, const Scratch *scratch, const int *expert_map, float *topk_weights, int *topk_ids,
                                      int tokens, float scaling, uint32_t tag) {
  constexpr int LAST = ceil_div(TOKENS * TOP_K, 32) * 32;
  int warp = threadIdx.x >> 5;
  score_experts(s, scratch, tokens, tag);
  __syncthreads();
#pragma unroll 1
  for (int token = warp; token < tokens; token += WARPS) {
    choose_experts(s, token);
    weigh_experts(s, token, expert_map, topk_weights, topk_ids, scaling);
  }
  if (TOKENS > 1) __syncthreads();
  __syncwarp();
  if (threadIdx.x < LAST) schedule_experts(s);
  __syncthreads();
}
