// Which thread runs when; see machine.h.
#include <cstdio>

#include "state.h"

namespace emulator {

namespace {

void start(Kernel& kernel) {
  Machine& m = machine;
  const Launch& launch = kernel.launch;
  kernel.started = true;
  if (launch.shared_bytes > kSharedBytes) fail(launch.name + ": more shared memory than there is");
  const unsigned blocks = launch.blocks * launch.high;
  kernel.blocks.resize(blocks);
  for (unsigned b = 0; b < blocks; ++b) {
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
  threadIdx.x = thread.number;
  blockIdx = {thread.block->number % launch.blocks, thread.block->number / launch.blocks, 0};
  gridDim = {launch.blocks, launch.high, 1}, blockDim = {launch.threads, 1, 1};
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

void land(const Store& store) {
  std::memcpy(store.to, store.bits, store.bytes);
  --store.by->block->kernel->stores_under_way;
  count_progress();
}
void land_some_stores() {
  Machine& m = machine;
  std::deque<Store> left;
  for (const Store& store : m.stores) {
    // Those of one thread to one place stay in order.
    const bool held = std::any_of(left.begin(), left.end(), [&](const Store& other) {
      return store.publishes ? other.by->block == store.by->block
                             : other.by == store.by && other.to == store.to;
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
  m.detours = 0;
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
