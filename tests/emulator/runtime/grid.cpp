// SPDX-License-Identifier: Apache-2.0
// Launches, fibers and the scheduler; what threads do together is in sync.cpp.
#include "grid.h"

#include <csignal>
#include <cstdlib>
#include <cstring>
#include <sys/mman.h>
#include <ucontext.h>

Index threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {

Grid *grid;
Thread *self;

static const Word PATIENCE = 1000;  // passes of each warp without anything getting done

static char *reserve(size_t bytes) {
  void *p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) abort();
  return (char *)p;
}

// Pieces of memory, each with a guard page at `guard` unless they are too many; kept for later grids, as guards are slow to make.
static std::vector<Pieces> unused;
static Pieces pieces(size_t count, size_t bytes, size_t guard) {
  for (size_t i = unused.size(); i-- > 0;) {
    if (unused[i].bytes != bytes) continue;
    Pieces found = unused[i];
    unused.erase(unused.begin() + i);
    if (found.count >= count) return found;
    munmap(found.base, found.count * bytes);
  }
  Pieces made = {reserve(count * bytes), count, bytes};
  for (size_t i = 0; i < count && count <= 8192; i++)  // a process may have 65530 mappings, and a guard makes two
    if (mprotect(made.base + i * bytes + guard, PAGE, PROT_NONE)) abort();
  return made;
}

Grid::Grid(const Launch &l) : launch(l), state(l.seed * 0x9E3779B97F4A7C15u | 1), warps_each(l.threads / 32) {
  unsigned count = l.grid_x * l.grid_y;
  for (int i = 0; i < 8; i++) random();
  threads.resize((size_t)count * l.threads), warps.resize((size_t)count * warps_each), ctas.resize(count), clusters.resize(count / l.cluster);
  for (unsigned c = 0; c < count; c++) {
    Cta &cta = ctas[c];
    cta.number = c, cta.live = l.threads, cta.index = {c % l.grid_x, c / l.grid_x, 0};
    cta.cluster = &clusters[c / l.cluster];
    cta.cluster->threads += l.threads;
    for (unsigned t = 0; t < l.threads; t++) {
      Thread &thread = threads[(size_t)c * l.threads + t];
      thread.cta = &cta, thread.number = t, thread.lane = t % 32, thread.warp = &warps[c * warps_each + t / 32];
      thread.warp->number = c * warps_each + t / 32;
      make_ready(*thread.warp, 1u << t % 32);
    }
  }
  live = threads.size();
  if (l.threads % 32 || count % l.cluster || count * WINDOW >> 32) problem = "a launch of this size is not emulated";
  stacks = pieces(threads.size(), STACK, 0);
  windows = pieces(count, WINDOW, WINDOW - PAGE), arena = windows.base;
  strategy = (decltype(strategy))(random() % 4);
  laziness = random() % 3, slowness = 64u << random() % 3 * 5;
  slow_cta = random() % count, slow_warp = random() % warps.size();
}

Grid::~Grid() {
  unused.push_back(stacks), unused.push_back(windows);
}

void Grid::make_ready(Warp &warp, unsigned lanes) {
  warp.ready |= lanes;
  if (!warp.queued) warp.queued = true, queue.push_back(warp.number);
}

// Fibers: ucontext makes them, setjmp switches between them, as swapcontext would ask the kernel each time.
void fiber_main() {
  grid->launch.call(grid->launch.arguments);
  if (grid->launch.pdl && !self->waited) grid->fail("ends without having waited for its producer");
  if (!self->open.empty() || self->arrived) grid->fail("ends in the midst of a copy or a barrier");
  self->ended = true, self->cta->live--, grid->live--;
  grid->progress_at = grid->passes;
  self->warp->ready &= ~(1u << self->lane);
  grid->leave();
  abort();
}

void Grid::leave() {
  if (!_setjmp(self->at)) _longjmp(scheduler, 1);
}
void Grid::block() {
  self->warp->ready &= ~(1u << self->lane);
  leave();
}

void Grid::look() {
  if (!chance(4)) return;
  if (self->seen != deliveries) self->seen = deliveries, self->in_vain = 0;
  if (++self->in_vain < 8 || (deliveries == 0 && pending.empty())) return yield();
  self->in_vain = 0;
  sleepers.push_back(self);
  block();
}
void Grid::wake_sleepers() {
  for (Thread *thread : sleepers) make_ready(*thread->warp, 1u << thread->lane);
  sleepers.clear();
}

void Grid::resume(Thread &thread) {
  self = &thread;
  threadIdx = {thread.number, 0, 0}, blockIdx = thread.cta->index;
  if (_setjmp(scheduler)) return;
  if (thread.begun) _longjmp(thread.at, 1);
  thread.begun = true;
  static ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = stacks.base + (&thread - threads.data()) * STACK + PAGE;
  context.uc_stack.ss_size = STACK - PAGE;
  context.uc_link = nullptr;
  makecontext(&context, fiber_main, 0);
  setcontext(&context);
}

void Grid::fail(const std::string &what) {
  problem = "CTA " + std::to_string(self->cta->index.x) + "," + std::to_string(self->cta->index.y) + " thread " +
            std::to_string(self->number) + ": " + what;
  _longjmp(scheduler, 1);
}

