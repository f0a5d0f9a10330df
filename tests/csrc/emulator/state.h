// The state of the emulated GPU, shared by the files of the emulator.
#pragma once

#include <algorithm>
#include <deque>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "arrays.h"
#include "cuda.h"
#include "fiber.h"
#include "shadow.h"

namespace emulator {

constexpr std::size_t kSharedBytes = 228 * 1024;  // of the largest multiprocessor
inline char* const shared_memory = reinterpret_cast<char*>(minserve::cuda::memory);

struct Block;
struct Kernel;
struct Thread;

// Where threads meet: a barrier, or a warp's exchange of values.
struct Meeting {
  std::string name;
  unsigned arrived = 0, expected = 0;
  const char* what = "";
  Clock gathered;
  std::vector<Thread*> waiting;
};

struct Copy {
  char* to;
  const char* from;
  std::size_t bytes;
};

struct Thread {
  Fiber fiber;
  Block* block = nullptr;
  unsigned number = 0;
  Clock clock;
  std::vector<Copy> copies;
  std::vector<std::size_t> groups;  // of copies: how many had been started at the end of each
  const Meeting* waits_at = nullptr;
  const void* looks_at = nullptr;  // the word that it loaded last
};

struct Warp {
  Meeting meeting;
  std::uint64_t given[32], taken[32];
  unsigned speed = 1;  // runs in one of so many visits
};

struct Block {
  Kernel* kernel = nullptr;
  unsigned number = 0, running = 0;
  unsigned speed = 1, begins = 0;  // runs in one of so many passes, from that one on
  bool lets_next = false, waited_for_kernel = false;
  int counted = 0, count = 0;
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

// Of a word, on its way.
struct Store {
  Thread* by;
  char* to;
  std::uint64_t bits[2];
  std::size_t bytes;
  bool publishes;  // lands behind those that its block has stored before
};

struct Machine {
  Arrays arrays;
  std::deque<Kernel> kernels;
  std::deque<Store> stores;
  std::mt19937 random;
  unsigned yield_chance = 0, land_every = 1;  // one in so many; 0: never
  std::uint64_t progress = 0;                 // counts what a wait without end lacks
  long detours = 0;
  Thread* current = nullptr;
  Block* loaded = nullptr;  // whose content shared_memory has

  unsigned below(unsigned n) { return n < 2 ? 0 : random() % n; }
};
extern Machine machine;

inline Thread& me() {
  return *machine.current;
}
inline void count_progress() {
  ++machine.progress;
}

}  // namespace emulator
