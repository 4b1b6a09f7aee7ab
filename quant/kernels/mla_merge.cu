// SPDX-License-Identifier: Apache-2.0
// After mla_attend.cu: adds the splits of each token and head, and brings the sum out of the latent space (the head's value
// projection). A cluster of four CTAs does a head: each adds a quarter of the latent columns, tells the others, and then does a
// quarter of the outputs. Its weights are on their way to shared memory before it waits.
// Compile-time: HEADS, LATENT, VALUE (outputs of a head), LATENT_CONTIGUOUS (how value_weight lies), TOKENS (1, 2, 4 or 8), SPLITS,
// USE_PDL, SHARED_BYTES.
#define WARPS 8
#define THREADS (WARPS * 32)
#include "cluster.cuh"
#include "mla_keys.cuh"
#include "mla_product.cuh"

#define CLUSTER 4
#define COLUMNS (LATENT / CLUSTER)
#define OUTPUTS (VALUE / CLUSTER)
#define QUADS (COLUMNS / 4)
#define ADDERS (WARPS / TOKENS)  // warps that add the splits of a token
#define AT_ONCE 8                // loads on their way together
static_assert(LATENT % 128 == 0 && QUADS <= 32 && VALUE % 32 == 0 && WARPS % TOKENS == 0, "mla_attention.py: shape");

struct Shared {
  Product<LATENT, OUTPUTS, LATENT_CONTIGUOUS> product;
  float4 parts[TOKENS][ADDERS][QUADS];
  float factor[WARPS][SPLITS];
  unsigned long long told;  // completes when the product's x is whole
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "mla_attention.py: shared memory size");

__device__ __forceinline__ void add(float4 &sum, float f, const float4 &v) { sum.x += f * v.x, sum.y += f * v.y, sum.z += f * v.z, sum.w += f * v.w; }
// What each split's sum is to be multiplied with, by one warp: its share of all weights. None if `used` is 0.
__device__ __forceinline__ void split_factors(float *factor, const float2 *peaks, size_t stride, int used) {
  int lane = threadIdx.x & 31;
  float2 peak[(SPLITS + 31) / 32];
  float most = -__int_as_float(0x7F800000), total = 0.f;
#pragma unroll
  for (int b = 0; b < (SPLITS + 31) / 32; b++) {
    int split = b * 32 + lane;
    peak[b] = split < used ? load_fresh(peaks + split * stride) : make_float2(-__int_as_float(0x7F800000), 0.f);
  }
#pragma unroll
  for (int b = 0; b < (SPLITS + 31) / 32; b++) most = fmaxf(most, peak[b].x);
#pragma unroll
  for (int offset = 16; offset; offset >>= 1) most = fmaxf(most, __shfl_xor_sync(~0u, most, offset));
#pragma unroll
  for (int b = 0; b < (SPLITS + 31) / 32; b++) {
    peak[b].x = b * 32 + lane < used ? exp2f(peak[b].x - most) : 0.f;
    total += peak[b].x * peak[b].y;
  }
  total = warp_sum(total);
#pragma unroll
  for (int b = 0; b < (SPLITS + 31) / 32; b++)
    if (b * 32 + lane < used) factor[b * 32 + lane] = peak[b].x / total;
  __syncwarp();
}

// sums, peaks, query_start, lengths, sequences: as in mla_attend.cu, whose grid had SPLITS splits. value_weight: BF16
// [HEADS][VALUE][LATENT], or [HEADS][LATENT][VALUE] unless LATENT_CONTIGUOUS, with strides. out: BF16 [tokens][HEADS * VALUE].
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    mla_merge(const float *__restrict__ sums, const float2 *__restrict__ peaks, const bf16_t *__restrict__ value_weight,
              const int *__restrict__ query_start, const int *__restrict__ lengths, bf16_t *__restrict__ out, long long head_stride,
              long long row_stride, int sequences, int tokens) {
  extern __shared__ uint4 dynamic[];
  Shared &s = *(Shared *)dynamic;
  int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, head = blockIdx.x / CLUSTER, part = blockIdx.x % CLUSTER;
  let_consumer_start();
  expect_pushed(&s.told, tokens * LATENT * (int)sizeof(float));
  s.product.fetch(value_weight + head * head_stride + part * OUTPUTS * (LATENT_CONTIGUOUS ? row_stride : 1), row_stride);
  int token = warp / ADDERS, adder = warp % ADDERS;
  int used = token < tokens ? Keys(Batch{query_start, lengths, sequences}, token, SPLITS).splits : 0;
  wait_for_producer();

  float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
  if (token < tokens) split_factors(s.factor[warp], peaks + (size_t)token * HEADS + head, (size_t)tokens * HEADS, used);
#pragma unroll 1
  for (int first = adder; first < used; first += ADDERS * AT_ONCE) {  // four columns a lane
    float4 v[AT_ONCE];
    float f[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      int split = min(first + i * ADDERS, used - 1);
      f[i] = first + i * ADDERS < used ? s.factor[warp][split] : 0.f;
      v[i] = load_fresh((const float4 *)(sums + (((size_t)split * tokens + token) * HEADS + head) * LATENT + part * COLUMNS) + min(lane, QUADS - 1));
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) add(sum, f[i], v[i]);
  }
  if (lane < QUADS) s.parts[token][adder][lane] = sum;
  __syncthreads();
  cluster_wait();
  if (warp < tokens && lane < QUADS) {
    sum = s.parts[warp][0][lane];
#pragma unroll
    for (int i = 1; i < ADDERS; i++) add(sum, 1.f, s.parts[warp][i][lane]);
#pragma unroll
    for (int cta = 0; cta < CLUSTER; cta++) push((float4 *)&s.product.x[warp][part * COLUMNS + lane * 4], &s.told, cta, sum);
  }
  wait_copies<0>();
  wait_pushed(&s.told);  // after that no CTA touches this one again
  __syncthreads();       // the weights of all threads
  s.product.multiply();
  __syncthreads();
#pragma unroll 1
  for (int i = tid; i < tokens * (OUTPUTS / 2); i += THREADS) {
    int n = i / (OUTPUTS / 2), pair = i % (OUTPUTS / 2);
    ((uint32_t *)(out + (size_t)n * (HEADS * VALUE) + head * VALUE + part * OUTPUTS))[pair] = s.product.pair_of(n, pair);
  }
}
