// SPDX-License-Identifier: Apache-2.0
// Attention of MLA in the latent space, for decode and verification: all heads of one token share keys and values, which are the
// rows of the cache and their first LATENT values. A CTA takes one token's heads and one split of its keys; mla_merge.cu adds.
//
// Tiles of keys stream through a ring in shared memory. Scores: warp w has a quarter of the width (w % 4) and half the keys of
// a tile; eight threads then do the softmax of a head; values: each warp has an eighth of the LATENT columns, its sums in registers.
// Compile-time: HEADS (at most 32), LATENT, ROPE, STAGES, USE_PDL, SHARED_BYTES.
#include "norm.cuh"
#include "mla_keys.cuh"

#define WARPS 8
#define THREADS (WARPS * 32)
#define WIDTH (LATENT + ROPE)
#define STRIDE (WIDTH + 8)  // elements: 16 bytes of padding put eight rows into different banks
#define HEAD_TILES ((HEADS + 15) / 16)
#define ROWS (HEAD_TILES * 16)
#define STEPS (WIDTH / 64)     // of 16 values, of a warp
#define COLUMNS (LATENT / 8)   // of a warp
#define SCORE_STRIDE (TILE + 8)
static_assert(WIDTH % 64 == 0 && LATENT % 128 == 0 && HEADS <= 32 && TILE * 8 == THREADS, "mla_attention.py: shape");

struct Shared {
  bf16_t ring[STAGES][TILE][STRIDE];      // the last one holds the query at first
  float scores[4][ROWS][SCORE_STRIDE];    // parts, by quarter of the width
  bf16_t weights[ROWS][SCORE_STRIDE];
  float factor[ROWS];
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "mla_attention.py: shared memory size");
static_assert(ROWS <= TILE && STAGES >= 2, "the query lies in a stage");

// 16 bytes into shared memory, or zeros: what lies after the last key may be anything.
__device__ __forceinline__ void copy_or_zero(void *shared, const void *global, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"((uint32_t)__cvta_generic_to_shared(shared)), "l"(global),
               "r"(there ? 16 : 0)
               : "memory");
}

