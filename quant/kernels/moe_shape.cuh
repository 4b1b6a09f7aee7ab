// SPDX-License-Identifier: Apache-2.0
// Sizes and buffers of the MoE block kernel. decode_moe.py computes the two buffer sizes too; static_asserts compare them.
//
// Compile-time: HIDDEN, INTER, SHARED_INTER, EXPERTS, TOP_K, GROUPS, TOP_GROUPS, TOKENS (1, 2, 4 or 8), GATE_TYPE (float or
// bf16_t), USE_PDL; GRID (one CTA per SM), FINISHERS, WARPS, STAGES, ACT_PIECES; SCRATCH_BYTES, SHARED_BYTES.
#pragma once
#include "tagged.cuh"

#define THREADS (WARPS * 32)

__device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
__device__ constexpr int larger(int a, int b) { return a > b ? a : b; }

// Routed experts. A piece is what a warp handles at a time: 4 blocks of 64 rows x 16 k (512 bytes each) and their scales,
// in gate_up the 64 gate and the 64 up rows of 32 k, in down 64 rows of 64 k. GROUP warps take neighbouring row blocks, which
// are neighbours in memory; a step is their pieces together.
constexpr int BLOCKS = INTER / 64;            // 64-row blocks of an expert's intermediate size
constexpr int OUT_BLOCKS = HIDDEN / 64;       // 64-row blocks of the output
__device__ constexpr int group_of(int blocks) { return blocks % 4 == 0 ? 4 : blocks % 2 == 0 ? 2 : 1; }
constexpr int UP_GROUP = group_of(BLOCKS), DOWN_GROUP = group_of(OUT_BLOCKS);
constexpr int UP_UNITS = BLOCKS / UP_GROUP, DOWN_UNITS = OUT_BLOCKS / DOWN_GROUP;  // of an expert; of the output
constexpr int UP_LANES = WARPS / UP_GROUP, DOWN_LANES = WARPS / DOWN_GROUP;        // steps at a time
constexpr int UP_STEPS = HIDDEN / 32;         // steps of one unit in gate_up
constexpr int MAX_UNIQUE = TOKENS * TOP_K < EXPERTS ? TOKENS * TOP_K : EXPERTS;
constexpr int PIECE_BYTES = 4 * 512 + 2 * 64;

// Shared expert, FP8: an item is 16 rows x 128 k, the width of a scale block.
constexpr int SHARED_UP_TILES = 2 * SHARED_INTER / 16, SHARED_UP_ITEMS = HIDDEN / 128;        // items per tile
constexpr int SHARED_DOWN_TILES = HIDDEN / 16, SHARED_DOWN_ITEMS = SHARED_INTER / 128;
// Items per CTA; at least half a tile, so that no tile is spread over more than three CTAs.
constexpr int SHARED_UP_QUOTA = larger(ceil_div(SHARED_UP_TILES * SHARED_UP_ITEMS, GRID), ceil_div(SHARED_UP_ITEMS, 2));
constexpr int SHARED_DOWN_QUOTA = larger(ceil_div(SHARED_DOWN_TILES * SHARED_DOWN_ITEMS, GRID), ceil_div(SHARED_DOWN_ITEMS, 2));

// Sums over k that several CTAs share are kept in parts, and added by the reader in a fixed order. A CTA takes at least the
// gate_up steps that one token gives it, which bounds the parts of a unit; with many experts it takes more, and units have fewer.
constexpr int UP_LEAST = ceil_div(TOP_K * UP_UNITS * UP_STEPS, GRID);
__device__ constexpr int up_quota(int unique) { return larger(ceil_div(unique * UP_UNITS * UP_STEPS, GRID), UP_LEAST); }
__device__ constexpr int up_parts(int unique) { return ceil_div(UP_STEPS, up_quota(unique)) + 1; }
__device__ constexpr int most_up_parts() {
  int most = 0;
  for (int unique = 1; unique <= MAX_UNIQUE; unique++) most = larger(most, unique * up_parts(unique));
  return most;
}
constexpr int UP_PARTS = up_parts(1);
__device__ constexpr int down_quota(int unique) { return larger(ceil_div(DOWN_UNITS * unique * BLOCKS, GRID), 1); }
constexpr int DOWN_PARTS = ceil_div(GRID, DOWN_UNITS) + 1;
constexpr int SHARED_PARTS = 3;

// The router's rows of a CTA; the last CTAs may have none.
constexpr int ROWS_PER_CTA = ceil_div(EXPERTS, GRID);
constexpr int ROUTING_CTAS = ceil_div(EXPERTS, ROWS_PER_CTA);

// Global memory that the CTAs of a launch exchange values in. Zeroed once, and never cleared: the tag of a launch is its number,
// so what earlier launches left is not there yet. (A word that was last written exactly 2^32 - 1 launches ago would be taken for a
// new one.) A word has one writer, and is written at most once per launch. No launch touches any before the one before it is over
// (see wait_for_producer), so nobody reads it when the next launch writes.
struct Scratch {
  uint32_t epoch;                                      // tag of the launch before
  alignas(128) Tagged here[larger(GRID - ROUTING_CTAS, 1)];  // from CTAs without logits: like a logit, a sign that x and epoch were read
  alignas(128) Tagged logits[TOKENS][EXPERTS];
  alignas(128) Tagged shared_up[SHARED_UP_TILES][SHARED_PARTS][TOKENS][16];
  alignas(128) Tagged shared_act[TOKENS][SHARED_INTER / 2];  // BF16 pairs, in FP8 order
  alignas(128) Tagged shared_down[SHARED_DOWN_TILES][SHARED_PARTS][TOKENS][16];
  alignas(128) Tagged up[most_up_parts() * BLOCKS][TOKENS][128];  // part p of block b: [b * up_parts(unique) + p]
  alignas(128) Tagged down[OUT_BLOCKS][DOWN_PARTS][TOKENS][64];
};
static_assert(sizeof(Scratch) <= SCRATCH_BYTES, "decode_moe.py: scratch size");

