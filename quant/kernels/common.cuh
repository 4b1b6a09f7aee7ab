// SPDX-License-Identifier: Apache-2.0
// Device helpers shared by the decode kernels: unpacking FP4 and FP8 codes to BF16 pairs, the tensor-core step.
// No CUDA headers are included, so that NVRTC alone can build everything.
#pragma once

typedef unsigned char uint8_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
struct bf16_t {
  unsigned short bits;
};

__device__ __forceinline__ bf16_t to_bf16(float value) {
  bf16_t out;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out.bits) : "f"(value));
  return out;
}
__device__ __forceinline__ float to_float(bf16_t value) { return __uint_as_float((uint32_t)value.bits << 16); }

// d = a * b for two BF16 pairs; subnormal inputs are exact, which the unpacking below relies on.
__device__ __forceinline__ uint32_t mul_bf16x2(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

// One step of D[16x8] += A[16x16] * B[16x8], BF16 operands, FP32 accumulator.
__device__ __forceinline__ void mma_16816(float d[4], const uint32_t a[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The same for FP16 operands.
__device__ __forceinline__ void mma_16816_f16(float d[4], const uint32_t a[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ uint32_t pack_f16(float low, float high) {
  uint32_t d;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}

// Eight E2M1 codes as FP16 pairs scaled by 2^-14: pair P holds nibbles P and P + 4. In FP16, sign, exponent and mantissa of a
// code all lie in the high byte, so four codes are placed at a time.
__device__ __forceinline__ void e2m1_pairs(uint32_t pair[4], uint32_t w) {
  uint32_t odd = (w & 0x80808080u) | ((w >> 3) & 0x0E0E0E0Eu), even = ((w << 4) & 0x80808080u) | ((w << 1) & 0x0E0E0E0Eu);
  pair[0] = __byte_perm(even, 0, 0x2404);
  pair[1] = __byte_perm(odd, 0, 0x2404);
  pair[2] = even & 0xFF00FF00u;
  pair[3] = odd & 0xFF00FF00u;
}
// Byte i of four E8M0 scales as a float: 2^(e - 127); 0 gives 0 and 255 (NaN) infinity.
__device__ __forceinline__ float e8m0(uint32_t four, int i) {
  return __uint_as_float(__byte_perm(four, 0, 0x4440 | i) << 23);
}

// Values up to 2^(e - 126), e being a float's exponent field, are brought to FP16's range by times `to_half_range(e)`; with the
// 2^14 of e2m1_pairs, times `from_half_range(e)` undoes it. Nothing is rounded but values below 2^-38 of the largest.
__device__ __forceinline__ float to_half_range(uint32_t e) { return __uint_as_float(min(268u - e, 254u) << 23); }
__device__ __forceinline__ float from_half_range(uint32_t e) { return __uint_as_float((e < 15u ? 0u : e) << 23); }

// E4M3 bytes (0, 2) or (1, 3) of a word as a BF16 pair scaled by 2^-120: exponent and mantissa go to bits 4-10.
__device__ __forceinline__ uint32_t e4m3_pair_even(uint32_t w) {
  return ((w << 8) & 0x80008000u) | ((w << 4) & 0x07F007F0u);
}
__device__ __forceinline__ uint32_t e4m3_pair_odd(uint32_t w) { return (w & 0x80008000u) | ((w >> 4) & 0x07F007F0u); }
#define E4M3_MULTIPLIER 0x7B807B80u  // 2^120 in both halves

// Streaming loads: every weight byte is used once per step, so it should not evict anything from L1.
__device__ __forceinline__ uint4 load_stream(const uint4 *p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}
__device__ __forceinline__ uint2 load_stream(const uint2 *p) {
  uint2 v;
  asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
  return v;
}

// Asynchronous copies of 16 bytes into shared memory; each warp waits for its own, oldest first. What is copied so is read once
// per step: it leaves L2 first, so that what steps share stays.
__device__ __forceinline__ void copy_async(void *shared, const void *global) {
  unsigned long long once;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"((uint32_t)__cvta_generic_to_shared(shared)),
               "l"(global), "l"(once)
               : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
  __syncwarp();
}

__device__ __forceinline__ uint32_t word_of(const uint4 &v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// What other CTAs wrote in this launch, or the launch before it while this one had already started: from L2, as L1 may hold what
// was there before, and never moved across a barrier (__ldcg and loads of const __restrict__ pointers may be).
__device__ __forceinline__ float4 load_fresh(const float4 *p) {
  float4 v;
  asm volatile("ld.relaxed.gpu.global.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ uint4 load_fresh(const uint4 *p) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ uint2 load_fresh(const uint2 *p) {
  uint2 v;
  asm volatile("ld.relaxed.gpu.global.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ uint32_t load_fresh(const uint32_t *p) {
  uint32_t v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ float load_fresh(const bf16_t *p) {
  bf16_t v;
  asm volatile("ld.relaxed.gpu.global.u16 %0, [%1];" : "=h"(v.bits) : "l"(p) : "memory");
  return to_float(v);
}
__device__ __forceinline__ float2 load_fresh(const float2 *p) {
  float2 v;
  asm volatile("ld.relaxed.gpu.global.v2.f32 {%0,%1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ float load_fresh(const float *p) {
  float v;
  asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(v) : "l"(p) : "memory");
  return v;
}

// Programmatic dependent launch: start early, wait for the producer's memory only where its result is needed.
__device__ __forceinline__ void wait_for_producer() {
#if USE_PDL
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void let_consumer_start() {
#if USE_PDL
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
