// SPDX-License-Identifier: Apache-2.0
// One MoE block for 1 to 8 tokens in one launch: router, routed MXFP4 experts, block-FP8 shared expert, weighted sum.
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

__device__ __forceinline__ float swiglu(float gate, float up, float limit) {
  float s = gate / (1.f + __expf(-gate));
  if (limit > 0.f) {
    s = fminf(s, limit);
    up = fminf(fmaxf(up, -limit), limit);
  }
  return s * up;
}
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  return (uint32_t)to_bf16(low).bits | (uint32_t)to_bf16(high).bits << 16;
}
__device__ __forceinline__ void add(float4 &sum, const float4 &v) { sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w; }

__device__ __forceinline__ float low_of(uint32_t bf16x2) { return __uint_as_float(bf16x2 << 16); }
__device__ __forceinline__ float high_of(uint32_t bf16x2) { return __uint_as_float(bf16x2 & 0xFFFF0000u); }

// x as FP8 needs it (0, 2, 1, 3 within each four), and its largest magnitude. s.x_max starts at zero.
__device__ __forceinline__ void stage_x8(Shared &s, const bf16_t *x, int tokens) {
  constexpr int ROUNDS = ceil_div(TOKENS * (HIDDEN / 4), THREADS);
  uint2 v[ROUNDS];
#pragma unroll
  for (int r = 0; r < ROUNDS; r++) {
    int i = threadIdx.x + r * THREADS;
    v[r] = i < tokens * (HIDDEN / 4) ? *((const uint2 *)x + i) : make_uint2(0u, 0u);
  }
#pragma unroll
  for (int r = 0; r < ROUNDS; r++) {
    int i = threadIdx.x + r * THREADS, token = i / (HIDDEN / 4);
    if (i >= tokens * (HIDDEN / 4)) break;  // whole warps, as a row is
    *(uint2 *)(s.x8 + token * X8_STRIDE + i % (HIDDEN / 4) * 4) =
        make_uint2(__byte_perm(v[r].x, v[r].y, 0x5410), __byte_perm(v[r].x, v[r].y, 0x7632));
    uint32_t most = max(max(v[r].x & 0x7FFFu, v[r].x >> 16 & 0x7FFFu), max(v[r].y & 0x7FFFu, v[r].y >> 16 & 0x7FFFu));
    most = __reduce_max_sync(~0u, most);
    if ((threadIdx.x & 31) == 0) atomicMax(&s.x_max[token], most);
  }
}

// From that, x in fragment order: of 32 values, number 8 j + 2 t + i goes to 8 t + 2 j + i, so that lane t reads its 8 values
// as one word.
__device__ __forceinline__ void stage_x(Shared &s, int tokens) {
#pragma unroll 1
  for (int i = threadIdx.x; i < tokens * (HIDDEN / 4); i += THREADS) {
    int token = i / (HIDDEN / 4), k = i % (HIDDEN / 4) * 4, m = k % 32 / 4;
    float f = to_half_range(s.x_max[token] >> 7);
    uint2 v = *(const uint2 *)(s.x8 + token * X8_STRIDE + k);
    unsigned short *at = s.x + token * X_STRIDE + k / 32 * 32 + (m & 1) * 16 + m / 2 * 2;
    *(uint32_t *)at = pack_f16(f * low_of(v.x), f * low_of(v.y));
    *(uint32_t *)(at + 8) = pack_f16(f * high_of(v.x), f * high_of(v.y));
  }
}

// The steps of this CTA: gate_up steps [up, up_end) of experts x UP_UNITS x UP_STEPS, down steps [down, down_end) of
// DOWN_UNITS x experts x BLOCKS.
struct Work {
  Divisor up_quota, down_quota, row;  // steps per CTA in gate_up and down; down steps of a unit
  int up, up_end, down, down_end, pairs;
  __device__ __forceinline__ Work(const Schedule &s, const Divisor divisors[3])
      : up_quota(divisors[0]), down_quota(divisors[1]), row(divisors[2]) {
    int all = s.unique * UP_UNITS * UP_STEPS;
    up = min((int)(blockIdx.x * up_quota.d), all), up_end = min(up + (int)up_quota.d, all);
    all = DOWN_UNITS * s.unique * BLOCKS;
    down = min((int)(blockIdx.x * down_quota.d), all), down_end = min(down + (int)down_quota.d, all);
    pairs = s.before[s.unique] * BLOCKS;
  }
};