// Which experts this step uses, in ascending order, so that sums are formed in the same order every time.
struct Schedule {
  int unique;
  int expert[MAX_UNIQUE];
  uint32_t tokens[MAX_UNIQUE];   // bit n: token n uses the expert
  int before[MAX_UNIQUE + 1];    // (expert, token) pairs of the experts before
  float weight[MAX_UNIQUE][TOKENS];
};

// n / d for 0 <= n < 2^24, by a multiplication: n d stays far below 2^32.
struct Divisor {
  uint32_t d, m;
  __device__ __forceinline__ Divisor() {}
  __device__ constexpr explicit Divisor(int by) : d(by), m(by > 1 ? 0xFFFFFFFFu / (uint32_t)by + 1 : 0) {}
  __device__ constexpr int of(int n) const { return m ? (int)((uint64_t)(uint32_t)n * m >> 32) : n; }
};

constexpr int X_STRIDE = HIDDEN + 32;        // elements; 64 bytes of padding put neighbouring tokens into different banks
constexpr int X8_STRIDE = HIDDEN + 8;        // the same for the order that FP8 needs
constexpr int SHARED_ACT_STRIDE = SHARED_INTER + 8;
constexpr int SUM_STRIDE = 132;              // floats per token in the warps' sums; a conflict-free step between tokens
constexpr int PART = EXPERTS / GROUPS < 32 ? EXPERTS / GROUPS : 32;  // experts of one group among 32 neighbours
constexpr int PAIRS = ceil_div(TOKENS * TOP_K, 4) * 4;                // (token, expert) pairs, read by fours
constexpr int NOBODY = 0x7FFFFFFF;           // in place of an expert's id: a pair that is not computed here
struct Activations {                         // what the down projection reads
  unsigned short routed[ACT_PIECES][64];     // FP16 times 2^n
  float scale[ACT_PIECES];                   // what undoes that
  uint4 align;
  bf16_t shared[TOKENS * SHARED_ACT_STRIDE];
};
// How steps are dealt out, by the number of distinct experts.
struct Split {
  Divisor up, down, row;                     // steps per CTA in gate_up and down; down steps of a unit
  int parts;                                 // most parts of a unit in gate_up
  __device__ __forceinline__ Split() {}
  __device__ constexpr explicit Split(int unique)
      : up(up_quota(unique)), down(down_quota(unique)), row(larger(unique * BLOCKS, 1)), parts(up_parts(unique)) {}
};
struct Shared {
  union {
    uint4 ring[WARPS][STAGES][PIECE_BYTES / 16];
    bf16_t x8[TOKENS * X8_STRIDE];           // x in FP8 order, until the router decides
    struct {                                 // the router's, until the ring is filled
      uint32_t keys[TOKENS][EXPERTS];        // biased scores of all experts, then of the candidates
      float score[TOKENS][EXPERTS];
      unsigned short candidates[TOKENS][EXPERTS];
      uint2 best[TOKENS][EXPERTS / PART];    // keys of the two best of each group's part
      int chosen[TOKENS][TOP_K];
      float chosen_score[TOKENS][TOP_K];
    };
  };
  union {
    uint4 align;
    unsigned short x[TOKENS * X_STRIDE];     // x in fragment order, FP16 times 2^n, until gate_up is done
    Activations act;
  };
  alignas(16) float sums[WARPS * TOKENS * SUM_STRIDE];
  alignas(16) float bias[EXPERTS];
  alignas(16) int pair_id[PAIRS];            // the expert or NOBODY, by token and rank
  int pair_local[PAIRS];                     // its number among this GPU's
  float pair_weight[PAIRS];
  uint32_t present[EXPERTS / 32];
  uint32_t x_max[TOKENS];                    // bits of the largest |x|, BF16
  uint32_t tag;                              // of this launch
  Schedule schedule;
  Split splits[MAX_UNIQUE + 1];
  float shared_sums[SHARED_DOWN_QUOTA * TOKENS * 16];
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "decode_moe.py: shared memory size");
static_assert((PART & (PART - 1)) == 0 && EXPERTS / GROUPS % PART == 0 && EXPERTS % 32 == 0, "groups of a power of two or of 32 n");
static_assert(EXPERTS / PART <= 32 && TOP_K <= 32 && TOP_K <= TOP_GROUPS * (EXPERTS / GROUPS), "a lane per list, and enough experts");
static_assert(TOKENS * TOP_K <= THREADS && MAX_UNIQUE < THREADS, "a thread per (token, expert) pair");
static_assert(sizeof(bf16_t) * TOKENS * X8_STRIDE <= WARPS * STAGES * PIECE_BYTES, "no room for x in FP8 order");
static_assert(SHARED_UP_QUOTA * 16 <= WARPS * SUM_STRIDE && SHARED_DOWN_QUOTA * 16 >= WARPS, "no room for the sums of warps");
