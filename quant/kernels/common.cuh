// SPDX-License-Identifier: Apache-2.0
// Device helpers shared by the decode kernels: unpacking FP4 and FP8 codes to BF16 pairs, the tensor-core step.
// No CUDA headers are included, so that NVRTC alone can build everything.
#pragma once

typedef unsigned char uint8_t;
typedef unsigned int uint32_t;
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

__device__ __forceinline__ uint32_t both_halves(uint32_t bits16) { return bits16 * 0x00010001u; }

// One step of D[16x8] += A[16x16] * B[16x8], BF16 operands, FP32 accumulator.
__device__ __forceinline__ void mma_16816(float d[4], const uint32_t a[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Multiplier for E2M1 codes placed at BF16 bits 6-8: 2^126 undoes the exponent bias, 2^(e-127) is the E8M0 scale.
// BF16 ends at 2^127, so exponents above 128 need `e2m1_rest` as a second factor (WIDE_SCALES).
__device__ __forceinline__ uint32_t e2m1_multiplier(uint32_t e) {
  return e == 255u ? 0x7FC07FC0u : both_halves(min(e + 126u, 254u) << 7);
}
__device__ __forceinline__ uint32_t e2m1_rest(uint32_t e) { return both_halves((127u + (e > 128u ? e - 128u : 0u)) << 7); }

// Pair P (0..3) of an 8-code word whose nibbles P and P + 4 form a pair: low half = nibble P, high half = nibble P + 4.
template <int P>
__device__ __forceinline__ uint32_t e2m1_pair(uint32_t w) {
  uint32_t sign = P == 3 ? w : w << (12 - 4 * P);
  uint32_t magnitude = P == 0 ? w << 6 : P == 1 ? w << 2 : P == 2 ? w >> 2 : w >> 6;
  return (sign & 0x80008000u) | (magnitude & 0x01C001C0u);
}

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
