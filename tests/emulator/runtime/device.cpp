// SPDX-License-Identifier: Apache-2.0
// device.h, by the grid that runs.
#include "grid.h"

namespace emulator {

void fail(const char *what, const char *why) { grid->fail(*why ? std::string(what) + ": " + why : std::string(what)); }
bool chance(unsigned one_in) { return grid->chance(one_in); }
void look() { grid->look(); }
const LaneValue *meet(unsigned mask, const char *what, const LaneValue &mine) { return grid->meet(mask, what, mine); }
void cta_barrier() { grid->cta_barrier(); }
void cluster_arrive() { grid->cluster_arrive(); }
void cluster_wait() { grid->cluster_wait(); }
void wait_for_producer() { grid->wait_for_producer(); }
void let_consumer_start() { grid->let_consumer_start(); }
void *dynamic_memory() { return grid->dynamic_memory(); }
void *static_memory(size_t bytes) { return grid->shared_memory(bytes); }
unsigned shared_address(const void *p) { return grid->shared_address(p); }
char *shared_pointer(unsigned address) { return grid->shared_pointer(address); }
unsigned address_in_cluster(unsigned address, unsigned rank) { return grid->address_in_cluster(address, rank); }
void copy_async(void *to, const void *from) { grid->copy_async(to, from); }
void commit_copies() { grid->commit_copies(); }
void wait_copies(unsigned most_pending) { grid->wait_copies(most_pending); }
void store_late(void *to, const unsigned *data, int bytes) { grid->store_late(to, data, bytes); }
void push(char *to, const char *barrier, const unsigned *data, int bytes) { grid->push(to, barrier, data, bytes); }
void init_mbarrier(char *at, int arrivals) { grid->init_mbarrier(at, arrivals); }
void expect(char *at, int bytes) { grid->expect(at, bytes); }
void await(char *at, unsigned parity) { grid->await(at, parity); }

}  // namespace emulator
