// The emulator's threads, meetings and scheduler; see machine.h. Compiled without the sanitizer.
#include "machine.h"

#include <algorithm>
#include <cstdio>
#include <deque>
#include <random>

#include "arrays.h"
#include "cuda.h"
#include "fiber.h"
#include "hooks.h"
#include "shadow.h"

namespace minserve {
namespace cuda {
constexpr std::size_t kMemoryBytes = 228 * 1024;  // of the largest multiprocessor
alignas(128) uint4 memory[kMemoryBytes / sizeof(uint4)];
}  // namespace cuda
}  // namespace minserve

namespace emulator {

Index threadIdx, blockIdx, gridDim, blockDim;

namespace {

char* const shared_memory = reinterpret_cast<char*>(minserve::cuda::memory);

struct Thread;

// Where threads meet: a barrier, or a warp's exchange of values.
struct Meeting {
  std::string name;
  unsigned arrived = 0, expected = 0;
  const char* what = "";
  Clock gathered;
  std::vector<char> here;
  std::vector<Thread*> waiting;
};

struct Copy {
  char* to;
  const char* from;
  std::size_t bytes;
};

struct Block;
struct Thread {
  Fiber fiber;
  Block* block = nullptr;
  unsigned number = 0;
  Clock clock;
  std::vector<Copy> copies;
  const Meeting* waits_at = nullptr;
  const void* looks_at = nullptr;  // the word that it loaded last
};

struct Warp {
  Meeting meeting;
  std::uint64_t given[32], taken[32];
  unsigned speed = 1;  // runs every so many visits
};

struct Kernel;
struct Block {
  Kernel* kernel = nullptr;
  unsigned number = 0, running = 0, speed = 1, begins = 0;
  bool lets_next = false, waited_for_kernel = false;
  std::deque<Thread> threads;
  std::deque<Warp> warps;
  std::vector<char> shared;
  std::unique_ptr<Shadow> shadow;
  Meeting all, named[16];
};

struct Kernel {
  Launch launch;
  unsigned number = 0;
  Kernel* before = nullptr;
  std::deque<Block> blocks;
  unsigned stores_under_way = 0;
  bool started = false;
  bool ended() const {
    if (!started || stores_under_way) return false;
    return std::all_of(blocks.begin(), blocks.end(), [](const Block& b) { return !b.running; });
  }
  bool lets_next() const {
    return started && std::all_of(blocks.begin(), blocks.end(),
                                  [](const Block& b) { return b.lets_next || !b.running; });
  }
};

struct Store {
  Thread* by;
  char* to;
  std::uint64_t bits[2];
  std::size_t bytes;
};

struct Machine {
  Arrays arrays;
  std::deque<Kernel> kernels;
  std::deque<Store> stores;
  std::mt19937 random;
  unsigned yield_chance = 0, land_every = 1;
  std::uint64_t progress = 0;
  Thread* current = nullptr;
  Block* loaded = nullptr;