void on_signal(int number) {
  grid->fail(number == SIGSEGV || number == SIGBUS ? "touches memory that is not there, or at an odd address" : "traps");
}
// Within its scope, what would end the process ends the launch, on a stack of its own as the fiber's may be full.
struct Traps {
  static constexpr int NUMBERS[4] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE};
  struct sigaction before[4];
  stack_t before_stack;

  Traps() {
    static char *const memory = reserve(PAGE);
    stack_t stack = {};
    stack.ss_sp = memory, stack.ss_size = PAGE;
    sigaltstack(&stack, &before_stack);
    struct sigaction action = {};
    action.sa_handler = on_signal, action.sa_flags = SA_ONSTACK | SA_NODEFER;
    for (int i = 0; i < 4; i++) sigaction(NUMBERS[i], &action, &before[i]);
  }
  ~Traps() {
    for (int i = 0; i < 4; i++) sigaction(NUMBERS[i], &before[i], nullptr);
    sigaltstack(&before_stack, nullptr);
  }
};

// A warp's lanes one after the other, in either direction from anywhere, now and then only some of them.
void Grid::pass(Warp &warp) {
  unsigned first = random() % 32, step = chance(2) ? 1 : 31, some = chance(4) ? (unsigned)random() : ~0u;
  unsigned base = warp.number % warps_each * 32;
  Thread *of_warp = &threads[(size_t)(warp.number / warps_each) * launch.threads + base];
  for (unsigned i = 0; i < 32 && problem.empty(); i++) {
    unsigned lane = (first + i * step) % 32;
    if (!(warp.ready & some & 1u << lane)) continue;
    if (of_warp[lane].ended) warp.ready &= ~(1u << lane);  // whoever woke it had not noticed
    else resume(of_warp[lane]);
  }
}

Warp &Grid::pick() {
  size_t found = random() % queue.size();
  auto slow = [&](size_t i) { return queue[i] == slow_warp || queue[i] / warps_each == slow_cta; };
  bool sticky = strategy == STICKY || strategy == STICKY_AND_SLOW, slowed = strategy == SLOW_ONES || strategy == STICKY_AND_SLOW;
  if (sticky && progress_at == passes - 1 && random() % 16 && warps[last_warp].queued)
    for (size_t i = queue.size(); i-- > 0 && i + 8 > queue.size();)
      if (queue[i] == last_warp) found = i;
  if (slowed && passes - progress_at < 8 * warps.size() && random() % slowness)
    for (int tries = 0; tries < 16 && slow(found); tries++) found = random() % queue.size();
  Warp &warp = warps[queue[found]];
  queue[found] = queue.back(), queue.pop_back();
  warp.queued = false, last_warp = warp.number;
  return warp;
}

bool Grid::all_let_start() const {
  for (const Cta &cta : ctas)
    if (!cta.let_start && cta.live) return false;
  return true;
}

bool Grid::give_up(const char *why) {
  problem = why;
  int shown = 0;
  for (const Thread &t : threads)
    if (!t.ended && shown++ < 6) problem += (shown == 1 ? ": CTA " : "; CTA ") + std::to_string(t.cta->number) + " thread " + std::to_string(t.number);
  return false;
}

void Grid::release() {
  released = true;
  for (Thread &t : threads)
    if (t.waited && !t.ended) make_ready(*t.warp, 1u << t.lane);
}

// Nothing can go on of itself. False: nor will it.
bool Grid::stir(Until until) {
  if (!pending.empty() || !sleepers.empty()) {
    for (size_t n = pending.empty() ? 0 : 1 + random() % pending.size(); n && problem.empty(); n--) deliver(random() % pending.size());
    wake_sleepers();
    return true;
  }
  if (released) return give_up("all threads wait for each other");
  if (until == PRODUCER_NEEDED) return false;
  release();
  return true;
}

bool Grid::run(Until until) {
  Traps traps;
  grid = this;
  blockDim = {launch.threads, 1, 1}, gridDim = {launch.grid_x, launch.grid_y, 1};
  progress_at = passes;
  if (until == END && !released) release();
  while (live && problem.empty() && !(until == CONSUMER_MAY_START && all_let_start())) {
    if (queue.empty()) {
      if (stir(until)) continue;
      break;
    }
    Warp &warp = pick();
    pass(warp);
    if (warp.ready) make_ready(warp, 0);
    if (problem.empty()) drain();
    if (++passes - progress_at > PATIENCE * warps.size() && problem.empty()) give_up("nothing gets done any more");
  }
  while (!live && !pending.empty() && problem.empty()) deliver(pending.size() - 1);
  grid = nullptr;
  return problem.empty();
}

}  // namespace emulator

using emulator::Grid;

extern "C" Grid *emulator_start(const emulator::Launch *launch) { return new Grid(*launch); }
extern "C" const char *emulator_run(Grid *grid, int until) {
  return grid->run((Grid::Until)until) ? nullptr : grid->problem.c_str();
}
extern "C" void emulator_free(Grid *grid) { delete grid; }
