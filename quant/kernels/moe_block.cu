// SPDX-License-Identifier: Apache-2.0
// One MoE block for 1 to 8 tokens in one launch: if asked for the RMSNorm before it, router, routed MXFP4 experts, block-FP8
// shared expert, weighted sum.
//
// One CTA per SM works through all phases; between them lie two grid barriers, and each weight byte is read once:
//   logits of the CTA's gate rows | barrier (meanwhile: gate_up of the shared expert) | top-k, by every CTA for itself |
//   gate_up of the routed experts | barrier | activations | down | the last CTA of a unit adds the parts.
// The work of a phase is cut into equal ranges of steps, whatever expert they belong to. Each warp streams its pieces through
// a ring in shared memory that runs on across the second barrier, so that memory stays busy there.
//
// Experts are read in the fragment order of Humming's W4A16 layout (see layout.py): per expert [K / 16][N / 64][32 lanes]
// 16-byte words, each 32-bit word one 16x16 tensor-core fragment; scales [K / 32][N], in blocks of 64 rows permuted so that
// lane / 4 owns 8 consecutive bytes. Tokens are the N dimension (8 columns) of the tensor-core step, so tokens that share
// an expert share its bytes. The shared expert is stored as in the checkpoint: E4M3 rows, one scale per 128x128 block.
#include "moe_shape.cuh"
#include "moe_route.cuh"
#include "moe_shared.cuh"
#include "moe_stage.cuh"
#include "moe_work.cuh"

// 64 rows x 32 k: two 16-byte words of codes, 8 scale bytes (row g + 8 i of the 64 has byte i), B fragments of both 16-k halves.
__device__ __forceinline__ void step_e2m1(float acc[4][4], const uint4 &code0, const uint4 &code1, const uint2 &scale, const uint4 &b) {
#pragma unroll
  for (int tile = 0; tile < 4; tile++) {
    uint32_t pair[4];
    float sum[4] = {};
#pragma unroll
    for (int half = 0; half < 2; half++) {
      e2m1_pairs(pair, word_of(half ? code1 : code0, tile));
      uint32_t a[4] = {pair[0], pair[2], pair[1], pair[3]};
      mma_16816_f16(sum, a, half ? b.z : b.x, half ? b.w : b.y);
    }
    uint32_t four = tile < 2 ? scale.x : scale.y;
    float low = e8m0(four, tile % 2 * 2), high = e8m0(four, tile % 2 * 2 + 1);
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (TOKENS > 1 || (i & 1) == 0) acc[tile][i] += (i < 2 ? low : high) * sum[i];
  }
}

// Stores a warp's sums of 64 rows: sums[warp][token][base + row].
__device__ __forceinline__ void store_sums(float *sums, const float acc[4][4], int base) {
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int tile = 0; tile < 4; tile++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      int token = 2 * t + (i & 1);
      if (token < TOKENS) sums[(warp * TOKENS + token) * SUM_STRIDE + base + tile * 16 + g + (i >> 1) * 8] = acc[tile][i];
    }
}
// The sum over the warps that share row block `block` of a group.
template <int GROUP>
__device__ __forceinline__ float sum_of_warps(const float *sums, int block, int token, int row) {
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < WARPS / GROUP; i++) sum += sums[((i * GROUP + block) * TOKENS + token) * SUM_STRIDE + row];
  return sum;
}

// How much of [begin, end) belongs to a unit that owns `size` consecutive numbers.
__device__ __forceinline__ int overlap(int begin, int end, int unit, int size) {
  return max(0, min(end, (unit + 1) * size) - max(begin, unit * size));
}

