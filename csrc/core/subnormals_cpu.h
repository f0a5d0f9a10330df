// Subnormal numbers as zeros on the CPU. An operation on a subnormal may take a hundred cycles.
// What is left of a state after 128 steps (scan_cpu.h's A) often is one, and no visible result
// needs it.
#pragma once

#include "vec.h"

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

namespace minserve {
namespace MS_ISA {

// While it lives, subnormal inputs and results of this thread are zeros, where the processor knows
// how.
class WithoutSubnormals {
 public:
  WithoutSubnormals() : before_(mode()) { set(before_ | kZeros); }
  ~WithoutSubnormals() { set(before_); }
  WithoutSubnormals(const WithoutSubnormals&) = delete;
  WithoutSubnormals& operator=(const WithoutSubnormals&) = delete;

 private:
#if defined(__SSE__)
  using Mode = unsigned;
  static constexpr Mode kZeros = 1u << 15 | 1u << 6;  // of results, of inputs
  static Mode mode() { return _mm_getcsr(); }
  static void set(Mode mode) { _mm_setcsr(mode); }
#elif defined(__aarch64__)
  using Mode = std::uint64_t;
  static constexpr Mode kZeros = 1u << 24;
  static Mode mode() {
    Mode mode;
    asm volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
  }
  static void set(Mode mode) { asm volatile("msr fpcr, %0" ::"r"(mode)); }
#else
  using Mode = unsigned;
  static constexpr Mode kZeros = 0;
  static Mode mode() { return 0; }
  static void set(Mode) {}
#endif

  const Mode before_;
};

}  // namespace MS_ISA
}  // namespace minserve
