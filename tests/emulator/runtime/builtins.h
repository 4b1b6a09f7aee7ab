// SPDX-License-Identifier: Apache-2.0
// The part of CUDA C++ that the kernels use. Included within the kernel's namespace, where its names win over those of math.h.
#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
inline unsigned min(int a, unsigned b) { return min((unsigned)a, b); }
inline unsigned max(int a, unsigned b) { return max((unsigned)a, b); }
inline unsigned min(unsigned a, int b) { return min(a, (unsigned)b); }
inline unsigned max(unsigned a, int b) { return max(a, (unsigned)b); }

inline float __uint_as_float(unsigned bits) { return ptx::from_bits<float>(bits); }
inline float __int_as_float(int bits) { return ptx::from_bits<float>((unsigned)bits); }
inline unsigned __float_as_uint(float value) { return ptx::bits_of(value); }
inline int __float_as_int(float value) { return (int)ptx::bits_of(value); }

inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __ffs(unsigned v) { return __builtin_ffs((int)v); }
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((unsigned long long)a * b >> 32); }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  unsigned long long both = (unsigned long long)b << 32 | a;
  unsigned result = 0;
  for (int i = 0; i < 4; i++) {
    if (selector >> (4 * i) & 8) emulator::fail("__byte_perm: the sign mode is not emulated");
    result |= (unsigned)(both >> (8 * (selector >> (4 * i) & 7)) & 0xFF) << (8 * i);
  }
  return result;
}
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float x) { return 1.f / sqrtf(x); }
template <typename T>
inline T __ldg(const T *p) {
  return *p;
}

// Lanes of a warp.
template <typename T>
inline const emulator::LaneValue *exchange(unsigned mask, const char *what, T value) {
  emulator::LaneValue mine = {};
  static_assert(sizeof(T) <= sizeof(mine), "too wide");
  memcpy(mine.word, &value, sizeof(T));
  return emulator::meet(mask, what, mine);
}
template <typename T>
inline T lane_value(const emulator::LaneValue *all, unsigned mask, unsigned lane) {
  if (!(mask >> lane & 1)) emulator::fail("reads the value of a lane that is not in the mask");
  T value;
  memcpy(&value, all[lane].word, sizeof(T));
  return value;
}
inline void __syncwarp(unsigned mask = ~0u) { exchange(mask, "__syncwarp", 0); }
template <typename T>
inline T __shfl_sync(unsigned mask, T value, int lane) {
  return lane_value<T>(exchange(mask, "__shfl_sync", value), mask, lane & 31);
}
template <typename T>
inline T __shfl_xor_sync(unsigned mask, T value, int with) {
  return lane_value<T>(exchange(mask, "__shfl_xor_sync", value), mask, (threadIdx.x & 31) ^ with);
}
template <typename T>
inline T __shfl_up_sync(unsigned mask, T value, int by) {
  int lane = threadIdx.x & 31;
  return lane_value<T>(exchange(mask, "__shfl_up_sync", value), mask, lane >= by ? lane - by : lane);
}
inline unsigned __ballot_sync(unsigned mask, bool holds) {
  const emulator::LaneValue *all = exchange(mask, "__ballot_sync", holds ? 1u : 0u);
  unsigned result = 0;
  for (int i = 0; i < 32; i++)
    if (mask >> i & 1) result |= all[i].word[0] << i;
  return result;
}
inline unsigned __reduce_max_sync(unsigned mask, unsigned value) {
  const emulator::LaneValue *all = exchange(mask, "__reduce_max_sync", value);
  for (int i = 0; i < 32; i++)
    if (mask >> i & 1) value = max(value, all[i].word[0]);
  return value;
}
inline unsigned __reduce_min_sync(unsigned mask, unsigned value) {
  const emulator::LaneValue *all = exchange(mask, "__reduce_min_sync", value);
  for (int i = 0; i < 32; i++)
    if (mask >> i & 1) value = min(value, all[i].word[0]);
  return value;
}

inline void __syncthreads() { emulator::cta_barrier(); }
inline void __threadfence() {}  // plain stores are never late
inline unsigned atomicAdd(unsigned *p, unsigned v) {
  unsigned before = *p;
  *p += v;
  return before;
}
inline unsigned atomicOr(unsigned *p, unsigned v) {
  unsigned before = *p;
  *p |= v;
  return before;
}
inline unsigned atomicMax(unsigned *p, unsigned v) {
  unsigned before = *p;
  *p = max(before, v);
  return before;
}
inline unsigned long long __cvta_generic_to_shared(const void *p) { return emulator::shared_address(p); }
