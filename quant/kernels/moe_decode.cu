// SPDX-License-Identifier: Apache-2.0
// Routed MXFP4 experts and the block-FP8 shared expert for 1 to 8 tokens: two launches, each weight byte read once.
//
// Experts are read in the fragment order of Humming's W4A16 layout (see layout.py): per expert [K / 16][N / 64][32 lanes]
// 16-byte words, each 32-bit word one 16x16 tensor-core fragment; scales [K / 32][N], in blocks of 64 rows permuted so that
// lane / 4 owns 8 consecutive bytes. Tokens are the N dimension (8 columns) of the tensor-core step, so tokens that share
// an expert share its bytes. The shared expert is stored as in the checkpoint: E4M3 rows, one scale per 128x128 block.
//
// Compile-time shape: HIDDEN, INTER, EXPERTS, TOP_K, TOKENS (most tokens), WIDE_SCALES, USE_PDL, GATE_UP_WARPS, DOWN_WARPS.
#include "common.cuh"

#define COLUMNS 8
#define SHARED_EXPERT 0  // blockIdx.y of the shared expert; unique expert u has blockIdx.y = u + 1
#define X_STRIDE (HIDDEN + 8)  // 16 bytes of padding put the 8 token rows into different banks

// What the router hands over; written by router.cu.
struct Schedule {
  int unique;                        // number of distinct experts
  int expert[TOKENS * TOP_K];        // their ids, ascending
  uint32_t tokens[TOKENS * TOP_K];   // bit n: token n uses the expert
  float weight[TOKENS * TOP_K][COLUMNS];
};

// A-fragment of one 16x16 tile: rows g (registers 0 and 2) and g + 8 (1 and 3) have scales of their own.
__device__ __forceinline__ void unpack_e2m1(uint32_t a[4], uint32_t word, uint32_t low, uint32_t high) {
  a[0] = mul_bf16x2(e2m1_pair<0>(word), e2m1_multiplier(low));
  a[2] = mul_bf16x2(e2m1_pair<1>(word), e2m1_multiplier(low));
  a[1] = mul_bf16x2(e2m1_pair<2>(word), e2m1_multiplier(high));
  a[3] = mul_bf16x2(e2m1_pair<3>(word), e2m1_multiplier(high));
#if WIDE_SCALES
  a[0] = mul_bf16x2(a[0], e2m1_rest(low));
  a[2] = mul_bf16x2(a[2], e2m1_rest(low));
  a[1] = mul_bf16x2(a[1], e2m1_rest(high));
  a[3] = mul_bf16x2(a[3], e2m1_rest(high));
#endif
}

__device__ __forceinline__ uint32_t word_of(const uint4 &v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }
__device__ __forceinline__ uint32_t byte_of(const uint2 &v, int i) { return ((i < 4 ? v.x : v.y) >> (8 * (i & 3))) & 255u; }

// One step of 32 k for 64 rows: two 16-byte words of codes, 8 scale bytes, B fragments of both 16-k halves.
__device__ __forceinline__ void step_e2m1(float acc[4][4], const uint4 code[2], const uint2 &scale, const uint32_t b[4]) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
#pragma unroll
    for (int tile = 0; tile < 4; tile++) {
      uint32_t a[4];
      unpack_e2m1(a, word_of(code[half], tile), byte_of(scale, 2 * tile), byte_of(scale, 2 * tile + 1));
      mma_16816(acc[tile], a, b[2 * half], b[2 * half + 1]);
    }
  }
}