// Adds all parts of a unit of the output and writes it.
__device__ __forceinline__ void finish_unit(const Scratch *scratch, const Work &work, int unit, const bf16_t *residual, bf16_t *out,
                                            int tokens) {
  constexpr int QUADS = DOWN_GROUP * 16, AT_ONCE = DOWN_PARTS < 16 ? DOWN_PARTS : 16;  // loads on their way together
  int begin = unit * work.row.d;
  int parts = work.pairs ? work.down_quota.of(begin + work.row.d - 1) - work.down_quota.of(begin) + 1 : 0;
#pragma unroll 1
  for (int i = threadIdx.x; i < tokens * QUADS; i += THREADS) {
    int token = i / QUADS, block = unit * DOWN_GROUP + i % QUADS / 16, row = i % 16 * 4;
    size_t at = (size_t)token * HIDDEN + block * 64 + row;
    uint2 r = residual ? load_fresh((const uint2 *)(residual + at)) : make_uint2(0u, 0u);
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f), shared = sum;
#pragma unroll 1
    for (int first = 0; first == 0 || first < parts; first += AT_ONCE) {
      float4 part[AT_ONCE];
#pragma unroll
      for (int p = 0; p < AT_ONCE; p++)
        part[p] = first + p < parts ? load_fresh((const float4 *)&scratch->down[block][min(first + p, DOWN_PARTS - 1)][token][row])
                                    : make_float4(0.f, 0.f, 0.f, 0.f);
      if (first == 0) shared = shared_sum<SHARED_DOWN_ITEMS, SHARED_DOWN_QUOTA>(scratch->shared_down, block * 64 + row, token);
#pragma unroll
      for (int p = 0; p < AT_ONCE; p++) add(sum, part[p]);
    }
    add(sum, shared);
    add(sum, make_float4(low_of(r.x), high_of(r.x), low_of(r.y), high_of(r.y)));
    *(uint2 *)(out + at) = make_uint2(pack_bf16(sum.x, sum.y), pack_bf16(sum.z, sum.w));
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    moe_block(const bf16_t *__restrict__ x, const bf16_t *residual, const GATE_TYPE *__restrict__ gate,
              const float *__restrict__ bias, const int *__restrict__ expert_map, const uint8_t *__restrict__ w13,
              const uint8_t *__restrict__ s13, const uint8_t *__restrict__ w2, const uint8_t *__restrict__ s2,
              const uint8_t *__restrict__ shared_w13, const float *__restrict__ shared_s13, const uint8_t *__restrict__ shared_w2,
              const float *__restrict__ shared_s2, Scratch *scratch, bf16_t *out, float *__restrict__ topk_weights,
              int *__restrict__ topk_ids, const bf16_t *__restrict__ norm_weight, int tokens, float scaling, float limit, float shared_limit, float eps) {
  extern __shared__ uint4 dynamic[];
  Shared &s = *(Shared *)dynamic;
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  // Weights do not depend on the producer: ask for them before waiting for x.
  float4 gate_part[GATE_PIECES];
  SharedItem item;
  fetch_gate(gate_part, gate, 0);
  fetch_item<HIDDEN>(item, shared_w13, blockIdx.x * SHARED_UP_QUOTA + warp, SHARED_UP_TILES);
  for (int i = threadIdx.x; i < EXPERTS / 4; i += THREADS) copy_async((uint4 *)s.bias + i, (const uint4 *)bias + i);
  commit_copies();
  if (threadIdx.x < TOKENS) s.x_max[threadIdx.x] = 0;
  XRows norm;
  if (norm_weight) norm.load_weight(norm_weight);
  __syncthreads();
  wait_for_producer();
  if (blockIdx.x == 0 && threadIdx.x == 0) scratch->barrier[2][0] = 0;  // the launch before is over
  stage_x8(s, x, norm_weight, norm, eps, tokens);
  __syncthreads();
  router_logits(s, scratch, gate, gate_part, tokens);
  arrive_at(scratch->barrier[0]);
  shared_items<HIDDEN, SHARED_UP_TILES, SHARED_UP_QUOTA>(s.sums, item, shared_w13, shared_s13, s.x8, X8_STRIDE, tokens);
  stage_x(s, tokens);
  wait_copies<0>();  // the bias
  __syncthreads();
  store_shared_parts<HIDDEN, SHARED_UP_TILES, SHARED_UP_QUOTA>(s.sums, scratch->shared_up, tokens);
  arrive_at(scratch->barrier[1], THREADS - 1);  // thread 0 goes on waiting
  wait_at(scratch->barrier[0]);
  route(s, scratch, expert_map, topk_weights, topk_ids, tokens, scaling);

  Work work(s.schedule, s.divisors);
  Stream stream = {w13, s13, w2, s2, work.up + warp / UP_GROUP, 0, false};
#pragma unroll 1
  for (int i = 0; i < STAGES; i++) stream.fetch(s, work);
  if (warp == WARPS - 1) activate_shared(scratch, tokens, shared_limit);  // the last warp has the fewest pieces
  int slot = 0, step = work.up + warp / UP_GROUP;
  auto next_slot = [&]() {
    wait_copies<STAGES - 1>();
    const uint4 *at = s.ring[warp][slot];
    slot = slot + 1 == STAGES ? 0 : slot + 1;
    return at;
  };
  const unsigned short *column = s.x + (g < tokens ? g : 0) * X_STRIDE + t * 8;
#pragma unroll 1
  for (int unit = work.up / UP_STEPS; unit * UP_STEPS < work.up_end; unit++) {
    float acc[2][4][4] = {};
#pragma unroll 1
    for (int end = min(work.up_end, (unit + 1) * UP_STEPS); step < end; step += UP_LANES) {
      const uint4 *at = next_slot();
      uint4 b = make_uint4(0u, 0u, 0u, 0u);
      if (g < tokens) b = *(const uint4 *)(column + (step - unit * UP_STEPS) * 32);
#pragma unroll
      for (int m = 0; m < 2; m++)
        step_e2m1(acc[m], at[m * 64 + lane], at[m * 64 + 32 + lane], *((const uint2 *)(at + 128 + m * 4) + g), b);
      __syncwarp();
      stream.fetch(s, work);
    }
    store_sums(s.sums, acc[0], 0);
    store_sums(s.sums, acc[1], 64);
    __syncthreads();
    int part = blockIdx.x - work.up_quota.of(unit * UP_STEPS), u = unit / UP_UNITS, first = u * BLOCKS + unit % UP_UNITS * UP_GROUP;
#pragma unroll 1
    for (int i = threadIdx.x; i < tokens * UP_GROUP * 128; i += THREADS) {
      int row = i % 128, block = i / 128 % UP_GROUP, token = i / (128 * UP_GROUP);
      if (s.schedule.tokens[u] >> token & 1)
        scratch->up[first + block][part][token][row] = from_half_range(s.x_max[token] >> 7) * sum_of_warps<UP_GROUP>(s.sums, block, token, row);
    }
    __syncthreads();
  }

  let_consumer_start();  // not before: its weights would compete with ours
  arrive_at(scratch->barrier[2]);
  fetch_item<SHARED_INTER>(item, shared_w2, blockIdx.x * SHARED_DOWN_QUOTA + warp, SHARED_DOWN_TILES);
  wait_at(scratch->barrier[2]);
  if (blockIdx.x == 0 && threadIdx.x < 2) scratch->barrier[threadIdx.x][0] = 0;  // nobody waits there any more
  stage_shared(s, scratch, tokens);

  // All activations at once if they fit, else in rounds that fit even if every expert is used by every token.
  bool fits = pairs_before(s.schedule, work, work.down_end) - pairs_before(s.schedule, work, work.down) <= ACT_PIECES;
  int round = fits ? work.down_quota.d : ACT_PIECES / TOKENS, unit = work.row.of(work.down);
  step = work.down + warp / DOWN_GROUP;
  float acc[4][4] = {};
#pragma unroll 1
  for (int begin = work.down;; begin += round) {
    int end = min(begin + round, work.down_end), first_pair = pairs_before(s.schedule, work, begin);
    stage_routed(s, scratch, work, begin, end, first_pair, limit);
    __syncthreads();
    if (begin == work.down)
      shared_items<SHARED_INTER, SHARED_DOWN_TILES, SHARED_DOWN_QUOTA>(s.shared_sums, item, shared_w2, shared_s2, s.act.shared,
                                                                       SHARED_ACT_STRIDE, tokens);
#pragma unroll 1
    while (begin < end) {
      int unit_end = (unit + 1) * work.row.d, stop = min(end, unit_end);
#pragma unroll 1
      for (; step < stop; step += DOWN_LANES) {
        const uint4 *at = next_slot();
        uint32_t mask = s.schedule.tokens[(step - unit * work.row.d) / BLOCKS];
        int pair = pairs_before(s.schedule, work, step) - first_pair;
        bool mine = mask >> g & 1;
        const uint4 *act = (const uint4 *)s.act.routed[pair + (mine ? __popc(mask & ((1u << g) - 1)) : 0)] + t;
        float sum[4][4] = {};
#pragma unroll
        for (int h = 0; h < 2; h++) {
          uint4 b = make_uint4(0u, 0u, 0u, 0u);
          if (mine) b = act[h * 4];
          step_e2m1(sum, at[h * 64 + lane], at[h * 64 + 32 + lane], *((const uint2 *)(at + 128 + h * 4) + g), b);
        }
        // Columns 2 t and 2 t + 1; an unused one holds zeros, whatever its factor.
        const float *scale = s.act.scale + pair + __popc(mask & ((1u << 2 * t) - 1));
        float even = mask >> 2 * t & 1 ? scale[0] : 0.f, odd = mask >> (2 * t + 1) & 1 ? scale[mask >> 2 * t & 1] : 0.f;
#pragma unroll
        for (int i = 0; i < 16; i++)
          if (TOKENS > 1 || (i & 1) == 0) acc[i / 4][i % 4] += (i & 1 ? odd : even) * sum[i / 4][i % 4];
        __syncwarp();
        stream.fetch(s, work);
      }
      if (stop == unit_end || stop == work.down_end) {
        store_sums(s.sums, acc, 0);
        __syncthreads();
        int part = blockIdx.x - work.down_quota.of(unit * work.row.d);
#pragma unroll 1
        for (int i = threadIdx.x; i < tokens * DOWN_GROUP * 64; i += THREADS) {
          int row = i % 64, block = i / 64 % DOWN_GROUP, token = i / (64 * DOWN_GROUP);
          scratch->down[unit * DOWN_GROUP + block][part][token][row] = sum_of_warps<DOWN_GROUP>(s.sums, block, token, row);
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < 16; i++) acc[i / 4][i % 4] = 0.f;
        unit++;
      }
      if (stop == end) break;
    }
    if (end == work.down_end) break;
    __syncthreads();
  }
  __syncthreads();
  store_shared_parts<SHARED_INTER, SHARED_DOWN_TILES, SHARED_DOWN_QUOTA>(s.shared_sums, scratch->shared_down, tokens);

  // Tell each unit of the output how much of it is done; whoever completes one adds its parts.
  constexpr int UNIT_ITEMS = DOWN_GROUP * 4 * SHARED_DOWN_ITEMS;
  int row_steps = work.pairs ? work.row.d : 0;
  int item_begin = min((int)blockIdx.x * SHARED_DOWN_QUOTA, SHARED_DOWN_TILES * SHARED_DOWN_ITEMS);
  int item_end = min(item_begin + SHARED_DOWN_QUOTA, SHARED_DOWN_TILES * SHARED_DOWN_ITEMS);
  if (threadIdx.x == 0) s.finished_count = 0;
  __syncthreads();
#pragma unroll 1
  for (int u = threadIdx.x; u < DOWN_UNITS; u += THREADS) {
    int amount = overlap(work.down, work.down_end, u, row_steps) + overlap(item_begin, item_end, u, UNIT_ITEMS);
    if (amount == 0) continue;
    __threadfence();
    bool last = (int)atomicAdd(&scratch->done[u], (uint32_t)amount) + amount == row_steps + UNIT_ITEMS;
    __threadfence();
    if (last) s.finished[atomicAdd(&s.finished_count, 1)] = u;
  }
  __syncthreads();
#pragma unroll 1
  for (int f = 0; f < s.finished_count; f++) {
    finish_unit(scratch, work, s.finished[f], residual, out, tokens);
    if (threadIdx.x == 0) scratch->done[s.finished[f]] = 0;
  }
}
