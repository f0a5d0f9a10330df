// What the emulator's threads do, and what it says of it; see machine.h.
#include <cstdio>

#include "hooks.h"
#include "state.h"

namespace minserve {
namespace cuda {
alignas(128) uint4 memory[emulator::kSharedBytes / sizeof(uint4)];
}  // namespace cuda
}  // namespace minserve

namespace emulator {

Index threadIdx, blockIdx, gridDim, blockDim;
Machine machine;

namespace {

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
void meet(Meeting& at, unsigned expected, const char* what, bool orders, Last last) {
  Thread& self = me();
  Block& block = *self.block;
  if (at.arrived && (at.expected != expected || at.what != what)) {
    fail(at.name + ": " + what + " for " + std::to_string(expected) +
         " threads, where others wait at " + at.what + " for " + std::to_string(at.expected));
  }
  at.expected = expected, at.what = what;
  if (orders) {
    at.gathered.join(self.clock);
    ++self.clock.at[self.number];
  }
  at.waiting.push_back(&self);
  if (++at.arrived < expected) {
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
         at < static_cast<void*>(shared_memory + kSharedBytes);
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

// The first copies that this thread has started, which are those of so many groups.
void land_copies(std::size_t count, std::size_t groups) {
  maybe_yield();
  Thread& self = me();
  for (std::size_t i = 0; i < count; ++i) {
    const Copy& copy = self.copies[i];
    std::memcpy(copy.to, copy.from, copy.bytes);
    self.block->shadow->land_copy(offset_in_shared(copy.to), copy.bytes, self.number, self.clock);
  }
  self.copies.erase(self.copies.begin(), self.copies.begin() + static_cast<long>(count));
  self.groups.erase(self.groups.begin(), self.groups.begin() + static_cast<long>(groups));
  for (std::size_t& end : self.groups) end -= count;
  maybe_yield();
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
  meet(block.all, static_cast<unsigned>(block.threads.size()), "__syncthreads", true,
       count_progress);
  maybe_yield();
}
int count_block(bool mine) {
  Block& block = *me().block;
  block.counted += mine;
  meet(block.all, static_cast<unsigned>(block.threads.size()), "__syncthreads_count", true, [&] {
    block.count = block.counted, block.counted = 0;
    count_progress();
  });
  return block.count;  // before anybody can meet again
}
void sync_warp(unsigned mask) {
  check_mask(mask);
  meet(my_warp().meeting, 32, "__syncwarp", true, [] {});
}
unsigned ballot(unsigned mask, bool mine) {
  check_mask(mask);
  Warp& warp = my_warp();
  warp.given[me().number % 32] = mine;
  meet(warp.meeting, 32, "__ballot_sync", false,
       [&] { std::copy(warp.given, warp.given + 32, warp.taken); });
  unsigned votes = 0;
  for (int lane = 0; lane < 32; ++lane) votes |= static_cast<unsigned>(warp.taken[lane]) << lane;
  return votes;
}
std::uint64_t exchange(unsigned mask, std::uint64_t mine, int from) {
  check_mask(mask);
  Warp& warp = my_warp();
  warp.given[me().number % 32] = mine;
  meet(warp.meeting, 32, "__shfl_sync", false,
       [&] { std::copy(warp.given, warp.given + 32, warp.taken); });
  return warp.taken[from];
}
const std::uint64_t* gather(std::uint64_t mine) {
  Warp& warp = my_warp();
  warp.given[me().number % 32] = mine;
  meet(warp.meeting, 32, "a warp's product", false,
       [&] { std::copy(warp.given, warp.given + 32, warp.taken); });
  return warp.taken;
}
void named_barrier(int number, unsigned threads) {
  Block& block = *me().block;
  if (number < 1 || number > 15) fail("there is no named barrier " + std::to_string(number));
  if (threads % 32 || threads > block.threads.size()) {
    fail("barrier " + std::to_string(number) + ": " + std::to_string(threads) +
         " threads cannot meet in a block of " + std::to_string(block.threads.size()));
  }
  meet(block.named[number], threads, "a barrier", true, count_progress);
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
  land_copies(me().copies.size(), me().groups.size());
}
void end_group_of_copies() {
  me().groups.push_back(me().copies.size());
}
void wait_for_groups_but(std::size_t under_way) {
  const std::vector<std::size_t>& groups = me().groups;
  if (groups.size() <= under_way) return;
  const std::size_t ended = groups.size() - under_way;
  land_copies(groups[ended - 1], ended);
}

void load_word(const void* at, void* bits, std::size_t bytes) {
  Machine& m = machine;
  check_word(at, bytes, Use::read);
  me().looks_at = at;
  maybe_yield();
  std::memcpy(bits, at, bytes);
  // A thread sees its own; one that publishes only with what that stands for.
  for (const Store& store : m.stores) {
    if (store.by == &me() && store.to == at && !store.publishes) {
      std::memcpy(bits, store.bits, bytes);
    }
  }
}
void store_word(void* at, const void* bits, std::size_t bytes, bool publishes) {
  Machine& m = machine;
  check_word(at, bytes, Use::write);
  Store store = {&me(), static_cast<char*>(at), {0, 0}, bytes, publishes};
  std::memcpy(store.bits, bits, bytes);
  m.stores.push_back(store);
  ++me().block->kernel->stores_under_way;
  maybe_yield();
}
unsigned change(unsigned* at, const std::function<unsigned(unsigned)>& to) {
  // In shared memory nothing is noted of it: neither what it orders nor what orders it.
  if (!is_shared(at)) check_word(at, sizeof *at, Use::write);
  maybe_yield();
  const unsigned before = *at;
  *at = to(before);
  me().looks_at = at;
  if (*at != before) count_progress();
  maybe_yield();
  return before;
}
void note_detour() {
  ++machine.detours;
}
long detours() {
  return machine.detours;
}
void pdl_launch_dependents() {
  me().block->lets_next = true;
  maybe_yield();
}
void wait_for_previous_kernel() {
  me().looks_at = nullptr;
  Block& block = *me().block;
  while (block.kernel->before && !block.kernel->before->ended()) suspend();
  block.waited_for_kernel = true;
}

}  // namespace emulator
