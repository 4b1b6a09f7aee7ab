// SPDX-License-Identifier: Apache-2.0
// The row of the largest logit: each thread keeps the best of its own rows, each CTA that of its threads, and the last CTA finds the
// best of all CTAs. They hand it over as tagged words (see tagged.cuh), so that there is no fence and no counter behind the last row.
//
// Compile-time: GRID (CTAs), WARPS (per CTA), TOKENS.
#pragma once
#include "tagged.cuh"

constexpr int NO_ROW = 0x7FFFFFFF;

// What the CTAs of a launch tell the last one: of each token the key (see key_of) and the row, a pair of words of 16 bytes. Two words,
// as logit, row and a whole tag are more than 64 bits: a shorter tag would come round again while the words of a token that few
// launches have still carry it. Kernels for other token counts use the same memory in turn, hence the token comes first.
// Zeroed once, and never cleared; what is said of struct Scratch in moe_shape.cuh holds here too.
struct Exchange {
  uint32_t epoch, line[31];  // tag of the launch before, away from what is asked for again and again
  Tagged best[TOKENS][GRID][2];
};
static_assert(sizeof(Exchange) <= EXCHANGE_BYTES, "fp8_gemv.py: exchange size");

// Grows with the logit, and is the same for both zeros. Above 0, which stands for a word that nobody was asked for.
__device__ __forceinline__ uint32_t key_of(float logit) {
  uint32_t bits = __float_as_uint(logit);
  return logit == 0.f ? 0x80000000u : bits >> 31 ? ~bits : bits | 0x80000000u;
}

// The larger key, of equal ones the lower row: whichever way they are brought together, the same one wins.
struct Best {
  uint32_t key, row;
  __device__ __forceinline__ void keep_better(uint32_t other_key, uint32_t other_row) {
    if (other_key > key || (other_key == key && other_row < row)) key = other_key, row = other_row;
  }
  __device__ __forceinline__ void of_warp() {
    uint32_t most = __reduce_max_sync(~0u, key);
    row = __reduce_min_sync(~0u, key == most ? row : ~0u);
    key = most;
  }
};

// By a warp, for one token: stores the best of the CTA's warps, `at(warp)` being the eight that this warp's threads have found. In the
// last CTA goes on to that of all CTAs. Nothing can wait for ever: only this CTA waits for others, and a consumer that takes their
// place comes when all of them have started (see let_consumer_start). It is the last one as it has the least rows, and starts last.
template <typename At>
__device__ __forceinline__ void finish_best(Exchange *exchange, long long *ids, int token, uint32_t tag, const At &at) {
  int lane = threadIdx.x & 31;
  Best best = {0u, NO_ROW};
#pragma unroll
  for (int i = 0; i < (WARPS * 8 + 31) / 32; i++) {
    uint2 found = at(min(i * 4 + lane / 8, WARPS - 1))[lane % 8];  // one seen twice does no harm
    best.keep_better(found.x, found.y);
  }
  best.of_warp();
  Tagged(*words)[2] = exchange->best[token];
  if (lane == 0) store_tagged(words[blockIdx.x], best.key, best.row, tag);
  if (blockIdx.x != GRID - 1) return;
  constexpr int EACH = (GRID + 31) / 32;
  WordPair word[EACH];
#pragma unroll
  for (int i = 0; i < EACH; i++) word[i].start(i * 32 + lane < GRID, tag);
  wait_tagged(word, tag, [&](int i) { return words[i * 32 + lane]; });
  __syncwarp();
#pragma unroll
  for (int i = 0; i < EACH; i++) best.keep_better(word[i].first.bits(), word[i].second.bits());
  best.of_warp();
  if (lane) return;
  ids[token] = best.row == NO_ROW ? 0 : best.row;  // whoever looks up a row by it stays inside its table
  if (token == 0) store_epoch(&exchange->epoch, tag);  // all CTAs have read it, or their words would not be here
}
