// SPDX-License-Identifier: Apache-2.0
// Which steps of the routed experts a CTA takes, and the stream of their weights.
#pragma once
#include "moe_shape.cuh"

// The steps of a CTA: gate_up steps [up, up_end) of experts x UP_UNITS x UP_STEPS, down steps [down, down_end) of
// DOWN_UNITS x experts x BLOCKS.
struct Work {
  Divisor up_quota, down_quota, row;  // steps per CTA in gate_up and down; down steps of a unit
  int up, up_end, down, down_end, pairs, up_parts;
  __device__ constexpr Work(int unique, int pairs_of_step, const Split &split, int cta)
      : up_quota(split.up), down_quota(split.down), row(split.row), up(first(cta, split.up, up_steps(unique))),
        up_end(first(cta + 1, split.up, up_steps(unique))), down(first(cta, split.down, down_steps(unique))),
        down_end(first(cta + 1, split.down, down_steps(unique))), pairs(pairs_of_step * BLOCKS), up_parts(split.parts) {}

  // The CTAs with steps of a unit are first, first + 1, ...; CTA `first + i` stores part i of its sums.
  __device__ constexpr int first_up(int unit) const { return up_quota.of(unit * UP_STEPS); }
  __device__ constexpr int count_up(int unit) const { return up_quota.of(unit * UP_STEPS + UP_STEPS - 1) - first_up(unit) + 1; }
  __device__ constexpr int first_down(int unit) const { return down_quota.of(unit * (int)row.d); }
  __device__ constexpr int count_down(int unit) const {
    return pairs ? down_quota.of(unit * (int)row.d + (int)row.d - 1) - first_down(unit) + 1 : 0;
  }

  static __device__ constexpr int up_steps(int unique) { return unique * UP_UNITS * UP_STEPS; }
  static __device__ constexpr int down_steps(int unique) { return DOWN_UNITS * unique * BLOCKS; }
  static __device__ constexpr int first(int cta, const Divisor &quota, int steps) { return cta * (int)quota.d < steps ? cta * (int)quota.d : steps; }
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

// (expert, token) pairs of all down steps before step p; where the activations of a step lie follows from it.
__device__ __forceinline__ int pairs_before(const Schedule &s, const Work &work, int p) {
  int unit = work.row.of(p), rest = p - unit * work.row.d, u = min(rest / BLOCKS, MAX_UNIQUE - 1);
  return unit * work.pairs + s.before[u] * BLOCKS + rest % BLOCKS * __popc(s.tokens[u]);
}
