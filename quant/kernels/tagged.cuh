// SPDX-License-Identifier: Apache-2.0
// Values that the CTAs of a launch hand to each other without barriers: value and tag of the launch are one 64-bit word, which is
// written and read whole. The reader asks again until the tag is there. No fence is needed, as a word tells of nothing but itself,
// and none of the accesses may be merged, moved out of a loop or served by L1.
#pragma once
#include "common.cuh"

struct alignas(8) Tagged {
  uint32_t value, tag;
};

__device__ __forceinline__ void store_tagged(Tagged *p, uint32_t value, uint32_t tag) {
  asm volatile("{\n .reg .b64 w;\n mov.b64 w, {%1, %2};\n st.relaxed.gpu.global.b64 [%0], w;\n}" ::"l"(p), "r"(value), "r"(tag) : "memory");
}
// Two neighbours, at an address divisible by 16: each is whole, though a reader may see one before the other.
__device__ __forceinline__ void store_tagged(Tagged *p, uint32_t first, uint32_t second, uint32_t tag) {
  asm volatile("{\n .reg .b64 v, w;\n mov.b64 v, {%1, %3};\n mov.b64 w, {%2, %3};\n st.relaxed.gpu.global.v2.b64 [%0], {v, w};\n}" ::"l"(p),
               "r"(first), "r"(second), "r"(tag)
               : "memory");
}

// The tag of a launch is its number, as counted on the device, where a replayed graph finds it too; 0 means never written.
__device__ __forceinline__ uint32_t next_tag(uint32_t epoch) { return epoch + 1 ? epoch + 1 : 1; }
__device__ __forceinline__ void store_epoch(uint32_t *p, uint32_t tag) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(tag) : "memory");
}

// A word on its way. Never asked for if it starts with the tag; its value is then 0. Words stay in 64-bit registers, or ptxas moves
// their halves about after each load.
struct Word {
  uint64_t word;
  __device__ __forceinline__ void start(bool wanted, uint32_t want) { word = wanted ? 0u : (uint64_t)want << 32; }  // no tag is 0
  __device__ __forceinline__ uint32_t tag() const {  // in assembler, as tests of 64-bit shifts become 64-bit tests
    uint32_t value, tag;
    asm("mov.b64 {%0, %1}, %2;" : "=r"(value), "=r"(tag) : "l"(word));
    return tag;
  }
  __device__ __forceinline__ uint32_t missing(uint32_t want) const { return tag() ^ want; }  // 0 once it is there
  __device__ __forceinline__ uint32_t bits() const { return (uint32_t)word; }
  __device__ __forceinline__ float value() const { return __uint_as_float(bits()); }
  __device__ __forceinline__ void ask(const Tagged *p, uint32_t want) {
    asm volatile("{\n .reg .pred p;\n setp.ne.u32 p, %2, %3;\n @p ld.relaxed.gpu.global.b64 %0, [%1];\n}"
                 : "+l"(word)
                 : "l"(p), "r"(tag()), "r"(want)
                 : "memory");
  }
};
// Two neighbours, at an address divisible by 16.
struct WordPair {
  Word first, second;
  __device__ __forceinline__ void start(bool wanted, uint32_t want) { first.start(wanted, want), second.start(wanted, want); }
  __device__ __forceinline__ uint32_t missing(uint32_t want) const { return first.missing(want) | second.missing(want); }
  __device__ __forceinline__ void ask(const Tagged *p, uint32_t want) {
    asm volatile(
        "{\n .reg .pred p;\n setp.ne.u32 p, %3, %5;\n setp.ne.or.u32 p, %4, %5, p;\n @p ld.relaxed.gpu.global.v2.b64 {%0, %1}, [%2];\n}"
        : "+l"(first.word), "+l"(second.word)
        : "l"(p), "r"(first.tag()), "r"(second.tag()), "r"(want)
        : "memory");
  }
};

// Waits for N words or pairs, started before; at(i) is the address of number i. Only those that are missing are asked for again.
template <int N, typename Kind, typename At>
__device__ __forceinline__ void wait_tagged(Kind (&word)[N], uint32_t want, const At &at) {
  uint32_t missing;
#pragma unroll 1
  do {
    missing = 0;
#pragma unroll
    for (int i = 0; i < N; i++) word[i].ask(at(i), want);
#pragma unroll
    for (int i = 0; i < N; i++) missing |= word[i].missing(want);
  } while (missing);
}