// A warp's weights: its gate_up pieces, then its down pieces, STAGES of them on their way at any time.
struct Stream {
  const uint8_t *w13, *s13, *w2, *s2;
  int step, slot;  // the next to ask for
  bool down;

  __device__ __forceinline__ void fetch(Shared &s, const Work &work) {
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    uint8_t *at = (uint8_t *)s.ring[warp][slot] + lane * 16;
    slot = slot + 1 == STAGES ? 0 : slot + 1;
    if (!down && step >= work.up_end) down = true, step = work.down + warp / DOWN_GROUP;
    if (!down) {
      int unit = step / UP_STEPS, k = step % UP_STEPS, block = unit % UP_UNITS * UP_GROUP + warp % UP_GROUP;
      long long expert = s.schedule.expert[unit / UP_UNITS];
      const uint8_t *codes = w13 + expert * (HIDDEN * INTER) + (k * 4 * BLOCKS + block) * 512 + lane * 16;
#pragma unroll
      for (int i = 0; i < 4; i++)  // gate of both 16-k halves, up of both
        copy_async(at + i * 512, codes + ((i & 1) * (2 * BLOCKS) + (i >> 1) * BLOCKS) * 512);
      if (lane < 8)
        copy_async(at + 2048, s13 + expert * (HIDDEN * INTER / 16) + (k * 2 * BLOCKS + block) * 64 + (lane >> 2) * (BLOCKS * 64) + (lane & 3) * 16);
      step += UP_LANES;
    } else if (step < work.down_end) {
      int unit = work.row.of(step), rest = step - unit * work.row.d, k = rest % BLOCKS, rows = unit * DOWN_GROUP + warp % DOWN_GROUP;
      long long expert = s.schedule.expert[rest / BLOCKS];
      const uint8_t *codes = w2 + expert * (HIDDEN * INTER / 2) + (k * 4 * OUT_BLOCKS + rows) * 512 + lane * 16;
#pragma unroll
      for (int i = 0; i < 4; i++) copy_async(at + i * 512, codes + i * OUT_BLOCKS * 512);
      if (lane < 8)
        copy_async(at + 2048, s2 + expert * (HIDDEN * INTER / 32) + (k * 2 * OUT_BLOCKS + rows) * 64 + (lane >> 2) * (OUT_BLOCKS * 64) + (lane & 3) * 16);
      step += DOWN_LANES;
    }
    commit_copies();
  }
};

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

// (expert, token) pairs of all down steps before step p; where the activations of a step lie follows from it.
__device__ __forceinline__ int pairs_before(const Schedule &s, const Work &work, int p) {
  int unit = work.row.of(p), rest = p - unit * work.row.d, u = min(rest / BLOCKS, MAX_UNIQUE - 1);
  return unit * work.pairs + s.before[u] * BLOCKS + rest % BLOCKS * __popc(s.tokens[u]);
}

