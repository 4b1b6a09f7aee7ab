// SPDX-License-Identifier: Apache-2.0
// What the CTAs of a cluster tell each other through shared memory, counted in bytes by the one who waits.
#pragma once
#include "common.cuh"

// Once `bytes` were pushed into this CTA, wait_pushed returns; `cluster_wait` tells that every CTA of the cluster expects its own.
// A cluster barrier in place of both would wait for stores to global memory too: its release covers all memory.
__device__ __forceinline__ void expect_pushed(unsigned long long *barrier, int bytes) {
  uint32_t at = (uint32_t)__cvta_generic_to_shared(barrier);
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(at) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
  }
  __syncwarp();
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
__device__ __forceinline__ uint32_t remote(const void *local, int cta) {
  uint32_t at;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"((uint32_t)__cvta_generic_to_shared(local)), "r"(cta));
  return at;
}
__device__ __forceinline__ void push(float *local, unsigned long long *barrier, int cta, float value) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(remote(local, cta)),
               "r"(__float_as_uint(value)), "r"(remote(barrier, cta))
               : "memory");
}
__device__ __forceinline__ void push(float4 *local, unsigned long long *barrier, int cta, const float4 &v) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(remote(local, cta)),
               "r"(__float_as_uint(v.x)), "r"(__float_as_uint(v.y)), "r"(__float_as_uint(v.z)), "r"(__float_as_uint(v.w)),
               "r"(remote(barrier, cta))
               : "memory");
}
__device__ __forceinline__ void wait_pushed(const unsigned long long *barrier) {
  uint32_t done = 0;
  while (!done)
    asm volatile(
        "{.reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], 0; selp.u32 %0, 1, 0, p;}"
        : "=r"(done)
        : "r"((uint32_t)__cvta_generic_to_shared(barrier))
        : "memory");
}
