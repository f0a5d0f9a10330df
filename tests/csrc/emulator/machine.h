// GPU threads on the host: what kernels call (through device.h and cuda.h), and how kernels start.
//
// Every thread of every block of a grid is a fiber, all in one host thread, switched where they
// wait and, by chance, where they touch memory that other blocks touch. The chance comes from a
// seed, so a run can be had again. What a GPU would leave to luck ends the program with a sentence
// instead: a wait without end, a barrier used by the wrong threads, shared memory read or written
// without a barrier between, a copy's destination touched before the copy was waited for, an access
// outside of the arrays.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace emulator {

struct Index {
  unsigned x = 0, y = 0, z = 0;
};
extern Index threadIdx, blockIdx, gridDim, blockDim;

// --- starting kernels

struct Launch {
  std::string name;
  unsigned blocks, threads;
  std::size_t shared_bytes = 0;
  bool overlaps = false;  // may begin as soon as the kernel before lets it
  std::function<void()> kernel;
  unsigned high = 1;  // the grid's y; `blocks` are its x
};
// Enqueues; run() lets all that was enqueued happen, in the order that the seed makes.
void launch(Launch what);
void run(unsigned seed);
// How often kernels of the last run noted that they take a slower way.
long detours();

// --- global memory: arrays in which every access must lie

enum class Use { read, write };
// Filled with 0xff bytes. `shift` bytes past an address that is a multiple of 128.
void* allocate(const std::string& name, std::size_t bytes, Use use, std::size_t shift = 0);
void free_all();

// --- what threads do

void yield();
void sync_block();
int count_block(bool mine);  // meets the block; how many of its threads say so
void sync_warp(unsigned mask);
unsigned ballot(unsigned mask, bool mine);
std::uint64_t exchange(unsigned mask, std::uint64_t mine, int from);
// What each lane of the warp gives, for all of them; until the warp meets again.
const std::uint64_t* gather(std::uint64_t mine);
void named_barrier(int number, unsigned threads);
void start_copy(void* shared, const void* global, std::size_t bytes);
void wait_for_copies();
void end_group_of_copies();
void wait_for_groups_but(std::size_t under_way);
// Words that other blocks touch meanwhile. Stores land later, in any order.
void load_word(const void* at, void* bits, std::size_t bytes);
// One that publishes lands behind all that its block has stored.
void store_word(void* at, const void* bits, std::size_t bytes, bool publishes = false);
// At once, with no other access between; the value before.
unsigned change(unsigned* at, const std::function<unsigned(unsigned)>& to);
void pdl_launch_dependents();
void note_detour();
void wait_for_previous_kernel();

// Ends the program: says what, and which thread of which block.
[[noreturn]] void fail(const std::string& what);

}  // namespace emulator