// Activations of down steps [begin, end): SwiGLU of the gate_up parts times the routing weight, in fragment order.
__device__ __forceinline__ void stage_routed(Shared &s, const Scratch *scratch, const Work &work, int begin, int end, int first_pair,
                                             float limit) {
  // 16 lanes a step with one quad of rows each, or with many tokens 8 lanes with two.
  constexpr int QUADS = TOKENS > 4 ? 2 : 1, LANES = 16 / QUADS, AT_ONCE = UP_PARTS < 4 ? UP_PARTS : 4;
  int lane = threadIdx.x & 31, j = lane % LANES;
  uint32_t lanes = ((1u << LANES) - 1) << (lane & ~(LANES - 1));
#pragma unroll 1
  for (int step = begin + threadIdx.x / LANES; step < end; step += THREADS / LANES) {
    int index = step - work.row.of(step) * work.row.d, u = index / BLOCKS, unit = u * UP_UNITS + index % BLOCKS / UP_GROUP;
    uint32_t mask = s.schedule.tokens[u];
    int pair = pairs_before(s.schedule, work, step) - first_pair;
    int count = work.up_quota.of(unit * UP_STEPS + UP_STEPS - 1) - work.up_quota.of(unit * UP_STEPS) + 1;
#pragma unroll 1
    for (; mask; mask &= mask - 1, pair++) {
      int token = __ffs(mask) - 1;
      float4 gate[QUADS] = {}, up[QUADS] = {};
#pragma unroll 1
      for (int first = 0; first < count; first += AT_ONCE) {
        float4 g[AT_ONCE][QUADS], p[AT_ONCE][QUADS];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
          const float4 *part = (const float4 *)scratch->up[index][min(first + i, UP_PARTS - 1)][token] + j * QUADS;
#pragma unroll
          for (int q = 0; q < QUADS; q++) {
            g[i][q] = first + i < count ? load_fresh(part + q) : make_float4(0.f, 0.f, 0.f, 0.f);
            p[i][q] = first + i < count ? load_fresh(part + 16 + q) : make_float4(0.f, 0.f, 0.f, 0.f);
          }
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
#pragma unroll
          for (int q = 0; q < QUADS; q++) add(gate[q], g[i][q]), add(up[q], p[i][q]);
      }
      float w = s.schedule.weight[u][token], v[4 * QUADS], most = 0.f;
#pragma unroll
      for (int q = 0; q < QUADS; q++) {
        v[q * 4] = w * swiglu(gate[q].x, up[q].x, limit), v[q * 4 + 1] = w * swiglu(gate[q].y, up[q].y, limit);
        v[q * 4 + 2] = w * swiglu(gate[q].z, up[q].z, limit), v[q * 4 + 3] = w * swiglu(gate[q].w, up[q].w, limit);
      }
#pragma unroll
      for (int i = 0; i < 4 * QUADS; i++) most = fmaxf(most, fabsf(v[i]));
      uint32_t e = __reduce_max_sync(lanes, __float_as_uint(most)) >> 23;
      float f = to_half_range(e);
      if (j == 0) s.act.scale[pair] = from_half_range(e);
      int row = j * 4 * QUADS;  // rows 8 n + 2 t + i go to 8 t + 2 n + i of each 32
      unsigned short *at = s.act.routed[pair] + row / 32 * 32 + row % 32 / 8 * 2 + row % 8 / 2 * 8;
#pragma unroll
      for (int t = 0; t < 2 * QUADS; t++) *(uint32_t *)(at + t * 8) = pack_f16(f * v[2 * t], f * v[2 * t + 1]);
    }
  }
}

// SwiGLU of the shared expert, four values a lane, by one warp of each CTA, once all its parts are there.
__device__ __forceinline__ void activate_shared(Scratch *scratch, int tokens, float limit) {
  const uint32_t *counter = scratch->barrier[1];
  while (load_acquire(counter) < GRID) {}
  __syncwarp();
#pragma unroll 1
  for (int i = (threadIdx.x & 31) * GRID + blockIdx.x; i < tokens * (SHARED_INTER / 4); i += 32 * GRID) {
    int token = i / (SHARED_INTER / 4), row = i % (SHARED_INTER / 4) * 4;
    float4 gate = shared_sum<SHARED_UP_ITEMS, SHARED_UP_QUOTA>(scratch->shared_up, row, token);
    float4 up = shared_sum<SHARED_UP_ITEMS, SHARED_UP_QUOTA>(scratch->shared_up, SHARED_INTER + row, token);
    uint32_t low = pack_bf16(swiglu(gate.x, up.x, limit), swiglu(gate.z, up.z, limit));
    uint32_t high = pack_bf16(swiglu(gate.y, up.y, limit), swiglu(gate.w, up.w, limit));
    scratch->shared_act[token][row / 4] = make_uint2(low, high);
  }
}
__device__ __forceinline__ void stage_shared(Shared &s, const Scratch *scratch, int tokens) {
  constexpr int WORDS = SHARED_INTER / 8;
#pragma unroll 1
  for (int i = THREADS - 1 - threadIdx.x; i < tokens * WORDS; i += THREADS)  // the last threads: stage_routed uses the first
    *(uint4 *)(s.act.shared + i / WORDS * SHARED_ACT_STRIDE + i % WORDS * 8) = load_fresh((const uint4 *)scratch->shared_act + i);
}