  unsigned below(unsigned n) { return n < 2 ? 0 : random() % n; }
};
Machine machine;
Thread& me() {
  return *machine.current;
}

std::string name_of(const Thread& thread) {
  return thread.block->kernel->launch.name + ", block " + std::to_string(thread.block->number) +
         ", thread " + std::to_string(thread.number);
}

void suspend() {
  me().fiber.suspend();
}
void maybe_yield() {
  Machine& m = machine;
  if (m.yield_chance && m.below(m.yield_chance) == 0) suspend();
}

// orders: what arrivers did before is seen by those who wait. `last` is called by the last arriver.
template <class Last>
void meet(Meeting& at, unsigned expected, const char* what, bool waits, bool orders, Last last) {
  Thread& self = me();
  Block& block = *self.block;
  if (at.here.empty()) at.here.assign(block.threads.size(), 0);
  if (at.arrived && (at.expected != expected || at.what != what)) {
    fail(at.name + ": " + what + " for " + std::to_string(expected) +
         " threads, where others wait at " + at.what + " for " + std::to_string(at.expected));
  }
  if (at.here[self.number]) fail(at.name + ": arrives a second time in one round");
  at.here[self.number] = 1;
  at.expected = expected, at.what = what;
  if (orders) {
    at.gathered.join(self.clock);
    ++self.clock.at[self.number];
  }
  if (waits) at.waiting.push_back(&self);
  if (++at.arrived < expected) {
    if (!waits) return;
    self.waits_at = &at;
    suspend();
    return;
  }
  last();
  for (Thread* thread : at.waiting) {
    if (orders) thread->clock.join(at.gathered);
    thread->waits_at = nullptr;
  }
  at.waiting.clear();
  at.arrived = 0;
  at.gathered.at.clear();
  std::fill(at.here.begin(), at.here.end(), 0);
}
void count_progress() {
  ++machine.progress;
}

Warp& my_warp() {
  return me().block->warps[me().number / 32];
}
void check_mask(unsigned mask) {
  if (mask != 0xffffffffu) fail("meets others than its whole warp");
}

std::size_t offset_in_shared(const void* at) {
  return static_cast<std::size_t>(static_cast<const char*>(at) - shared_memory);
}
bool is_shared(const void* at) {
  return at >= static_cast<void*>(shared_memory) &&
         at < static_cast<void*>(shared_memory + minserve::cuda::kMemoryBytes);
}

std::string check_array(const void* at, std::size_t bytes, Use use, bool word) {
  const Block& block = *me().block;
  const Kernel& kernel = *block.kernel;
  return machine.arrays.check(
      at, bytes,
      {use, word, kernel.number, block.number, !kernel.launch.overlaps || block.waited_for_kernel});
}
void check_word(const void* at, std::size_t bytes, Use use) {
  if (reinterpret_cast<std::uintptr_t>(at) % bytes) {
    fail("a word that is not aligned: " + machine.arrays.place(at));
  }
  const std::string wrong = check_array(at, bytes, use, true);
  if (!wrong.empty()) fail(wrong);
}

void land(const Store& store) {
  std::memcpy(store.to, store.bits, store.bytes);
  --store.by->block->kernel->stores_under_way;
  count_progress();
}

}  // namespace

void fail(const std::string& what) {
  if (machine.current) {
    std::fprintf(stderr, "%s: %s\n", name_of(me()).c_str(), what.c_str());
  } else {
    std::fprintf(stderr, "%s\n", what.c_str());
  }
  std::fflush(stdout);
  std::fflush(stderr);
  std::_Exit(3);
}

void touch(const void* at, std::size_t bytes, bool writes) {
  Machine& m = machine;
  if (!m.current) return;
  std::string wrong;
  if (is_shared(at)) {
    Thread& self = me();
    Shadow& shadow = *self.block->shadow;
    wrong = writes ? shadow.write(offset_in_shared(at), bytes, self.number, self.clock)
                   : shadow.read(offset_in_shared(at), bytes, self.number, self.clock);
  } else if (m.arrays.holds(at)) {
    wrong = check_array(at, bytes, writes ? Use::write : Use::read, false);
  }
  if (!wrong.empty()) fail(wrong);
}

void* allocate(const std::string& name, std::size_t bytes, Use use, std::size_t shift) {
  return machine.arrays.allocate(name, bytes, use, shift);
}
void free_all() {
  machine.arrays.free_all();
}

void yield() {
  suspend();
}
void sync_block() {
  Block& block = *me().block;
  meet(block.all, static_cast<unsigned>(block.threads.size()), "__syncthreads", true, true,
       count_progress);
  maybe_yield();
}
void sync_warp(unsigned mask) {
  check_mask(mask);
  meet(my_warp().meeting, 32, "__syncwarp", true, true, [] {});
}
unsigned ballot(unsigned mask, bool mine) {
  check_mask(mask);
  Warp& warp = my_warp();
  warp.given[me().number % 32] = mine;
  meet(warp.meeting, 32, "__ballot_sync", true, false,
       [&] { std::copy(warp.given, warp.given + 32, warp.taken); });
  unsigned votes = 0;
  for (int lane = 0; lane < 32; ++lane) votes |= static_cast<unsigned>(warp.taken[lane]) << lane;
  return votes;
}
std::uint64_t exchange(unsigned mask, std::uint64_t mine, int from) {
  check_mask(mask);
  Warp& warp = my_warp();
  warp.given[me().number % 32] = mine;
  meet(warp.meeting, 32, "__shfl_sync", true, false,
       [&] { std::copy(warp.given, warp.given + 32, warp.taken); });
  return warp.taken[from];
}
void named_barrier(int number, unsigned threads, bool waits) {
  Block& block = *me().block;
  if (number < 1 || number > 15) fail("there is no named barrier " + std::to_string(number));
  if (threads % 32 || threads > block.threads.size()) {
    fail("barrier " + std::to_string(number) + ": " + std::to_string(threads) +
         " threads cannot meet in a block of " + std::to_string(block.threads.size()));
  }
  meet(block.named[number], threads, "a barrier", waits, true, count_progress);
  maybe_yield();
}

void start_copy(void* shared, const void* global, std::size_t bytes) {
  Thread& self = me();
  if (!is_shared(shared)) fail("copies to where no shared memory is");
  if (reinterpret_cast<std::uintptr_t>(shared) % bytes ||
      reinterpret_cast<std::uintptr_t>(global) % bytes) {
    fail("copies " + std::to_string(bytes) +
         " bytes that are not aligned so: " + machine.arrays.place(global));
  }
  std::string wrong = check_array(global, bytes, Use::read, false);
  if (wrong.empty()) {
    wrong =
        self.block->shadow->start_copy(offset_in_shared(shared), bytes, self.number, self.clock);
  }
  if (!wrong.empty()) fail(wrong);
  std::memset(shared, 0xff, bytes);
  self.copies.push_back({static_cast<char*>(shared), static_cast<const char*>(global), bytes});
}
void wait_for_copies() {
  maybe_yield();
  Thread& self = me();
  for (const Copy& copy : self.copies) {
    std::memcpy(copy.to, copy.from, copy.bytes);
    self.block->shadow->land_copy(offset_in_shared(copy.to), copy.bytes, self.number, self.clock);
  }
  self.copies.clear();
  maybe_yield();
}

void load_word(const void* at, void* bits, std::size_t bytes) {
  Machine& m = machine;
  check_word(at, bytes, Use::read);
  me().looks_at = at;
  maybe_yield();
  std::memcpy(bits, at, bytes);
  for (const Store& store : m.stores) {  // a thread sees its own
    if (store.by == &me() && store.to == at) std::memcpy(bits, store.bits, bytes);
  }
}
void store_word(void* at, const void* bits, std::size_t bytes) {
  Machine& m = machine;
  check_word(at, bytes, Use::write);
  Store store = {&me(), static_cast<char*>(at), {0, 0}, bytes};
  std::memcpy(store.bits, bits, bytes);
  m.stores.push_back(store);
  ++me().block->kernel->stores_under_way;
  maybe_yield();
}
unsigned add(unsigned* at, unsigned more) {
  maybe_yield();
  check_word(at, sizeof *at, Use::write);
  const unsigned before = *at;
  *at += more;
  count_progress();
  maybe_yield();
  return before;
}
void let_next_kernel_start() {
  me().block->lets_next = true;
  maybe_yield();
}
void wait_for_previous_kernel() {
  me().looks_at = nullptr;
  Block& block = *me().block;
  while (block.kernel->before && !block.kernel->before->ended()) suspend();
  block.waited_for_kernel = true;
}

namespace {

void start(Kernel& kernel) {
  Machine& m = machine;
  const Launch& launch = kernel.launch;
  kernel.started = true;
  kernel.blocks.resize(launch.blocks);
  for (unsigned b = 0; b < launch.blocks; ++b) {
    Block& block = kernel.blocks[b];
    block.kernel = &kernel;
    block.number = b;
    block.running = launch.threads;
    block.shared.assign(launch.shared_bytes, '\xff');
    block.shadow.reset(new Shadow(launch.shared_bytes, launch.threads));
    block.all.name = "block " + std::to_string(b);
    for (int n = 0; n < 16; ++n) block.named[n].name = "barrier " + std::to_string(n);
    if (m.yield_chance) {
      block.speed = 1u << 2 * m.below(3);
      block.begins = m.below(4) ? 0 : m.below(300);
    }
    block.warps.resize((launch.threads + 31) / 32);
    for (std::size_t w = 0; w < block.warps.size(); ++w) {
      block.warps[w].meeting.name = "warp " + std::to_string(w);
      if (m.yield_chance) block.warps[w].speed = 1u << 2 * m.below(3);
    }
    block.threads.resize(launch.threads);
    for (unsigned t = 0; t < launch.threads; ++t) {
      Thread& thread = block.threads[t];
      thread.block = &block;
      thread.number = t;
      thread.clock.at.assign(launch.threads, 0);
      thread.clock.at[t] = 1;  // of which nobody else has heard
      thread.fiber.body = launch.kernel;
    }
  }
  count_progress();
}

void load(Block& block) {
  Machine& m = machine;
  if (m.loaded == &block) return;
  if (m.loaded) std::memcpy(m.loaded->shared.data(), shared_memory, m.loaded->shared.size());
  std::memcpy(shared_memory, block.shared.data(), block.shared.size());
  m.loaded = &block;
}

void resume(Thread& thread) {
  Machine& m = machine;
  const Launch& launch = thread.block->kernel->launch;
  threadIdx.x = thread.number, blockIdx.x = thread.block->number;
  gridDim = {launch.blocks, 1, 1}, blockDim = {launch.threads, 1, 1};
  m.current = &thread;
  thread.fiber.resume();
  m.current = nullptr;
  if (thread.fiber.done) {
    --thread.block->running;
    count_progress();
  }
}

// Lets each thread that can go on do so, once; whether there was one. hurry: nobody is slow.
bool visit(Block& block, std::uint64_t pass, bool hurry) {
  Machine& m = machine;
  if (!block.running) return false;
  if (!hurry && (pass < block.begins || m.below(block.speed))) return true;
  bool any = false;
  for (std::size_t w = 0; w < block.warps.size(); ++w) {
    if (!hurry && m.below(block.warps[w].speed)) {
      any = true;
      continue;
    }
    const std::size_t first = w * 32,
                      lanes = std::min<std::size_t>(32, block.threads.size() - first);
    const std::size_t turn = m.yield_chance ? m.below(32) : 0;
    for (std::size_t i = 0; i < lanes; ++i) {
      Thread& thread = block.threads[first + (i + turn) % lanes];
      if (thread.fiber.done || thread.waits_at) continue;
      any = true;
      load(block);
      resume(thread);
    }
  }
  return any;
}

void land_some_stores() {
  Machine& m = machine;
  std::deque<Store> left;
  for (const Store& store : m.stores) {
    // Those of one thread to one place stay in order.
    const bool held = std::any_of(left.begin(), left.end(), [&](const Store& other) {
      return other.by == store.by && other.to == store.to;
    });
    if (held || m.below(m.land_every)) {
      left.push_back(store);
    } else {
      land(store);
    }
  }
  m.stores.swap(left);
}

[[noreturn]] void report_stuck() {
  std::string report = "a wait that never ends:";
  int lines = 0;
  for (const Kernel& kernel : machine.kernels) {
    for (const Block& block : kernel.blocks) {
      // Threads of a warp that wait for the same are told of once.
      std::string said;
      for (const Thread& thread : block.threads) {
        if (thread.fiber.done) continue;
        std::string line;
        if (thread.waits_at) {
          line = thread.waits_at->name + " (" + thread.waits_at->what + ", " +
                 std::to_string(thread.waits_at->arrived) + " of " +
                 std::to_string(thread.waits_at->expected) + " threads are there)";
        } else {
          line = "looks again and again at " +
                 (thread.looks_at ? machine.arrays.place(thread.looks_at) : "the kernel before");
        }
        line = ", warp " + std::to_string(thread.number / 32) + ": " + line;
        if (line == said || ++lines > 40) continue;
        said = line;
        report += "\n  " + kernel.launch.name + ", block " + std::to_string(block.number) + line;
      }
    }
  }
  fail(report);
}

}  // namespace

void launch(Launch what) {
  Machine& m = machine;
  Kernel* const before = m.kernels.empty() ? nullptr : &m.kernels.back();
  m.kernels.emplace_back();
  m.kernels.back().number = static_cast<unsigned>(m.kernels.size()) - 1;
  m.kernels.back().launch = std::move(what);
  m.kernels.back().before = before;
}

void run(unsigned seed) {
  constexpr std::uint64_t kQuietPasses = 3000;
  Machine& m = machine;
  m.random.seed(seed);
  m.yield_chance = seed ? 2 + m.below(8) : 0;
  m.land_every = seed ? 1u << 2 * m.below(3) : 1;
  std::uint64_t seen = m.progress, seen_at = 0;
  for (std::uint64_t pass = 0;; ++pass) {
    bool any = false;
    for (Kernel& kernel : m.kernels) {
      if (kernel.ended()) continue;
      any = true;
      if (!kernel.started) {
        const Kernel* before = kernel.before;
        if (before && !before->ended() && !(kernel.launch.overlaps && before->lets_next())) break;
        start(kernel);
      }
    }
    if (!any) break;
    std::vector<Block*> order;
    for (Kernel& kernel : m.kernels) {
      for (Block& block : kernel.blocks) {
        if (block.running) order.push_back(&block);
      }
    }
    if (seed) std::shuffle(order.begin(), order.end(), m.random);
    bool can_go_on = !m.stores.empty() || order.empty();
    const bool hurry = pass - seen_at > kQuietPasses / 10;
    for (Block* block : order) can_go_on = visit(*block, pass, hurry) || can_go_on;
    land_some_stores();
    if (m.progress != seen) seen = m.progress, seen_at = pass;
    if (!can_go_on || pass - seen_at > kQuietPasses) report_stuck();
  }
  m.kernels.clear();
  m.loaded = nullptr;
}

}  // namespace emulator
