// SPDX-License-Identifier: Apache-2.0
// y[tokens, N] = x[tokens, K] W[N, K]^T for 1 to 16 tokens, W in E4M3 as stored: the output head (one scale per row, applied
// once at the end) and block-FP8 projections (one scale per 128x128 block, applied per block). BF16 activations, FP32 sums.
//
// A warp owns 16 rows, or with KSPLIT > 1 every KSPLIT-th 128-k block of them, and streams blocks of 2 KB through a ring in shared
// memory that runs on across row tiles. The host picks WARPS so that tiles / (CTAs x warps) is just under a whole number.
// W may lie in up to three tensors, one below the other, each a multiple of 16 rows: SECOND and THIRD are the tiles where the
// later ones begin. What is multiplied is x, its RMSNorm (PROLOGUE 1), the SwiGLU of rows of 2 K values (PROLOGUE 2), x times a
// factor for each 128 values (PROLOGUE 3), or the RMSNorms of two inputs of K / 2 values side by side (PROLOGUE 4).
// Compile-time: K, TOKENS, ROW_SCALES, ARGMAX, PROLOGUE, SECOND, THIRD, USE_PDL, GRID (CTAs), WARPS (per CTA), STAGES, KSPLIT.
#include "best_row.cuh"
#include "fp8_tile.cuh"

#define COLUMNS ((TOKENS + 7) / 8 * 8)
#define GROUPS_OF_8 (COLUMNS / 8)
#define X_STRIDE (K + 8)  // 16 bytes of padding put the token rows into different banks
#define BLOCKS (K / 128)
#define STEPS ((BLOCKS + KSPLIT - 1) / KSPLIT)  // blocks of a warp per tile

static_assert(COLUMNS * 64 <= STAGES * 2048, "what a warp has found is left in its ring");

struct Shared {
  uint4 ring[WARPS][STAGES][128];
  bf16_t x[TOKENS * X_STRIDE];
#if KSPLIT > 1
  float sums[WARPS][COLUMNS][17];
#endif
#if ARGMAX
  uint32_t tag;  // of this launch
#endif
#if PROLOGUE == 1 || PROLOGUE == 4
  float parts[TOKENS * BLOCKS];
#endif
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "fp8_gemv.py: shared memory size");

// Four values of x after PROLOGUE 0, 2 or 3: what they are made of, asked for in a batch, as each such load takes a trip to L2.
struct Piece {
  uint2 x, up;
  float factor;
  __device__ __forceinline__ void load(const bf16_t *from, const float *factors, int i) {
    int token = i / (K / 4), k = i % (K / 4) * 4;
    const bf16_t *at = from + (size_t)token * (PROLOGUE == 2 ? 2 * K : K) + k;
    x = load_fresh((const uint2 *)at);
    if (PROLOGUE == 2) up = load_fresh((const uint2 *)(at + K));
    if (PROLOGUE == 3) factor = load_fresh(factors + token * BLOCKS + k / 128);
  }
  __device__ __forceinline__ uint2 value() const {
    if (PROLOGUE == 0) return x;
    auto one = [&](float v, float u) { return PROLOGUE == 2 ? v * sigmoid(v) * u : factor * v; };
    return make_uint2(pack_bf16(one(low_of(x.x), low_of(up.x)), one(high_of(x.x), high_of(up.x))),
                      pack_bf16(one(low_of(x.y), low_of(up.y)), one(high_of(x.y), high_of(up.y))));
  }
};
__device__ __forceinline__ void stage_x(bf16_t *staged, const bf16_t *x, const float *factors, int tokens) {
  constexpr int THREADS = WARPS * 32, ROUNDS = (TOKENS * (K / 4) + THREADS - 1) / THREADS, BATCH = ROUNDS < 8 ? ROUNDS : 8;
  int count = tokens * (K / 4);
#pragma unroll 1
  for (int first = threadIdx.x; first < count; first += BATCH * THREADS) {
    Piece piece[BATCH];
#pragma unroll
    for (int b = 0; b < BATCH; b++) piece[b].load(x, factors, min(first + b * THREADS, count - 1));
#pragma unroll
    for (int b = 0; b < BATCH; b++) {
      int i = first + b * THREADS;
      if (i < count) *(uint2 *)(staged + i / (K / 4) * X_STRIDE + i % (K / 4) * 4) = in_fp8_order(piece[b].value());
    }
  }
}

