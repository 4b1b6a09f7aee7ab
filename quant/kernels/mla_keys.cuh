// SPDX-License-Identifier: Apache-2.0
// Which keys a token attends to, and how they are split over the CTAs of mla_attend.cu.
#pragma once

#define TILE 32  // keys at a time

// The batch as vLLM describes it. Tokens that belong to no sequence (padding of a CUDA graph) see no key.
struct Batch {
  const int *query_start, *lengths;  // [sequences + 1] first token; [sequences] keys, this step's tokens among them
  int sequences;
};

struct Keys {
  int sequence, limit;  // of the token; keys that it sees
  int written;          // keys that were there before this step
  int per_split, splits;  // keys of a split, a multiple of TILE; splits that have any

  __device__ __forceinline__ Keys(const Batch &batch, int token, int most_splits) : sequence(0), limit(0), written(0) {
    for (int s = 0; s < batch.sequences; s++) {
      int begin = batch.query_start[s], end = batch.query_start[s + 1];
      if (token < begin || token >= end) continue;
      sequence = s, limit = max(batch.lengths[s] - (end - 1 - token), 0), written = max(batch.lengths[s] - (end - begin), 0);
    }
    int tiles = (limit + TILE - 1) / TILE;
    per_split = (tiles + most_splits - 1) / most_splits * TILE;
    splits = limit ? (limit + per_split - 1) / per_split : 0;
  }
};

// [rows of 8][16 bytes] matrices of BF16 from shared memory, four at a time: lane 8 m + r holds the address of row r of matrix m.
__device__ __forceinline__ void load_matrices(uint32_t d[4], const void *address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"((uint32_t)__cvta_generic_to_shared(address)));
}
__device__ __forceinline__ void load_transposed(uint32_t d[4], const void *address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"((uint32_t)__cvta_generic_to_shared(address)));
}
