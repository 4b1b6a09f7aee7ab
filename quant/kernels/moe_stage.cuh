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
__device__ __forceinline__ void add(float4 &sum, const float4 &v) { sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w; }

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
                                             float limit) {
  // 16 lanes a step with one quad of rows each, or with many tokens 8 lanes with two.
  constexpr int QUADS = TOKENS > 4 ? 2 : 1, LANES = 16 / QUADS, MOST = TOKENS == 1 ? 8 : 4,
                AT_ONCE = UP_PARTS < MOST ? UP_PARTS : MOST;  // parts on their way together; fewer with many tokens, of which a unit has fewer
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