// FP8: 64 k of one 16-row tile whose rows start at `rows`; lane (g, t) reads 16 bytes of rows g and g + 8 at k = 16 t.
// `x` is the lane's column, ordered 0, 2, 1, 3 within each four values, so that byte pairs and value pairs agree.
template <int STRIDE>
__device__ __forceinline__ void step_e4m3(float acc[4], const uint8_t *rows, const uint32_t *x, float scale, bool used) {
  int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  uint4 low = load_stream((const uint4 *)(rows + (size_t)g * STRIDE + 16 * t));
  uint4 high = load_stream((const uint4 *)(rows + (size_t)(g + 8) * STRIDE + 16 * t));
  float part[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    uint32_t l = word_of(low, i), h = word_of(high, i);
    uint32_t a[4] = {mul_bf16x2(e4m3_pair_even(l), E4M3_MULTIPLIER), mul_bf16x2(e4m3_pair_even(h), E4M3_MULTIPLIER),
                     mul_bf16x2(e4m3_pair_odd(l), E4M3_MULTIPLIER), mul_bf16x2(e4m3_pair_odd(h), E4M3_MULTIPLIER)};
    mma_16816(part, a, used ? x[8 * t + 2 * i] : 0u, used ? x[8 * t + 2 * i + 1] : 0u);
  }
#pragma unroll
  for (int i = 0; i < 4; i++) acc[i] += scale * part[i];
}

__device__ __forceinline__ float swiglu(float gate, float up, float limit) {
  float s = gate / (1.f + __expf(-gate));
  if (limit > 0.f) {
    s = fminf(s, limit);
    up = fminf(fmaxf(up, -limit), limit);
  }
  return s * up;
}

// Copies x [tokens][HIDDEN] to shared memory; in FP8 pair order (0, 2, 1, 3 within each four) for the shared expert.
__device__ __forceinline__ void stage_x(bf16_t *xs, const bf16_t *x, int tokens, bool fp8_order) {
  for (int i = threadIdx.x; i < tokens * HIDDEN / 4; i += blockDim.x) {
    int token = i / (HIDDEN / 4), k = i % (HIDDEN / 4) * 4;
    uint2 v = *(const uint2 *)(x + (size_t)token * HIDDEN + k);
    if (fp8_order) v = make_uint2(__byte_perm(v.x, v.y, 0x5410), __byte_perm(v.x, v.y, 0x7632));
    *(uint2 *)(xs + token * X_STRIDE + k) = v;
  }
  __syncthreads();
}

