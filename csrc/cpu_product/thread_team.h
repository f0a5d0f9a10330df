// A team: the threads that carry out one parallel part together, waiting for each other between
// its phases.
//
// A thread pool may run the pieces of a parallel region on fewer threads than asked, or one after
// the other. So nobody waits for a thread that has not shown up: whoever arrives joins until the
// first closes the team, work is handed out to those who joined, and latecomers leave at once.
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

// Sleeps until *at is no longer `value` and somebody wakes it, or for no reason.
void sleep_while(const std::int32_t* at, std::int32_t value);
void wake_sleepers(const std::int32_t* at);

// A number that threads wait for. They spin at first, for a phase takes microseconds; then they
// sleep, for the thread waited for may need this processor.
class Signal {
 public:
  std::int32_t value() const { return __atomic_load_n(&value_, __ATOMIC_ACQUIRE); }

  void set(std::int32_t value) {
    __atomic_store_n(&value_, value, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&sleepers_, __ATOMIC_SEQ_CST)) wake_sleepers(&value_);
  }

  // Returns once the value is not `old`; meanwhile fetches [next, next + bytes).
  void wait_while(std::int32_t old, const char* next, std::int64_t bytes) {
    const char* const end = next + bytes;
    for (int spins = 0; value() == old;) {
      if (next < end) {
        __builtin_prefetch(next, 0, 2);
        next += 64;
      } else if (spins < kSpins) {
        spin_pause();
        ++spins;
      } else {
        __atomic_add_fetch(&sleepers_, 1, __ATOMIC_SEQ_CST);
        if (value() == old) sleep_while(&value_, old);
        __atomic_sub_fetch(&sleepers_, 1, __ATOMIC_SEQ_CST);
      }
    }
  }

 private:
  static constexpr int kSpins = 2000;  // longer than the usual phase of a small model
  std::int32_t value_ = 0;
  std::int32_t sleepers_ = 0;
};

struct ThreadTeam {
  alignas(64) std::int64_t joined = 0;   // threads, and 1 << 32 once nobody can join any more
  alignas(64) std::int64_t claimed = 0;  // pieces that threads came with
  alignas(64) std::int32_t arrived = 0;  // at the barrier
  alignas(64) Signal passed;             // barriers; the first is the closing of the team
  std::int32_t size = 1;

  // Waits for all; meanwhile fetches [next, next + bytes), which is what this thread reads first
  // after it.
  void barrier(const char* next = nullptr, std::int64_t bytes = 0) {
    if (size == 1) return;
    const std::int32_t generation = passed.value();
    if (__atomic_add_fetch(&arrived, 1, __ATOMIC_ACQ_REL) == size) {
      __atomic_store_n(&arrived, 0, __ATOMIC_RELAXED);
      passed.set(generation + 1);
    } else {
      passed.wait_while(generation, next, bytes);
    }
  }
};

// An even share: thread `index` of `count` gets [begin, end) of n.
struct Range {
  std::int64_t begin, end;
};
inline Range part_of(std::int64_t n, std::int64_t index, std::int64_t count) {
  return {n * index / count, n * (index + 1) / count};
}

}  // namespace minserve
