// SPDX-License-Identifier: Apache-2.0
// One MoE block for 1 to 8 tokens in one launch: if asked for the RMSNorm before it, router, routed MXFP4 experts, block-FP8
// shared expert, weighted sum.
//
// One CTA per SM works through all phases, all of them at once on the GPU, and each weight byte is read once:
//   logits of the CTA's gate rows | gate_up of the shared expert | top-k, by every CTA for itself | gate_up of the routed experts |
//   activations | down | the sum of all parts of the CTA's share of the output.
// There are no barriers between CTAs: what one hands to another carries a tag (see tagged.cuh), and who needs it waits for just that.
// Nothing can wait for ever, as what a phase waits for was stored in a phase before it, by CTAs that wait for none after it.
// The work of a phase is cut into equal ranges of steps, whatever expert they belong to. Each warp streams its pieces through
// a ring in shared memory that runs on from gate_up into down, so that memory stays busy in between.
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
#include "moe_finish.cuh"

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
  fetch_item<HIDDEN>(item, shared_w13, shared_s13, blockIdx.x * SHARED_UP_QUOTA + warp, SHARED_UP_TILES);
  for (int i = threadIdx.x; i < EXPERTS / 4; i += THREADS) copy_async((uint4 *)s.bias + i, (const uint4 *)bias + i);
  commit_copies();
  if (threadIdx.x < TOKENS) s.x_max[threadIdx.x] = 0;
  prepare_route(s);
  XRows norm;
  if (norm_weight) norm.load_weight(norm_weight);
  __syncthreads();
  wait_for_producer();
  uint32_t epoch = threadIdx.x == 0 ? load_fresh(&scratch->epoch) : 0u;
  stage_x8(s, x, norm_weight, norm, eps, tokens);
  if (threadIdx.x == 0) s.tag = next_tag(epoch);
  __syncthreads();
  uint32_t tag = s.tag;
  router_logits(s, scratch, gate, gate_part, tokens, tag);
  shared_items<HIDDEN, SHARED_UP_TILES, SHARED_UP_QUOTA>(s.sums, item, shared_w13, shared_s13, s.x8, X8_STRIDE, tokens);
  stage_x(s, tokens);
  wait_copies<0>();  // the bias
  __syncthreads();
  store_shared_parts<HIDDEN, SHARED_UP_TILES, SHARED_UP_QUOTA>(s.sums, scratch->shared_up, tokens, tag);
  route(s, scratch, expert_map, topk_weights, topk_ids, tokens, scaling, tag);
  if (blockIdx.x == 0 && threadIdx.x == 0) store_epoch(&scratch->epoch, tag);  // all CTAs have read it, or we would not be here

  int unique = s.schedule.unique;
  Work work(unique, s.schedule.before[unique], s.splits[unique], blockIdx.x);
  Stream stream = {w13, s13, w2, s2, work.up + warp / UP_GROUP, 0, false};
#pragma unroll 1
  for (int i = 0; i < STAGES; i++) stream.fetch(s, work);
  if (warp == WARPS - 1) activate_shared(scratch, tokens, shared_limit, tag);  // the last warp has the fewest pieces
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
    int part = blockIdx.x - work.first_up(unit), u = unit / UP_UNITS, first = u * BLOCKS + unit % UP_UNITS * UP_GROUP;
#pragma unroll 1
    for (int i = threadIdx.x; i < tokens * UP_GROUP * 128; i += THREADS) {
      int row = i % 128, block = i / 128 % UP_GROUP, token = i / (128 * UP_GROUP);
      if (s.schedule.tokens[u] >> token & 1) {
        float sum = from_half_range(s.x_max[token] >> 7) * sum_of_warps<UP_GROUP>(s.sums, block, token, row);
        store_tagged(&scratch->up[(first + block) * work.up_parts + part][token][row], __float_as_uint(sum), tag);
      }
    }
    if ((unit + 1) * UP_STEPS < work.up_end) __syncthreads();
  }

  let_consumer_start();  // not before: its weights would compete with ours
  fetch_item<SHARED_INTER>(item, shared_w2, shared_s2, blockIdx.x * SHARED_DOWN_QUOTA + warp, SHARED_DOWN_TILES);
  stage_shared(s, scratch, tokens, tag);

  // All activations at once if they fit, else in rounds that fit even if every expert is used by every token. The first round comes
  // before there are sums to keep, and `item` is used after it: registers are few while the words of many parts are on their way.
  constexpr bool ONE_ROUND = TOKENS * down_quota(MAX_UNIQUE) <= ACT_PIECES;
  bool fits = ONE_ROUND || pairs_before(s.schedule, work, work.down_end) - pairs_before(s.schedule, work, work.down) <= ACT_PIECES;
  int round = fits ? work.down_quota.d : ACT_PIECES / TOKENS, unit = work.row.of(work.down), end, first_pair;
  auto stage = [&](int begin) {
    end = min(begin + round, work.down_end), first_pair = pairs_before(s.schedule, work, begin);
    stage_routed(s, scratch, work, begin, end, first_pair, limit, tag);
    __syncthreads();
  };
  stage(work.down);
  item.use_from_here();
  shared_items<SHARED_INTER, SHARED_DOWN_TILES, SHARED_DOWN_QUOTA>(s.shared_sums, item, shared_w2, shared_s2, s.act.shared, SHARED_ACT_STRIDE,
                                                                   tokens);
  step = work.down + warp / DOWN_GROUP;
  float acc[4][4] = {};
#pragma unroll 1
  while (true) {  // up to the end of a unit or of a round; once even without steps, for the barrier after shared_items
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
      int part = blockIdx.x - work.first_down(unit), count = work.down < work.down_end ? tokens * DOWN_GROUP * 64 : 0;
#pragma unroll 1
      for (int i = threadIdx.x; i < count; i += THREADS) {
        int row = i % 64, block = i / 64 % DOWN_GROUP, token = i / (64 * DOWN_GROUP);
        float sum = sum_of_warps<DOWN_GROUP>(s.sums, block, token, row);
        store_tagged(&scratch->down[unit * DOWN_GROUP + block][part][token][row], __float_as_uint(sum), tag);
      }
      if (stop == work.down_end) break;
      __syncthreads();
#pragma unroll
      for (int i = 0; i < 16; i++) acc[i / 4][i % 4] = 0.f;
      unit++;
    }
    if (!ONE_ROUND && stop == end) {
      __syncthreads();
      stage(end);
    }
  }
  store_shared_parts<SHARED_INTER, SHARED_DOWN_TILES, SHARED_DOWN_QUOTA>(s.shared_sums, scratch->shared_down, tokens, tag);
  finish(scratch, work, residual, out, tokens, tag);
}