// query: BF16 [tokens][HEADS][WIDTH]. cache: BF16 blocks of `block_size` rows of WIDTH values. blocks: those of each sequence.
// sums: FP32 [splits][tokens][HEADS][LATENT], not yet divided; peaks: [splits][tokens][HEADS] {largest score, sum of weights}, both
// to base 2. Grid: splits, tokens.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    mla_attend(const bf16_t *__restrict__ query, const bf16_t *__restrict__ cache, const int *__restrict__ blocks,
               const int *__restrict__ query_start, const int *__restrict__ lengths, float *__restrict__ sums, float2 *__restrict__ peaks,
               long long block_stride, int blocks_stride, int block_size, int sequences, float scale) {
  extern __shared__ uint4 dynamic[];
  Shared &s = *(Shared *)dynamic;
  int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, split = blockIdx.x, token = blockIdx.y, tokens = gridDim.y;
  let_consumer_start();
  Keys keys(Batch{query_start, lengths, sequences}, token, gridDim.x);
  int begin = split * keys.per_split, end = min(begin + keys.per_split, keys.limit), count = (end - begin + TILE - 1) / TILE;
  if (split >= keys.splits) {  // the same for the whole CTA
    wait_for_producer();
    return;
  }

  // Eight threads copy a row of a tile. The block's number is asked for one tile ahead.
  int copied = tid / 8, chunk = tid % 8;
  const int *mine = blocks + (size_t)keys.sequence * blocks_stride;
  auto block_of = [&](int tile) { return mine[min(begin + tile * TILE + copied, end - 1) / block_size]; };
  int block = block_of(0);
  auto fetch = [&](int tile) {
    if (tile < count) {
      int key = begin + tile * TILE + copied;
      bool there = key < end;
      const bf16_t *from = cache + block * block_stride + (size_t)(there ? key % block_size : 0) * WIDTH;
      uint4 *to = (uint4 *)s.ring[tile % STAGES][copied];
#pragma unroll
      for (int i = 0; i < WIDTH / 64; i++) copy_or_zero(to + i * 8 + chunk, (const uint4 *)from + i * 8 + chunk, there);
      block = block_of(tile + 1);
    }
    commit_copies();
  };
  // Keys of earlier steps do not depend on the producer.
  bool waited = false;
#pragma unroll 1
  for (int tile = 0; tile < STAGES - 1; tile++) {
    if (!waited && begin + (tile + 1) * TILE > keys.written) wait_for_producer(), waited = true;
    fetch(tile);
  }
  if (!waited) wait_for_producer();

  // The query's fragments stay in registers.
  uint4 *staged = (uint4 *)s.ring[STAGES - 1];
  {
    constexpr int WORDS = WIDTH / 8, ROUNDS = (ROWS * WORDS + THREADS - 1) / THREADS;
    uint4 v[ROUNDS];
#pragma unroll
    for (int r = 0; r < ROUNDS; r++) {
      int i = tid + r * THREADS;
      v[r] = i < HEADS * WORDS ? load_fresh((const uint4 *)(query + (size_t)token * HEADS * WIDTH) + i) : make_uint4(0u, 0u, 0u, 0u);
    }
#pragma unroll
    for (int r = 0; r < ROUNDS; r++) {
      int i = tid + r * THREADS;
      if (i < ROWS * WORDS) staged[i / WORDS * (STRIDE / 8) + i % WORDS] = v[r];
    }
  }
  __syncthreads();
  int quarter = warp % 4, half = warp / 4, matrix = lane / 8, r8 = lane % 8;
  uint32_t q[HEAD_TILES][STEPS][4];
#pragma unroll
  for (int h = 0; h < HEAD_TILES; h++)
#pragma unroll
    for (int k = 0; k < STEPS; k++)
      load_matrices(q[h][k], &s.ring[STAGES - 1][h * 16 + matrix % 2 * 8 + r8][(quarter * STEPS + k) * 16 + matrix / 2 * 8]);

  float acc[HEAD_TILES][COLUMNS / 8][4] = {};
  float peak = -__int_as_float(0x7F800000), sum = 0.f;  // of head tid / 8; the sum over this thread's keys
  int head = tid / 8, j = tid % 8, g = lane >> 2, t = lane & 3;
#pragma unroll 1
  for (int tile = 0; tile < count; tile++) {
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
    __syncthreads();  // the tile is there for all, and the one before it is done with
    fetch(tile + STAGES - 1);
    const bf16_t(*rows)[STRIDE] = s.ring[tile % STAGES];

    float score[HEAD_TILES][2][4] = {};
#pragma unroll
    for (int k = 0; k < STEPS; k++) {
      uint32_t b[4];
      load_matrices(b, &rows[half * 16 + matrix / 2 * 8 + r8][(quarter * STEPS + k) * 16 + matrix % 2 * 8]);
#pragma unroll
      for (int h = 0; h < HEAD_TILES; h++) mma_16816(score[h][0], q[h][k], b[0], b[1]), mma_16816(score[h][1], q[h][k], b[2], b[3]);
    }
#pragma unroll
    for (int h = 0; h < HEAD_TILES; h++)
#pragma unroll
      for (int n = 0; n < 2; n++)
#pragma unroll
        for (int i = 0; i < 2; i++)
          *(float2 *)&s.scores[quarter][h * 16 + i * 8 + g][half * 16 + n * 8 + t * 2] = make_float2(score[h][n][i * 2], score[h][n][i * 2 + 1]);
    __syncthreads();

    if (tid < ROWS * 8) {
      float4 v[4];
#pragma unroll
      for (int i = 0; i < 4; i++) v[i] = *(const float4 *)&s.scores[i][head][j * 4];
      float x[4] = {(v[0].x + v[1].x) + (v[2].x + v[3].x), (v[0].y + v[1].y) + (v[2].y + v[3].y),
                    (v[0].z + v[1].z) + (v[2].z + v[3].z), (v[0].w + v[1].w) + (v[2].w + v[3].w)};
      int first = begin + tile * TILE + j * 4;
      float most = peak;
#pragma unroll
      for (int i = 0; i < 4; i++) {
        x[i] = first + i < end ? x[i] * scale : -__int_as_float(0x7F800000);
        most = fmaxf(most, x[i]);
      }
#pragma unroll
      for (int offset = 1; offset < 8; offset <<= 1) most = fmaxf(most, __shfl_xor_sync(~0u, most, offset));
      float factor = exp2f(peak - most);
      peak = most, sum *= factor;
#pragma unroll
      for (int i = 0; i < 4; i++) x[i] = exp2f(x[i] - most), sum += x[i];
      *(uint2 *)&s.weights[head][j * 4] = make_uint2(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]));
      if (j == 0) s.factor[head] = factor;
    }
    __syncthreads();

    uint32_t p[HEAD_TILES][2][4];
#pragma unroll
    for (int h = 0; h < HEAD_TILES; h++) {
#pragma unroll
      for (int k = 0; k < 2; k++) load_matrices(p[h][k], &s.weights[h * 16 + matrix % 2 * 8 + r8][k * 16 + matrix / 2 * 8]);
      float upper = s.factor[h * 16 + g], lower = s.factor[h * 16 + 8 + g];
#pragma unroll
      for (int n = 0; n < COLUMNS / 8; n++) acc[h][n][0] *= upper, acc[h][n][1] *= upper, acc[h][n][2] *= lower, acc[h][n][3] *= lower;
    }
#pragma unroll
    for (int k = 0; k < 2; k++)
#pragma unroll
      for (int n = 0; n < COLUMNS / 8; n += 2) {
        uint32_t b[4];
        load_transposed(b, &rows[k * 16 + matrix % 2 * 8 + r8][warp * COLUMNS + n * 8 + matrix / 2 * 8]);
#pragma unroll
        for (int h = 0; h < HEAD_TILES; h++) mma_16816(acc[h][n], p[h][k], b[0], b[1]), mma_16816(acc[h][n + 1], p[h][k], b[2], b[3]);
      }
  }

  size_t at = (size_t)split * tokens + token;
#pragma unroll
  for (int offset = 1; offset < 8; offset <<= 1) sum += __shfl_xor_sync(~0u, sum, offset);
  if (head < HEADS && j == 0) peaks[at * HEADS + head] = make_float2(peak, sum);
#pragma unroll
  for (int h = 0; h < HEAD_TILES; h++)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      int row = h * 16 + i * 8 + g;
      if (row >= HEADS) continue;
      float *out = sums + (at * HEADS + row) * LATENT + warp * COLUMNS + t * 2;
#pragma unroll
      for (int n = 0; n < COLUMNS / 8; n++) *(float2 *)(out + n * 8) = make_float2(acc[h][n][i * 2], acc[h][n][i * 2 + 1]);
    }
}
