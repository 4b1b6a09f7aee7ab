// SPDX-License-Identifier: Apache-2.0
// The output: some CTAs add the parts of their share of all values, whichever CTAs they come from. The others end before them and
// make room for the next launch, which has weights to ask for.
#pragma once
#include "moe_shared.cuh"
#include "moe_work.cuh"
#include "norm.cuh"

// A team of lanes per pair of neighbouring values: as many as the threads allow, since each word is a trip to L2.
constexpr int FINISH_SHARE = ceil_div(TOKENS * (HIDDEN / 2), FINISHERS);
__device__ constexpr int team_of(int lanes) { return lanes >= 32 ? 32 : lanes >= 16 ? 16 : lanes >= 8 ? 8 : lanes >= 4 ? 4 : lanes >= 2 ? 2 : 1; }
constexpr int TEAM = team_of(larger(THREADS / FINISH_SHARE, 1));

// By one of the last FINISHERS CTAs, which have the least other work: waits for all parts of its values, adds them in the order of
// the CTAs they come from, the shared expert's last, then the residual. `out` may be x or the residual: a residual value is read
// here only, and all CTAs have read x, or there would be no schedule here.
__device__ __forceinline__ void finish(const Scratch *scratch, const Work &work, const bf16_t *residual, bf16_t *out, int tokens, uint32_t tag) {
  constexpr int MOST = ceil_div(DOWN_PARTS + SHARED_PARTS, TEAM), AT_ONCE = MOST < 8 ? MOST : 8;
  int all = tokens * (HIDDEN / 2), share = ceil_div(all, FINISHERS);
  int begin = ((int)blockIdx.x - (GRID - FINISHERS)) * share, end = min(begin + share, all);
  int member = threadIdx.x % TEAM;
  if (begin < 0) return;
#pragma unroll 1
  for (int first = begin + threadIdx.x / 32 * (32 / TEAM); first < end; first += THREADS / TEAM) {  // whole warps
    int pair = first + threadIdx.x % 32 / TEAM, token = pair / (HIDDEN / 2), row = pair % (HIDDEN / 2) * 2;
    bool mine = pair < end;
    int tile = row / 16, block = row / 64, routed = work.count_down(block / DOWN_GROUP);
    int count = mine ? routed + shared_parts<SHARED_DOWN_ITEMS, SHARED_DOWN_QUOTA>(tile) : 0;
    uint32_t added = mine && member == 0 && residual ? load_fresh((const uint32_t *)(residual + 2 * (size_t)pair)) : 0u;
    float low = 0.f, high = 0.f;
#pragma unroll 1
    for (int part = member; part < count; part += AT_ONCE * TEAM) {
      WordPair word[AT_ONCE];
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++) word[i].start(part + i * TEAM < count, tag);
      wait_tagged(word, tag, [&](int i) {
        int p = part + i * TEAM;
        return p < routed ? &scratch->down[block][p][token][row % 64] : &scratch->shared_down[tile][p - routed][token][row % 16];
      });
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++) low += word[i].first.value(), high += word[i].second.value();
    }
    __syncwarp();
#pragma unroll
    for (int offset = TEAM / 2; offset; offset >>= 1)
      low += __shfl_xor_sync(~0u, low, offset), high += __shfl_xor_sync(~0u, high, offset);
    if (mine && member == 0) *(uint32_t *)(out + 2 * (size_t)pair) = pack_bf16(low + low_of(added), high + high_of(added));
  }
}