// Activation buffer: [1 + TOKENS * TOP_K][COLUMNS][INTER]; entry 0 is the shared expert, stored in FP8 pair order.
extern "C" __global__ void __launch_bounds__(GATE_UP_WARPS * 32)
    gate_up(const bf16_t *__restrict__ x, const uint4 *__restrict__ w13, const uint2 *__restrict__ s13,
            const uint8_t *__restrict__ shared_w13, const float *__restrict__ shared_s13,
            const Schedule *__restrict__ schedule, bf16_t *__restrict__ act, int tokens, float limit,
            float shared_limit) {
  extern __shared__ uint4 smem[];
  bf16_t *xs = (bf16_t *)smem;
  float *partial = (float *)(xs + TOKENS * X_STRIDE);  // [warp][gate, up][64 rows][COLUMNS]
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  int block = blockIdx.x, u = (int)blockIdx.y - 1;
  bool is_shared = blockIdx.y == SHARED_EXPERT;
  let_consumer_start();
  wait_for_producer();

  uint32_t mask = (1u << tokens) - 1;
  int expert = 0;
  if (!is_shared) {
    if (u >= schedule->unique) return;
    mask = schedule->tokens[u];
    expert = schedule->expert[u];
  }
  float acc[2][4][4] = {};
  bool used = (mask >> g) & 1;
  const uint32_t *column = (const uint32_t *)(xs + (used ? g : 0) * X_STRIDE);
  if (is_shared) {
    stage_x(xs, x, tokens, true);
    constexpr int CHUNKS = HIDDEN / 64;
    for (int chunk = warp; chunk < CHUNKS; chunk += GATE_UP_WARPS) {
#pragma unroll
      for (int m = 0; m < 2; m++) {
        int row = m * INTER + block * 64;
        float scale = shared_s13[row / 128 * (HIDDEN / 128) + chunk / 2];
#pragma unroll
        for (int tile = 0; tile < 4; tile++)
          step_e4m3<HIDDEN>(acc[m][tile], shared_w13 + (size_t)(row + 16 * tile) * HIDDEN + chunk * 64,
                            column + chunk * 32, scale, used);
      }
    }
  } else {
    constexpr int N64 = 2 * INTER / 64, STEPS = HIDDEN / 32, AHEAD = 3;
    const uint4 *codes = w13 + (size_t)expert * (HIDDEN / 16) * N64 * 32 + lane;
    const uint2 *scales = s13 + (size_t)expert * STEPS * N64 * 8 + g;
    uint4 code[AHEAD][2][2];
    uint2 scale[AHEAD][2];
    auto fetch = [&](int slot, int step) {
      step = min(step, STEPS - 1);
#pragma unroll
      for (int m = 0; m < 2; m++) {
        int n64 = block + m * (INTER / 64);
        code[slot][m][0] = load_stream(codes + ((size_t)(2 * step) * N64 + n64) * 32);
        code[slot][m][1] = load_stream(codes + ((size_t)(2 * step + 1) * N64 + n64) * 32);
        scale[slot][m] = load_stream(scales + ((size_t)step * N64 + n64) * 8);
      }
    };
#pragma unroll
    for (int i = 0; i < AHEAD; i++) fetch(i, warp + i * GATE_UP_WARPS);
    stage_x(xs, x, tokens, false);
    for (int base = warp; base < STEPS; base += AHEAD * GATE_UP_WARPS) {
#pragma unroll
      for (int i = 0; i < AHEAD; i++) {
        int step = base + i * GATE_UP_WARPS;
        if (step >= STEPS) break;
        uint32_t b[4];
#pragma unroll
        for (int j = 0; j < 4; j++) b[j] = used ? column[step * 16 + 4 * j + t] : 0u;
#pragma unroll
        for (int m = 0; m < 2; m++) step_e2m1(acc[m], code[i][m], scale[i][m], b);
        if (step + AHEAD * GATE_UP_WARPS < STEPS) fetch(i, step + AHEAD * GATE_UP_WARPS);
      }
    }
  }

  // Sum the warps' parts of k, then gate and up meet.
#pragma unroll
  for (int m = 0; m < 2; m++)
#pragma unroll
    for (int tile = 0; tile < 4; tile++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        partial[((warp * 2 + m) * 64 + tile * 16 + g + (i >> 1) * 8) * COLUMNS + 2 * t + (i & 1)] = acc[m][tile][i];
  __syncthreads();
  for (int i = threadIdx.x; i < 64 * tokens; i += blockDim.x) {
    int row = i % 64, token = i / 64;
    if (!((mask >> token) & 1)) continue;
    float gate = 0.f, up = 0.f;
#pragma unroll
    for (int w = 0; w < GATE_UP_WARPS; w++) {
      gate += partial[((w * 2 + 0) * 64 + row) * COLUMNS + token];
      up += partial[((w * 2 + 1) * 64 + row) * COLUMNS + token];
    }
    float value = swiglu(gate, up, is_shared ? shared_limit : limit);
    int position = block * 64 + row;
    if (is_shared) position = (position & ~3) | ((position & 1) << 1) | ((position >> 1) & 1);
    act[((size_t)(u + 1) * COLUMNS + token) * INTER + position] = to_bf16(value);
  }
}

// out[token] = sum over its experts of weight * (W2 act) + shared expert. One CTA owns 32 output rows of all tokens.
extern "C" __global__ void __launch_bounds__(DOWN_WARPS * 32)
    down(const bf16_t *__restrict__ act, const uint2 *__restrict__ w2, const uint2 *__restrict__ s2,
         const uint8_t *__restrict__ shared_w2, const float *__restrict__ shared_s2,
         const Schedule *__restrict__ schedule, bf16_t *__restrict__ out, int tokens) {
  __shared__ float partial[DOWN_WARPS][32][COLUMNS];
  constexpr int N64 = HIDDEN / 64, STEPS = INTER / 32, PARTS = 4, MINE = STEPS / PARTS, CHUNKS = INTER / 64;
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  int n64 = blockIdx.x >> 1, half = blockIdx.x & 1;
  float total[2][4] = {};
  let_consumer_start();
  wait_for_producer();

  int unique = schedule->unique;
  for (int item = warp; item < unique * PARTS; item += DOWN_WARPS) {
    int u = item / PARTS, part = item % PARTS;
    bool used = (schedule->tokens[u] >> g) & 1;
    size_t expert = schedule->expert[u];
    const uint2 *codes = w2 + ((expert * (INTER / 16) * N64 + n64) * 32 + lane) * 2 + half;
    const uint2 *scales = s2 + (expert * STEPS * N64 + n64) * 8 + g;
    const uint32_t *column = (const uint32_t *)(act + ((size_t)(u + 1) * COLUMNS + g) * INTER);
    float acc[2][4] = {};
    uint2 code[MINE][2], scale[MINE];
#pragma unroll
    for (int i = 0; i < MINE; i++) {
      int step = part * MINE + i;
      code[i][0] = load_stream(codes + (size_t)(2 * step) * N64 * 64);
      code[i][1] = load_stream(codes + (size_t)(2 * step + 1) * N64 * 64);
      scale[i] = load_stream(scales + (size_t)step * N64 * 8);
    }
#pragma unroll
    for (int i = 0; i < MINE; i++) {
      int step = part * MINE + i;
      uint32_t four = half ? scale[i].y : scale[i].x;
#pragma unroll
      for (int k16 = 0; k16 < 2; k16++) {
        uint32_t b0 = used ? column[step * 16 + k16 * 8 + t] : 0u, b1 = used ? column[step * 16 + k16 * 8 + 4 + t] : 0u;
#pragma unroll
        for (int tile = 0; tile < 2; tile++) {
          uint32_t a[4];
          unpack_e2m1(a, tile ? code[i][k16].y : code[i][k16].x, (four >> (16 * tile)) & 255u,
                      (four >> (16 * tile + 8)) & 255u);
          mma_16816(acc[tile], a, b0, b1);
        }
      }
    }
    float w0 = schedule->weight[u][2 * t], w1 = schedule->weight[u][2 * t + 1];
#pragma unroll
    for (int tile = 0; tile < 2; tile++)
#pragma unroll
      for (int i = 0; i < 4; i++) total[tile][i] += ((i & 1) ? w1 : w0) * acc[tile][i];
  }
  // The shared expert last: its chunks go to the warps that had the fewest routed items.
  bool used = g < tokens;
  const uint32_t *column = (const uint32_t *)(act + (size_t)(used ? g : 0) * INTER);
  for (int chunk = DOWN_WARPS - 1 - warp; chunk < CHUNKS; chunk += DOWN_WARPS) {
    int row = blockIdx.x * 32;
    float scale = shared_s2[row / 128 * (INTER / 128) + chunk / 2];
#pragma unroll
    for (int tile = 0; tile < 2; tile++)
      step_e4m3<INTER>(total[tile], shared_w2 + (size_t)(row + 16 * tile) * INTER + chunk * 64, column + chunk * 32, scale, used);
  }

#pragma unroll
  for (int tile = 0; tile < 2; tile++)
#pragma unroll
    for (int i = 0; i < 4; i++) partial[warp][tile * 16 + g + (i >> 1) * 8][2 * t + (i & 1)] = total[tile][i];
  __syncthreads();
  for (int i = threadIdx.x; i < 32 * tokens; i += blockDim.x) {
    int row = i % 32, token = i / 32;
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < DOWN_WARPS; w++) sum += partial[w][row][token];
    out[(size_t)token * HIDDEN + blockIdx.x * 32 + row] = to_bf16(sum);
  }
}
