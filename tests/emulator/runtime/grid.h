// SPDX-License-Identifier: Apache-2.0
// Launches of kernels on the CPU: every CUDA thread is a fiber, and a seeded scheduler decides which warp goes on.
//
// What hardware may do late or early happens here at random times within what it promises: asynchronous copies, relaxed stores to
// global memory, pushes into other CTAs. Plain stores are seen at once, which is more than CUDA promises.
#pragma once
#include <csetjmp>
#include <deque>
#include <map>
#include <string>
#include <unordered_set>
#include <vector>

#include "device.h"

namespace emulator {

constexpr size_t PAGE = 65536;                // at least the system's, for guards
constexpr size_t STACK = 4 * PAGE;            // of a fiber, with a guard page below
constexpr size_t WINDOW = 256 * 1024 + PAGE;  // of a CTA's shared memory, with a guard page above

struct Copy {
  void *to;
  const void *from;  // nullptr: zeros
};

struct Cta;
struct Warp;
struct Thread {
  jmp_buf at;
  Cta *cta;
  Warp *warp;
  unsigned number, lane;
  bool begun = false, ended = false, waited = false;
  unsigned cluster_turn = 0;          // of the cluster's barrier when this thread arrived
  bool arrived = false;               // at that barrier, and has not waited yet
  Word seen = 0;                      // of the grid's deliveries when this thread last looked
  unsigned in_vain = 0;               // looks since there was a new one
  std::vector<Copy> open;             // copies that no group has yet
  std::deque<std::vector<Copy>> groups;
};

// What the lanes of a mask do together. Two turns are kept: a lane may come to the next one before others have read this one.
struct Meeting {
  unsigned mask = 0, arrived = 0, turn = 0;
  const char *what = nullptr;
  LaneValue values[2][32];
};

struct Warp {
  unsigned number, ready = 0;  // in the grid; lanes that can go on
  bool queued = false;
  std::vector<Meeting> meetings;
};

// A transaction barrier in shared memory.
struct Mbarrier {
  int arrivals, pending;
  long long bytes;
  unsigned phase;
  std::vector<Thread *> waiting;
};

struct Cluster {
  unsigned threads = 0, arrived = 0, turn = 0;
};

struct Cta {
  Index index;
  unsigned number, live, at_barrier = 0, barrier_turn = 0;
  bool let_start = false;  // its consumer
  char *shared = nullptr;  // begin of what the kernel asked for
  Cluster *cluster;
  std::map<const void *, Mbarrier> mbarriers;
};

// A store on its way; a push if `barrier` is set.
struct Pending {
  char *to;
  const void *barrier;
  int bytes;
  unsigned data[4];
};

struct Pieces {
  char *base = nullptr;
  size_t count = 0, bytes = 0;
};

struct Launch {
  void (*call)(void **);
  void **arguments;
  unsigned grid_x, grid_y, threads, cluster, shared_bytes, pdl;
  Word seed;
};

class Grid {
 public:
  explicit Grid(const Launch &launch);
  ~Grid();
  Grid(const Grid &) = delete;

  enum Until { PRODUCER_NEEDED, CONSUMER_MAY_START, END };
  // Goes on until that; false: `problem` says what is wrong, and nothing may be done with this grid any more.
  bool run(Until until);
  std::string problem;

  // As in device.h, from within a fiber.
  void look();
  const LaneValue *meet(unsigned mask, const char *what, const LaneValue &mine);
  void cta_barrier();
  void cluster_arrive();
  void cluster_wait();
  void wait_for_producer();
  void let_consumer_start();
  void *shared_memory(size_t bytes);
  void *dynamic_memory() { return shared_memory(launch.shared_bytes); }
  unsigned shared_address(const void *p);
  char *shared_pointer(unsigned address) { return arena + address; }
  unsigned address_in_cluster(unsigned address, unsigned rank);
  void init_mbarrier(const void *at, int arrivals);
  void expect(const void *at, int bytes);
  void await(const void *at, unsigned parity);
  void copy_async(void *to, const void *from);
  void commit_copies();
  void wait_copies(unsigned most_pending);
  void store_late(void *to, const unsigned *data, int bytes);
  void push(char *to, const void *barrier, const unsigned *data, int bytes);
  [[noreturn]] void fail(const std::string &what);
  Word random() {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return state >> 16;
  }
  bool chance(unsigned one_in) { return random() % one_in == 0; }

 private:
  friend void fiber_main();
  friend void on_signal(int);
  void yield() { leave(); }
  void drain();
  Mbarrier &mbarrier(const void *at);
  void make_ready(Warp &warp, unsigned lanes);
  void wake_sleepers();
  void block();
  void leave();
  void resume(Thread &thread);
  void pass(Warp &warp);
  Warp &pick();
  void deliver(size_t index);
  void settle(Mbarrier &barrier);
  void complete(Copy &copy);
  Cta &cta_of(const void *shared);
  bool all_let_start() const;
  bool give_up(const char *why);
  void release();
  bool stir(Until until);

  Launch launch;
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  std::vector<Cta> ctas;
  std::vector<Cluster> clusters;
  std::vector<unsigned> queue;  // of warps that can go on
  std::vector<Pending> pending;
  std::unordered_set<void *> stored;  // where relaxed stores went
  Pieces stacks, windows;
  char *arena = nullptr;  // of the windows
  unsigned live = 0, slow_cta = 0, slow_warp = 0, last_warp = 0;
  enum { UNIFORM, STICKY, SLOW_ONES, STICKY_AND_SLOW } strategy;
  unsigned laziness;  // of stores: 0 at once
  unsigned slowness;  // of what is slow: it is left out but once in so many times
  bool released = false;
  Word state;
  unsigned warps_each;  // of a CTA
  Word passes = 0, progress_at = 0, deliveries = 0;
  std::vector<Thread *> sleepers;  // that looked in vain
  jmp_buf scheduler;
};

extern Grid *grid;      // that runs
extern Thread *self;    // of it

}  // namespace emulator
