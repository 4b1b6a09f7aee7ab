// SPDX-License-Identifier: Apache-2.0
// What threads do together: warps, barriers, clusters, asynchronous copies, late stores.
#include "grid.h"

#include <cstring>

namespace emulator {

const LaneValue *Grid::meet(unsigned mask, const char *what, const LaneValue &mine) {
  unsigned lane = self->lane;
  if (!(mask >> lane & 1)) fail(std::string(what) + ": the lane is not in its own mask");
  Warp &warp = *self->warp;
  size_t at = warp.meetings.size();
  for (size_t i = 0; i < warp.meetings.size(); i++) {
    Meeting &other = warp.meetings[i];
    if (other.mask == mask) at = i;
    else if (other.arrived && other.mask & mask) fail(std::string(what) + " while lanes wait in " + other.what + " with another mask");
  }
  if (at == warp.meetings.size()) warp.meetings.emplace_back(), warp.meetings[at].mask = mask;
  Meeting &here = warp.meetings[at];
  if (here.arrived && strcmp(here.what, what)) fail(std::string(what) + " while other lanes wait in " + here.what);
  unsigned turn = here.turn;
  here.what = what;
  here.values[turn % 2][lane] = mine;
  here.arrived |= 1u << lane;
  if (here.arrived == mask) {
    here.arrived = 0, here.turn++;
    progress_at = passes;
    make_ready(warp, mask);
  } else {
    while (warp.meetings[at].turn == turn) block();
  }
  return warp.meetings[at].values[turn % 2];
}

void Grid::cta_barrier() {
  Cta &cta = *self->cta;
  unsigned turn = cta.barrier_turn;
  if (++cta.at_barrier == launch.threads) {
    cta.at_barrier = 0, cta.barrier_turn++;
    progress_at = passes;
    for (unsigned t = 0; t < launch.threads; t++) {
      Thread &other = threads[(size_t)cta.number * launch.threads + t];
      make_ready(*other.warp, 1u << other.lane);
    }
    yield();
  } else {
    while (cta.barrier_turn == turn) block();
  }
}

void Grid::cluster_arrive() {
  Cluster &cluster = *self->cta->cluster;
  if (self->arrived) fail("arrives twice at the cluster's barrier");
  self->arrived = true, self->cluster_turn = cluster.turn;
  if (++cluster.arrived < cluster.threads) return;
  cluster.arrived = 0, cluster.turn++;
  progress_at = passes;
  for (Thread &other : threads)
    if (other.cta->cluster == &cluster && other.arrived && !other.ended) make_ready(*other.warp, 1u << other.lane);
}

void Grid::cluster_wait() {
  if (!self->arrived) fail("waits at the cluster's barrier without having arrived");
  while (self->cta->cluster->turn == self->cluster_turn) block();
  self->arrived = false;
}

void Grid::wait_for_producer() {
  self->waited = true;
  while (!released) block();
}

void Grid::let_consumer_start() { self->cta->let_start = true; }

// What a kernel finds in shared memory at first is NaN or anything.
void *Grid::shared_memory(size_t bytes) {
  Cta &cta = *self->cta;
  if (cta.shared) return cta.shared;
  cta.shared = arena + (cta.number + 1) * WINDOW - PAGE - (bytes + 127) / 128 * 128;
  bool nan = chance(2);
  for (size_t i = 0; i < (bytes + 127) / 128 * 16; i++) ((Word *)cta.shared)[i] = nan ? ~(Word)0 : random() * 0x9E3779B97F4A7C15u;
  return cta.shared;
}

unsigned Grid::shared_address(const void *p) {
  size_t at = (const char *)p - arena;
  if (at >= ctas.size() * WINDOW || at / WINDOW != self->cta->number) fail("takes for its own shared memory what is not");
  return (unsigned)at;
}
unsigned Grid::address_in_cluster(unsigned address, unsigned rank) {
  if (rank >= launch.cluster) fail("asks for a CTA that its cluster does not have");
  unsigned number = self->cta->number / launch.cluster * launch.cluster + rank;
  return (unsigned)(number * WINDOW + address % WINDOW);
}
Cta &Grid::cta_of(const void *shared) { return ctas[((const char *)shared - arena) / WINDOW]; }

void Grid::init_mbarrier(const void *at, int arrivals) { self->cta->mbarriers[at] = {arrivals, arrivals, 0, 0, {}}; }
Mbarrier &Grid::mbarrier(const void *at) {
  Cta &cta = cta_of(at);
  auto found = cta.mbarriers.find(at);
  if (found == cta.mbarriers.end()) fail("uses a barrier in shared memory before it was made");
  return found->second;
}
void Grid::expect(const void *at, int bytes) {
  Mbarrier &barrier = mbarrier(at);
  if (--barrier.pending < 0) fail("more arrivals at a barrier in shared memory than it was made for");
  barrier.bytes += bytes;
  settle(barrier);
}
void Grid::await(const void *at, unsigned parity) {
  Mbarrier &barrier = mbarrier(at);
  while (barrier.phase % 2 == parity) {
    barrier.waiting.push_back(self);
    block();
  }
}
void Grid::settle(Mbarrier &barrier) {
  if (barrier.pending || barrier.bytes) return;
  barrier.phase++, barrier.pending = barrier.arrivals;
  progress_at = passes;
  for (Thread *thread : barrier.waiting) make_ready(*thread->warp, 1u << thread->lane);
  barrier.waiting.clear();
}

// A copy happens at once or when it is waited for; until then there is nothing of use in its place.
void Grid::complete(Copy &copy) {
  if (copy.from) memcpy(copy.to, copy.from, 16);
  else memset(copy.to, 0, 16);
}
void Grid::copy_async(void *to, const void *from) {
  if ((uintptr_t)to % 16 || (uintptr_t)from % 16) fail("copies 16 bytes from or to an address that is not a multiple of 16");
  Copy copy = {to, from};
  if (chance(2)) return complete(copy);
  memset(to, 0xFF, 16);
  self->open.push_back(copy);
}
void Grid::commit_copies() {
  self->groups.push_back(std::move(self->open));
  self->open.clear();
}
void Grid::wait_copies(unsigned most_pending) {
  for (; self->groups.size() > most_pending; self->groups.pop_front())
    for (Copy &copy : self->groups.front()) complete(copy);
}

void Grid::store_late(void *to, const unsigned *data, int bytes) {
  if ((uintptr_t)to % bytes) fail("stores to an address that is not aligned");
  (void)*(volatile char *)to;  // whoever has a wrong address traps here, not when it is delivered
  if (!stored.insert(to).second) fail("stores to a word that was already stored in this launch");
  Pending store = {(char *)to, nullptr, bytes, {}};
  memcpy(store.data, data, bytes);
  pending.push_back(store);
  progress_at = passes;
  if (!laziness) deliver(pending.size() - 1);
}
void Grid::push(char *to, const void *barrier, const unsigned *data, int bytes) {
  if ((uintptr_t)to % bytes) fail("pushes to an address that is not aligned");
  (void)*(volatile char *)to;
  Pending store = {to, barrier, bytes, {}};
  memcpy(store.data, data, bytes);
  pending.push_back(store);
  progress_at = passes;
  if (!laziness) deliver(pending.size() - 1);
}

void Grid::deliver(size_t index) {
  Pending store = pending[index];
  pending[index] = pending.back(), pending.pop_back();
  progress_at = passes, deliveries++;
  if (store.barrier && !cta_of(store.to).live) {
    problem = "something was pushed into CTA " + std::to_string(cta_of(store.to).number) + ", which has ended";
    return;
  }
  memcpy(store.to, store.data, store.bytes);
  if (!store.barrier) return;
  auto found = cta_of(store.barrier).mbarriers.find(store.barrier);
  if (found == cta_of(store.barrier).mbarriers.end()) {
    problem = "something was pushed into CTA " + std::to_string(cta_of(store.to).number) + " before it had made its barrier";
    return;
  }
  found->second.bytes -= store.bytes;
  settle(found->second);
}
void Grid::drain() {
  if (!sleepers.empty() && chance(256)) wake_sleepers();
  if (pending.empty() || (laziness == 2 && !chance(4))) return;
  for (size_t n = pending.size() / (laziness == 1 ? 4 : 64) + 1; n && !pending.empty() && problem.empty(); n--)
    deliver(random() % pending.size());
  if (chance(16)) wake_sleepers();
}

}  // namespace emulator
