// SPDX-License-Identifier: Apache-2.0
// The PTX instructions that the kernels' inline assembler uses, a function each: its name is the instruction with _ for . and ::, its
// arguments are the operands in PTX's order. An instruction that is missing here is one that g++ does not find.
#pragma once
#include "device.h"

namespace ptx {

using emulator::Word;

template <typename T>
inline T from_bits(unsigned bits) {
  T value;
  memcpy(&value, &bits, sizeof(T));
  return value;
}
inline unsigned bits_of(float value) {
  unsigned bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

// Number formats.
inline unsigned short to_bf16(float value) {
  unsigned bits = bits_of(value);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return 0x7FFF;
  return (unsigned short)((bits + 0x7FFFu + (bits >> 16 & 1)) >> 16);
}
inline float from_bf16(unsigned bits) { return from_bits<float>(bits << 16); }
inline unsigned short to_f16(float value) {
  unsigned bits = bits_of(value), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return 0x7FFF;
  if (magnitude >= 0x477FF000u) return (unsigned short)(sign | 0x7C00u);  // rounds to more than 65504
  if (magnitude < 0x38800000u)                                              // a subnormal: a multiple of 2^-24
    return (unsigned short)(sign | (unsigned)lrintf(from_bits<float>(magnitude) * 16777216.f));
  return (unsigned short)(sign | (magnitude - 0x38000000u + 0xFFFu + (magnitude >> 13 & 1)) >> 13);
}
inline float from_f16(unsigned bits) {
  unsigned magnitude = bits & 0x7FFFu;
  float value = magnitude >= 0x7C00u ? from_bits<float>(0x7F800000u | magnitude << 13 & 0x7FFFFFu)
                : magnitude < 0x400u ? (float)magnitude / 16777216.f
                                     : from_bits<float>((magnitude << 13) + 0x38000000u);
  return bits & 0x8000u ? -value : value;
}
inline void cvt_rn_bf16_f32(unsigned short &d, float a) { d = to_bf16(a); }
inline void cvt_rn_f16x2_f32(unsigned &d, float high, float low) { d = (unsigned)to_f16(high) << 16 | to_f16(low); }
inline void mul_rn_bf16x2(unsigned &d, unsigned a, unsigned b) {
  unsigned low = to_bf16(from_bf16(a & 0xFFFFu) * from_bf16(b & 0xFFFFu)), high = to_bf16(from_bf16(a >> 16) * from_bf16(b >> 16));
  d = high << 16 | low;
}

// Registers.
inline void mov_b64(Word &d, unsigned low, unsigned high) { d = (Word)high << 32 | low; }
inline void mov_b64(unsigned &low, unsigned &high, Word a) { low = (unsigned)a, high = (unsigned)(a >> 32); }
inline void setp_ne_u32(bool &p, unsigned a, unsigned b) { p = a != b; }
inline void setp_ne_or_u32(bool &p, unsigned a, unsigned b, bool c) { p = a != b || c; }
inline void selp_u32(unsigned &d, unsigned a, unsigned b, bool p) { d = p ? a : b; }

// The tensor core: A is [16][16] row by row, B [16][8] column by column; lane 4 g + t has of A the rows g and g + 8.
template <float (*value)(unsigned)>
inline void multiply(float *d, const unsigned *a, const unsigned *b, const char *what) {
  emulator::LaneValue mine;
  for (unsigned i = 0; i < 12; i++) mine.value[i] = value((i < 8 ? a[i / 2] : b[(i - 8) / 2]) >> i % 2 * 16 & 0xFFFFu);
  const emulator::LaneValue *all = emulator::meet(~0u, what, mine);
  unsigned lane = (threadIdx.x % 32), g = lane / 4, t = lane % 4;
  for (unsigned i = 0; i < 4; i++) {
    float sum = 0.f;
    for (unsigned k = 0; k < 16; k++) {
      const float *of_a = all[g * 4 + k % 8 / 2].value + k / 8 * 4 + i / 2 * 2, *of_b = all[(t * 2 + i % 2) * 4 + k % 8 / 2].value + 8 + k / 8 * 2;
      sum += of_a[k % 2] * of_b[k % 2];
    }
    d[i] += sum;
  }
}
#define MMA(NAME, VALUE)                                                                                                    \
  inline void NAME(float &d0, float &d1, float &d2, float &d3, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, \
                   unsigned b1, float c0, float c1, float c2, float c3) {                                                   \
    float d[4] = {c0, c1, c2, c3};                                                                                          \
    unsigned a[4] = {a0, a1, a2, a3}, b[2] = {b0, b1};                                                                      \
    multiply<VALUE>(d, a, b, #NAME);                                                                                        \
    d0 = d[0], d1 = d[1], d2 = d[2], d3 = d[3];                                                                             \
  }
MMA(mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32, from_bf16)
MMA(mma_sync_aligned_m16n8k16_row_col_f32_f16_f16_f32, from_f16)
#undef MMA

// Four [8][8] matrices of 16 bits: lane 8 m + r has the address of row r of matrix m, and gets of each the elements 2 t and 2 t + 1 of row
// g, transposed those of column g.
template <bool TRANSPOSED>
inline void load_matrices(unsigned *d, unsigned address, const char *what) {
  if (address % 16) emulator::fail(what, "an address is not a multiple of 16");
  const emulator::LaneValue *all = emulator::meet(~0u, what, emulator::LaneValue{{{address}}});
  unsigned lane = (threadIdx.x % 32), g = lane / 4, t = lane % 4;
  for (unsigned m = 0; m < 4; m++) {
    unsigned short pair[2];
    for (unsigned i = 0; i < 2; i++) {
      unsigned row = TRANSPOSED ? 2 * t + i : g, column = TRANSPOSED ? g : 2 * t + i;
      memcpy(&pair[i], emulator::shared_pointer(all[m * 8 + row].word[0]) + column * 2, 2);
    }
    d[m] = (unsigned)pair[1] << 16 | pair[0];
  }
  emulator::meet(~0u, what, {});  // no lane writes there before all have read
}
inline void ldmatrix_sync_aligned_m8n8_x4_shared_b16(unsigned &d0, unsigned &d1, unsigned &d2, unsigned &d3, unsigned address) {
  unsigned d[4];
  load_matrices<false>(d, address, "ldmatrix");
  d0 = d[0], d1 = d[1], d2 = d[2], d3 = d[3];
}
inline void ldmatrix_sync_aligned_m8n8_x4_trans_shared_b16(unsigned &d0, unsigned &d1, unsigned &d2, unsigned &d3, unsigned address) {
  unsigned d[4];
  load_matrices<true>(d, address, "ldmatrix.trans");
  d0 = d[0], d1 = d[1], d2 = d[2], d3 = d[3];
}

// Loads from global memory: others may come between them, and between the words of one.
template <typename... T>
inline void load(const void *p, int aligned, T &...d) {
  if ((uintptr_t)p % aligned) emulator::fail("loads from an address that is not aligned");
  const char *at = (const char *)p;
  ((memcpy(&d, at, sizeof(T)), at += sizeof(T)), ...);
}
inline void ld_global_nc_L1_no_allocate_v4_u32(unsigned &x, unsigned &y, unsigned &z, unsigned &w, const void *p) { load(p, 16, x, y, z, w); }
inline void ld_global_nc_L1_no_allocate_v2_u32(unsigned &x, unsigned &y, const void *p) { load(p, 8, x, y); }
template <typename... T>
inline void load_relaxed(const void *p, T &...d) {
  emulator::look();
  load(p, (0 + ... + (int)sizeof(T)), d...);
}
inline void ld_relaxed_gpu_global_v4_f32(float &x, float &y, float &z, float &w, const void *p) { load_relaxed(p, x, y, z, w); }
inline void ld_relaxed_gpu_global_v4_u32(unsigned &x, unsigned &y, unsigned &z, unsigned &w, const void *p) { load_relaxed(p, x, y, z, w); }
inline void ld_relaxed_gpu_global_v2_u32(unsigned &x, unsigned &y, const void *p) { load_relaxed(p, x, y); }
inline void ld_relaxed_gpu_global_v2_f32(float &x, float &y, const void *p) { load_relaxed(p, x, y); }
inline void ld_relaxed_gpu_global_u32(unsigned &x, const void *p) { load_relaxed(p, x); }
inline void ld_relaxed_gpu_global_f32(float &x, const void *p) { load_relaxed(p, x); }
inline void ld_relaxed_gpu_global_u16(unsigned short &x, const void *p) { load_relaxed(p, x); }
inline void ld_relaxed_gpu_global_b64(Word &x, const void *p) { load_relaxed(p, x); }
inline void ld_relaxed_gpu_global_v2_b64(Word &x, Word &y, const void *p) {
  if ((uintptr_t)p % 16) emulator::fail("loads from an address that is not aligned");
  bool first = emulator::chance(2);
  load_relaxed((const Word *)p + !first, first ? x : y);
  load_relaxed((const Word *)p + first, first ? y : x);
}
inline void st_relaxed_gpu_global_u32(void *p, unsigned v) { emulator::store_late(p, &v, 4); }
inline void st_relaxed_gpu_global_b64(void *p, Word v) {
  unsigned data[2] = {(unsigned)v, (unsigned)(v >> 32)};
  emulator::store_late(p, data, 8);
}
inline void st_relaxed_gpu_global_v2_b64(void *p, Word v, Word w) {
  if ((uintptr_t)p % 16) emulator::fail("stores to an address that is not aligned");
  st_relaxed_gpu_global_b64(p, v);
  st_relaxed_gpu_global_b64((Word *)p + 1, w);
}

// Asynchronous copies.
inline void createpolicy_fractional_L2_evict_first_b64(Word &policy, double) { policy = 1; }
inline void cp_async_cg_shared_global(unsigned to, const void *from, int, int bytes) {
  if (bytes != 0 && bytes != 16) emulator::fail("cp.async: a part of 16 bytes is not emulated");
  emulator::copy_async(emulator::shared_pointer(to), bytes ? from : nullptr);
}
inline void cp_async_cg_shared_global_L2_cache_hint(unsigned to, const void *from, int bytes, Word policy) {
  if (bytes != 16 || policy != 1) emulator::fail("cp.async: no 16 bytes, or no policy");
  emulator::copy_async(emulator::shared_pointer(to), from);
}
inline void cp_async_commit_group() { emulator::commit_copies(); }
inline void cp_async_wait_group(int most_pending) { emulator::wait_copies(most_pending); }

// Dependent launches.
inline void griddepcontrol_wait() { emulator::wait_for_producer(); }
inline void griddepcontrol_launch_dependents() { emulator::let_consumer_start(); }

// Clusters, and barriers in shared memory.
inline void barrier_cluster_arrive_relaxed_aligned() { emulator::cluster_arrive(); }
inline void barrier_cluster_wait_acquire_aligned() { emulator::cluster_wait(); }
inline void fence_mbarrier_init_release_cluster() {}
inline void mapa_shared_cluster_u32(unsigned &d, unsigned address, int rank) { d = emulator::address_in_cluster(address, rank); }
inline void mbarrier_init_shared_cta_b64(unsigned at, int arrivals) { emulator::init_mbarrier(emulator::shared_pointer(at), arrivals); }
inline void mbarrier_arrive_expect_tx_shared_cta_b64(unsigned at, int bytes) { emulator::expect(emulator::shared_pointer(at), bytes); }
inline void mbarrier_try_wait_parity_acquire_cluster_shared_cta_b64(bool &p, unsigned at, unsigned parity) {
  emulator::await(emulator::shared_pointer(at), parity);
  p = true;
}
inline void st_async_shared_cluster_mbarrier_complete_tx_bytes_b32(unsigned to, unsigned v, unsigned barrier) {
  emulator::push(emulator::shared_pointer(to), emulator::shared_pointer(barrier), &v, 4);
}
inline void st_async_shared_cluster_mbarrier_complete_tx_bytes_v4_b32(unsigned to, unsigned x, unsigned y, unsigned z, unsigned w,
                                                                     unsigned barrier) {
  unsigned data[4] = {x, y, z, w};
  emulator::push(emulator::shared_pointer(to), emulator::shared_pointer(barrier), data, 16);
}

}  // namespace ptx
