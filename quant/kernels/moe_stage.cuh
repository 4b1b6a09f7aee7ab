// SPDX-License-Identifier: Apache-2.0
// Puts into shared memory what the tensor-core steps multiply the weights with: x, then the activations.
#pragma once
#include "moe_shape.cuh"
#include "moe_shared.cuh"
#include "norm.cuh"
#include "moe_work.cuh"

__device__ __forceinline__ float swiglu(float gate, float up, float limit) {
  float s = gate / (1.f + __expf(-gate));
  if (limit > 0.f) {
    s = fminf(s, limit);
    up = fminf(fmaxf(up, -limit), limit);
  }
  return s * up;
}

// x (or its RMSNorm) as FP8 needs it, and its largest magnitude. s.x_max starts at zero.
typedef Rows<TOKENS, HIDDEN, THREADS> XRows;
__device__ __forceinline__ void stage_x8(Shared &s, const bf16_t *x, bool normalize, const XRows &norm, float eps, int tokens) {
  XRows rows;
  rows.load(x, tokens);
  if (normalize) rows.normalize(norm, s.sums, eps);
#pragma unroll
  for (int r = 0; r < XRows::ROUNDS; r++) {
    int i = XRows::quad(r), token = i / XRows::QUADS;
    if (i >= tokens * XRows::QUADS) break;  // whole warps, as a row is
    uint2 v = rows.v[r];
    *(uint2 *)(s.x8 + token * X8_STRIDE + i % XRows::QUADS * 4) = in_fp8_order(v);
    uint32_t most = max(max(v.x & 0x7FFFu, v.x >> 16 & 0x7FFFu), max(v.y & 0x7FFFu, v.y >> 16 & 0x7FFFu));
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

// Activations of down steps [begin, end): SwiGLU of the gate_up parts times the routing weight, in fragment order.
__device__ __forceinline__ void stage_routed(Shared &s, const Scratch *scratch, const Work &work, int begin, int end, int first_pair,
                                             float limit, uint32_t tag) {
  // With few tokens a CTA has few steps, of many parts; with many the reverse. So 32 lanes a step, each with a pair of its rows,
  // down to 8 with four; what is on its way together fills about 64 registers.
  constexpr int EACH = TOKENS > 4 ? 4 : TOKENS > 2 ? 2 : 1, LANES = 32 / EACH, AT_ONCE = UP_PARTS < 8 / EACH ? UP_PARTS : 8 / EACH;
  int lane = threadIdx.x & 31, j = lane % LANES;
  uint32_t lanes = LANES == 32 ? ~0u : ((1u << LANES % 32) - 1) << (lane & ~(LANES - 1));
#pragma unroll 1
  for (int step = begin + threadIdx.x / LANES; step < end; step += THREADS / LANES) {
    int index = step - work.row.of(step) * work.row.d, u = index / BLOCKS, unit = u * UP_UNITS + index % BLOCKS / UP_GROUP;
    uint32_t mask = s.schedule.tokens[u];
    int pair = pairs_before(s.schedule, work, step) - first_pair;
    int count = work.count_up(unit);
#pragma unroll 1
    for (; mask; mask &= mask - 1, pair++) {
      int token = __ffs(mask) - 1;
      const Tagged *parts = scratch->up[index * work.up_parts][token] + 2 * j;
      float gate[2 * EACH] = {}, up[2 * EACH] = {};
#pragma unroll 1
      for (int first = 0; first < count; first += AT_ONCE) {
        constexpr int HALVES = 2 * EACH;  // of a part: pairs of gate rows, then of up rows
        WordPair word[AT_ONCE * HALVES];
#pragma unroll
        for (int i = 0; i < AT_ONCE * HALVES; i++) word[i].start(first + i / HALVES < count, tag);
        const Tagged *at = parts + first * TOKENS * 128;
        wait_tagged(word, tag, [&](int i) { return at + i / HALVES * TOKENS * 128 + i % HALVES / EACH * 64 + i % EACH * LANES * 2; });
#pragma unroll
        for (int i = 0; i < AT_ONCE * HALVES; i++) {
          float *sum = (i % HALVES / EACH ? up : gate) + i % EACH * 2;
          sum[0] += word[i].first.value(), sum[1] += word[i].second.value();
        }
      }
      float w = s.schedule.weight[u][token], most = 0.f;
#pragma unroll
      for (int i = 0; i < 2 * EACH; i++) gate[i] = w * swiglu(gate[i], up[i], limit), most = fmaxf(most, fabsf(gate[i]));
      uint32_t e = __reduce_max_sync(lanes, __float_as_uint(most)) >> 23;
      float f = to_half_range(e);
      if (j == 0) s.act.scale[pair] = from_half_range(e);
#pragma unroll
      for (int i = 0; i < EACH; i++) {  // rows 8 n + 2 t + {0, 1} go to 8 t + 2 n of each 32
        int row = (i * LANES + j) * 2;
        unsigned short *to = s.act.routed[pair] + row / 32 * 32 + row % 32 / 8 * 2 + row % 8 / 2 * 8;
        *(uint32_t *)to = pack_f16(f * gate[2 * i], f * gate[2 * i + 1]);
      }
    }
  }
}

// SwiGLU of the shared expert, four values a lane, by one warp of each CTA.
__device__ __forceinline__ void activate_shared(Scratch *scratch, int tokens, float limit, uint32_t tag) {
  constexpr int QUADS = SHARED_INTER / 4;
#pragma unroll 1
  for (int i = (threadIdx.x & 31) * GRID + blockIdx.x; i < tokens * QUADS; i += 32 * GRID) {
    int token = i / QUADS, row = i % QUADS * 4, tile = row / 16;
    // Of each part, pairs 0 and 1 of the gate rows, then of the up rows, whose tiles may have different numbers of parts.
    WordPair word[SHARED_PARTS * 4];
    int count[2] = {shared_parts<SHARED_UP_ITEMS, SHARED_UP_QUOTA>(tile), shared_parts<SHARED_UP_ITEMS, SHARED_UP_QUOTA>(SHARED_INTER / 16 + tile)};
#pragma unroll
    for (int n = 0; n < SHARED_PARTS * 4; n++) word[n].start(n / 4 < count[n % 4 / 2], tag);
    wait_tagged(word, tag, [&](int n) { return &scratch->shared_up[n % 4 / 2 * (SHARED_INTER / 16) + tile][n / 4][token][row % 16 + n % 2 * 2]; });
    float v[8] = {};  // gate 0 to 3, up 0 to 3
#pragma unroll
    for (int n = 0; n < SHARED_PARTS * 4; n++)
      v[n % 4 * 2] += word[n].first.value(), v[n % 4 * 2 + 1] += word[n].second.value();
    uint32_t even = pack_bf16(swiglu(v[0], v[4], limit), swiglu(v[2], v[6], limit));
    uint32_t odd = pack_bf16(swiglu(v[1], v[5], limit), swiglu(v[3], v[7], limit));
    store_tagged(&scratch->shared_act[token][row / 2], even, odd, tag);
  }
}
__device__ __forceinline__ void stage_shared(Shared &s, const Scratch *scratch, int tokens, uint32_t tag) {
  constexpr int QUADS = SHARED_INTER / 4, ROUNDS = ceil_div(TOKENS * QUADS, THREADS), AT_ONCE = ROUNDS < 4 ? ROUNDS : 4;
  int begin = THREADS - 1 - threadIdx.x;  // the last threads: stage_routed uses the first
#pragma unroll 1
  for (int first = begin; first < tokens * QUADS; first += AT_ONCE * THREADS) {
    WordPair word[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) word[i].start(first + i * THREADS < tokens * QUADS, tag);
    wait_tagged(word, tag, [&](int i) { return scratch->shared_act[0] + (first + i * THREADS) * 2; });
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      int quad = first + i * THREADS;
      if (quad < tokens * QUADS) *(uint2 *)(s.act.shared + quad / QUADS * SHARED_ACT_STRIDE + quad % QUADS * 4) = make_uint2(word[i].first.word, word[i].second.word);
    }
  }
}