// How much of [begin, end) belongs to a unit that owns `size` consecutive numbers.
__device__ __forceinline__ int overlap(int begin, int end, int unit, int size) {
  return max(0, min(end, (unit + 1) * size) - max(begin, unit * size));
}

// Adds all parts of a unit of the output and writes it.
__device__ __forceinline__ void finish_unit(const Scratch *scratch, const Work &work, int unit, const bf16_t *residual, bf16_t *out,
                                            int tokens) {
  constexpr int QUADS = DOWN_GROUP * 16, AT_ONCE = DOWN_PARTS < 8 ? DOWN_PARTS : 8;
  int begin = unit * work.row.d;
  int parts = work.pairs ? work.down_quota.of(begin + work.row.d - 1) - work.down_quota.of(begin) + 1 : 0;
#pragma unroll 1
  for (int i = threadIdx.x; i < tokens * QUADS; i += THREADS) {
    int token = i / QUADS, block = unit * DOWN_GROUP + i % QUADS / 16, row = i % 16 * 4;
    float4 sum = shared_sum<SHARED_DOWN_ITEMS, SHARED_DOWN_QUOTA>(scratch->shared_down, block * 64 + row, token);
#pragma unroll 1
    for (int first = 0; first < parts; first += AT_ONCE) {
      float4 part[AT_ONCE];
#pragma unroll
      for (int p = 0; p < AT_ONCE; p++)
        part[p] = first + p < parts ? load_fresh((const float4 *)&scratch->down[block][min(first + p, DOWN_PARTS - 1)][token][row])
                                    : make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
      for (int p = 0; p < AT_ONCE; p++) add(sum, part[p]);
    }
    size_t at = (size_t)token * HIDDEN + block * 64 + row;
    if (residual) {
      uint2 r = *(const uint2 *)(residual + at);
      add(sum, make_float4(low_of(r.x), high_of(r.x), low_of(r.y), high_of(r.y)));
    }
    *(uint2 *)(out + at) = make_uint2(pack_bf16(sum.x, sum.y), pack_bf16(sum.z, sum.w));
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    moe_block(const bf16_t *__restrict__ x, const bf16_t *residual, const GATE_TYPE *__restrict__ gate,
              const float *__restrict__ bias, const int *__restrict__ expert_map, const uint8_t *__restrict__ w13,
              const uint8_t *__restrict__ s13, const uint8_t *__restrict__ w2, const uint8_t *__restrict__ s2,
              const uint8_t *__restrict__ shared_w13, const float *__restrict__ shared_s13, const uint8_t *__restrict__ shared_w2,
              const float *__restrict__ shared_s2, Scratch *scratch, bf16_t *out, float *__restrict__ topk_weights,
              int *__restrict__ topk_ids, int tokens, float scaling, float limit, float shared_limit) {
  extern __shared__ uint4 dynamic[];
  Shared &s = *(Shared *)dynamic;
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  let_consumer_start();

  // Weights do not depend on the producer: ask for them before waiting for x.
  float4 gate_part[GATE_PIECES];
  SharedItem item;
  fetch_gate(gate_part, gate, 0);
  fetch_item<HIDDEN>(item, shared_w13, blockIdx.x * SHARED_UP_QUOTA + warp, SHARED_UP_TILES);
  for (int i = threadIdx.x; i < EXPERTS / 4; i += THREADS) copy_async((uint4 *)s.bias + i, (const uint4 *)bias + i);
  commit_copies();
  if (threadIdx.x < TOKENS) s.x_max[threadIdx.x] = 0;
  __syncthreads();
  wait_for_producer();
  if (blockIdx.x == 0 && threadIdx.x == 0) scratch->barrier[2][0] = 0;  // the launch before is over
  stage_x8(s, x, tokens);
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