// Scales: ROW_SCALES ? [N] : [ceil(N / 128)][K / 128], FP32.
// y: BF16 [tokens][N]; `residual` (or null), BF16 [tokens][N], is added and may be y. With ARGMAX instead ids[tokens], the row of the
// largest BF16 logit, lowest on ties (see best_row.cuh). `normed` (or null) receives the normalized x. `factors`: FP32
// [tokens][K / 128]. `x_second` and its norm: the right half of PROLOGUE 4.
extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
    fp8_gemv(const bf16_t *__restrict__ x, const bf16_t *__restrict__ x_second, const uint8_t *__restrict__ w,
             const uint8_t *__restrict__ w_second, const uint8_t *__restrict__ w_third, const float *__restrict__ scales,
             const float *__restrict__ scales_second, const float *__restrict__ scales_third, const bf16_t *__restrict__ norm_weight,
             const bf16_t *__restrict__ norm_second, const float *__restrict__ factors, bf16_t *normed, const bf16_t *residual,
             bf16_t *y, Exchange *exchange, long long *__restrict__ ids, int tokens, int rows, float eps) {
  extern __shared__ uint4 dynamic[];
  Shared &s = *(Shared *)dynamic;
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  int part = warp % KSPLIT, tiles = (rows + 15) / 16, stride = gridDim.x * (WARPS / KSPLIT);
  int first = (warp / KSPLIT) * gridDim.x + blockIdx.x;
  let_consumer_start();

  // Piece `index` of this warp: 16 rows x 128 bytes.
  auto fetch = [&](int index) {
    int tile = first + index / STEPS * stride, block = part + index % STEPS * KSPLIT;
    if (tile < tiles && block < BLOCKS) {
      uint4 *slot = s.ring[warp][index % STAGES];
      const uint8_t *from = tile < SECOND ? w + (size_t)tile * (16 * K)
                            : tile < THIRD ? w_second + (size_t)(tile - SECOND) * (16 * K)
                                           : w_third + (size_t)(tile - THIRD) * (16 * K);
      fetch_tile(slot, from, K, block, rows - 1 - tile * 16);
    }
    commit_copies();
  };
  // Weights do not depend on the producer: ask for them before waiting for x.
  int next = 0;
  for (; next < STAGES; next++) fetch(next);
  uint32_t epoch = 0;
  auto wait_for_x = [&]() {
    wait_for_producer();
    if (ARGMAX && threadIdx.x == 0) epoch = load_fresh(&exchange->epoch);  // on its way together with x
  };
#if PROLOGUE == 1
  typedef Rows<TOKENS, K, WARPS * 32> XRows;
  XRows row, norm;
  norm.load_weight(norm_weight);
  wait_for_x();
  row.load(x, tokens);
  row.normalize(norm, s.parts, eps);
#pragma unroll
  for (int r = 0; r < XRows::ROUNDS; r++) {
    int i = XRows::quad(r);
    if (i >= tokens * XRows::QUADS) break;
    *(uint2 *)(s.x + i / XRows::QUADS * X_STRIDE + i % XRows::QUADS * 4) = in_fp8_order(row.v[r]);
    if (normed && blockIdx.x == 0) *((uint2 *)normed + i) = row.v[r];
  }
#elif PROLOGUE == 4
  typedef Rows<TOKENS, K / 2, WARPS * 32> XRows;
  XRows row[2], norm[2];
  norm[0].load_weight(norm_weight), norm[1].load_weight(norm_second);
  wait_for_x();
  row[0].load(x, tokens), row[1].load(x_second, tokens);
#pragma unroll
  for (int half = 0; half < 2; half++) {
    row[half].normalize(norm[half], s.parts + half * (TOKENS * BLOCKS / 2), eps);
#pragma unroll
    for (int r = 0; r < XRows::ROUNDS; r++) {
      int i = XRows::quad(r);
      if (i >= tokens * XRows::QUADS) break;
      *(uint2 *)(s.x + i / XRows::QUADS * X_STRIDE + half * (K / 2) + i % XRows::QUADS * 4) = in_fp8_order(row[half].v[r]);
    }
  }
#else
  wait_for_x();
  stage_x(s.x, x, factors, tokens);
#endif
#if ARGMAX
  if (threadIdx.x == 0) s.tag = next_tag(epoch);
  float top[GROUPS_OF_8][2];
  int where[GROUPS_OF_8][2];
#pragma unroll
  for (int c = 0; c < GROUPS_OF_8; c++) top[c][0] = top[c][1] = -3.4e38f, where[c][0] = where[c][1] = NO_ROW;
#endif
  __syncthreads();
  int used = 0;
  for (int tile = first; KSPLIT > 1 ? tile - first + (int)blockIdx.x < tiles : tile < tiles; tile += stride) {
    float acc[GROUPS_OF_8][4] = {};
#if ROW_SCALES
    float row_scale[2];  // asked for now: behind the last product they would be a trip to memory that nothing else fills
#pragma unroll
    for (int i = 0; i < 2; i++) row_scale[i] = load_fresh(scales + min(tile * 16 + g + i * 8, rows - 1));
#endif
#if !ARGMAX
    float added[GROUPS_OF_8 * 4] = {};
    if (residual && part == 0) {
#pragma unroll
      for (int i = 0; i < GROUPS_OF_8 * 4; i++) {
        int row = tile * 16 + g + (i >> 1 & 1) * 8, token = i / 4 * 8 + 2 * t + (i & 1);
        if (row < rows && token < tokens) added[i] = load_fresh(residual + (size_t)token * rows + row);
      }
    }
#endif
    for (int step = 0; step < STEPS; step++) {
      int block = part + step * KSPLIT;
      wait_copies<STAGES - 1>();
      const uint4 *slot = s.ring[warp][used++ % STAGES];
      if (tile < tiles && block < BLOCKS) {
#if !ROW_SCALES
        float sum[GROUPS_OF_8][4] = {};
#else
        float(&sum)[GROUPS_OF_8][4] = acc;
#endif
        multiply_tile<GROUPS_OF_8>(sum, slot, s.x, X_STRIDE, block, tokens);
#if !ROW_SCALES
        const float *scale_row = tile < SECOND ? scales + tile / 8 * BLOCKS
                                 : tile < THIRD ? scales_second + (tile - SECOND) / 8 * BLOCKS
                                                : scales_third + (tile - THIRD) / 8 * BLOCKS;
        float scale = __ldg(scale_row + block);
#pragma unroll
        for (int i = 0; i < GROUPS_OF_8 * 4; i++) acc[i / 4][i % 4] += scale * sum[i / 4][i % 4];
#endif
      }
      __syncwarp();
      fetch(next++);
    }
#if KSPLIT > 1
#pragma unroll
    for (int i = 0; i < GROUPS_OF_8 * 4; i++) s.sums[warp][i / 4 * 8 + 2 * t + (i & 1)][g + (i >> 1 & 1) * 8] = acc[i / 4][i % 4];
    __syncthreads();
    if (part == 0)
#pragma unroll
      for (int i = 0; i < GROUPS_OF_8 * 4; i++)
#pragma unroll
        for (int p = 1; p < KSPLIT; p++) acc[i / 4][i % 4] += s.sums[warp + p][i / 4 * 8 + 2 * t + (i & 1)][g + (i >> 1 & 1) * 8];
    __syncthreads();
    if (part || tile >= tiles) continue;
#endif
    // acc: rows g (0, 1) and g + 8 (2, 3), tokens 2 t and 2 t + 1 of each group of 8.
#pragma unroll
    for (int i = 0; i < GROUPS_OF_8 * 4; i++) {
      int row = tile * 16 + g + (i >> 1 & 1) * 8, c = i / 4, token = c * 8 + 2 * t + (i & 1);
      if (row >= rows || token >= tokens) continue;
      float value = acc[c][i % 4];
#if ROW_SCALES
      value *= row_scale[i >> 1 & 1];
#endif
#if ARGMAX
      value = to_float(to_bf16(value));
      if (value > top[c][i & 1]) top[c][i & 1] = value, where[c][i & 1] = row;  // a thread's rows rise, so the lowest stays
#else
      y[(size_t)token * rows + row] = to_bf16(value + added[i]);
#endif
    }
  }
#if ARGMAX
  auto found_by = [&](int w) { return (uint2(*)[8])s.ring[w]; };  // [COLUMNS][8]; a warp is done with its ring
#pragma unroll
  for (int i = 0; i < GROUPS_OF_8 * 2; i++)
    found_by(warp)[i / 2 * 8 + 2 * t + (i & 1)][g] = make_uint2(key_of(top[i / 2][i % 2]), where[i / 2][i % 2]);
  __syncthreads();
#pragma unroll 1
  for (int token = warp; token < tokens; token += WARPS)
    finish_best(exchange, ids, token, s.tag, [&](int w) { return found_by(w)[token]; });
#endif
}
