// SPDX-License-Identifier: Apache-2.0
// What the builtins and PTX instructions ask of the running grid. No C++ library: every kernel variant is compiled with this.
#pragma once
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

struct Index {
  unsigned x, y, z;
};
extern Index threadIdx, blockIdx, blockDim, gridDim;  // of the running thread

namespace emulator {

typedef unsigned long long Word;

// What a lane brings when lanes meet.
struct LaneValue {
  union {
    unsigned word[12];
    float value[12];
  };
};

[[noreturn]] void fail(const char *what, const char *why = "");  // ends the launch
bool chance(unsigned one_in);
void look();  // at what others may still write: they come in between now and then, and often if this thread asks in vain

// All lanes of `mask` bring a value to `what`, and see those of all.
const LaneValue *meet(unsigned mask, const char *what, const LaneValue &mine);
void cta_barrier();
void cluster_arrive();
void cluster_wait();

void wait_for_producer();
void let_consumer_start();

void *dynamic_memory();            // of the CTA, in shared memory
void *static_memory(size_t bytes);
unsigned shared_address(const void *p);
char *shared_pointer(unsigned address);
unsigned address_in_cluster(unsigned address, unsigned rank);

void copy_async(void *to, const void *from);  // 16 bytes; nullptr: zeros
void commit_copies();
void wait_copies(unsigned most_pending);

void store_late(void *to, const unsigned *data, int bytes);
void push(char *to, const char *barrier, const unsigned *data, int bytes);  // into shared memory of any CTA

// Barriers in shared memory that count bytes.
void init_mbarrier(char *at, int arrivals);
void expect(char *at, int bytes);  // and arrives
void await(char *at, unsigned parity);

}  // namespace emulator
