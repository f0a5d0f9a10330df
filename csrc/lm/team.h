// A team: the threads that carry out one parallel part together, waiting for each other between
// its phases.
//
// A thread pool may run the pieces of a parallel region on fewer threads than asked, or one after
// the other. So nobody waits for a thread that has not shown up: whoever arrives joins until the
// first closes the team, work is dealt to those who joined, and latecomers leave at once.
#pragma once

#include <cstdint>

namespace minserve {

inline __attribute__((always_inline)) void spin_pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void give_way();  // lets another thread have the processor

struct Team {
  alignas(64) std::int64_t joined = 0;   // members, and 1 << 32 once nobody can join any more
  alignas(64) std::int64_t claimed = 0;  // pieces that members and latecomers came with
  alignas(64) std::int64_t arrived = 0;  // at the barrier
  alignas(64) std::int64_t passed = 0;   // barriers
  std::int64_t size = 1;

  // Whether to go on waiting is looked at again and again; after a while others get their turn,
  // for the one waited for may need this processor.
  static void wait_a_little(std::int64_t turns) {
    if (turns < 2000) {
      spin_pause();
    } else {
      give_way();
    }
  }

  // Waits for all; meanwhile fetches [next, next + bytes), which is what this thread reads first
  // after it.
  void barrier(const char* next = nullptr, std::int64_t bytes = 0) {
    if (size == 1) return;
    const std::int64_t turn = __atomic_load_n(&passed, __ATOMIC_ACQUIRE);
    if (__atomic_add_fetch(&arrived, 1, __ATOMIC_ACQ_REL) == size) {
      __atomic_store_n(&arrived, 0, __ATOMIC_RELAXED);
      __atomic_store_n(&passed, turn + 1, __ATOMIC_RELEASE);
      return;
    }
    const char* const end = next + bytes;
    for (std::int64_t turns = 0; __atomic_load_n(&passed, __ATOMIC_ACQUIRE) == turn; ++turns) {
      if (next < end) {
        __builtin_prefetch(next, 0, 2);
        next += 64;
      } else {
        wait_a_little(turns);
      }
    }
  }
};

// An even share: member `index` of `count` gets [begin, end) of n.
struct Range {
  std::int64_t begin, end;
};
inline Range share_of(std::int64_t n, std::int64_t index, std::int64_t count) {
  return {n * index / count, n * (index + 1) / count};
}

}  // namespace minserve
