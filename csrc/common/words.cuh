// What tiles of one sequence tell each other: one word per chunk and channel.
//
// A word is empty, an aggregate (A, B) of its chunk, or the carry that leaves the chunk. It is read
// and written whole, so the value is its own flag: no fence and no second look is needed. A reader
// that finds only aggregates folds them, oldest first, onto the newest carry that it finds; since
// every carry is defined as that same fold from the sequence's start, the bits do not depend on how
// far a reader had to look back (the look-back of Merrill and Garland, "Single-pass Parallel Prefix
// Scan with Decoupled Look-back", NVR-2016-002, with a fold instead of a tree).
#pragma once

#include <cstdint>

#include "vec.h"

namespace minserve {
namespace cuda {

// Empty words are all ones: a byte pattern that cudaMemsetAsync can write and that no arithmetic
// gives. The lower half says which kind a word is.
template <class V>
struct Word;

template <>
struct Word<float> {
  static constexpr unsigned kEmpty = 0xffffffffu, kCarry = 0xfffffffeu;
  unsigned kind = kEmpty;
  float b = 0.0f;

  static __device__ __forceinline__ Word aggregate(float a, float b) {
    return {a == a ? __float_as_uint(a) : 0x7fffffffu, b};
  }
  static __device__ __forceinline__ Word carry(float h) { return {kCarry, h}; }
  Word() = default;
  __device__ __forceinline__ Word(unsigned kind_given, float b_given)
      : kind(kind_given), b(b_given) {}
  __device__ __forceinline__ bool empty() const { return kind == kEmpty; }
  __device__ __forceinline__ bool is_carry() const { return kind == kCarry; }
  __device__ __forceinline__ float a() const { return __uint_as_float(kind); }

  static __device__ __forceinline__ Word load(const void* at) {
    unsigned long long bits;
    asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];" : "=l"(bits) : "l"(at) : "memory");
    return {static_cast<unsigned>(bits), __uint_as_float(static_cast<unsigned>(bits >> 32))};
  }
  __device__ __forceinline__ void store(void* at) const {
    const unsigned long long bits =
        static_cast<unsigned long long>(__float_as_uint(b)) << 32 | kind;
    asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(at), "l"(bits) : "memory");
  }
};

template <>
struct Word<double> {
  static constexpr unsigned long long kEmpty = ~0ull, kCarry = ~0ull - 1;
  unsigned long long kind = kEmpty;
  double b = 0.0;

  static __device__ __forceinline__ Word aggregate(double a, double b) {
    return {
        a == a ? static_cast<unsigned long long>(__double_as_longlong(a)) : 0x7fffffffffffffffull,
        b};
  }
  static __device__ __forceinline__ Word carry(double h) { return {kCarry, h}; }
  Word() = default;
  __device__ __forceinline__ Word(unsigned long long kind_given, double b_given)
      : kind(kind_given), b(b_given) {}
  __device__ __forceinline__ bool empty() const { return kind == kEmpty; }
  __device__ __forceinline__ bool is_carry() const { return kind == kCarry; }
  __device__ __forceinline__ double a() const {
    return __longlong_as_double(static_cast<long long>(kind));
  }

  static __device__ __forceinline__ Word load(const void* at) {
    unsigned long long low, high;
    asm volatile(
        "{ .reg .b128 word; ld.relaxed.gpu.global.b128 word, [%2]; mov.b128 {%0, %1}, word; }"
        : "=l"(low), "=l"(high)
        : "l"(at)
        : "memory");
    return {low, __longlong_as_double(static_cast<long long>(high))};
  }
  __device__ __forceinline__ void store(void* at) const {
    asm volatile(
        "{ .reg .b128 word; mov.b128 word, {%1, %2}; st.relaxed.gpu.global.b128 [%0], word; }" ::
            "l"(at),
        "l"(kind), "l"(static_cast<unsigned long long>(__double_as_longlong(b)))
        : "memory");
  }
};

// A word per chunk and channel, then the counter of tiles.
inline std::int64_t workspace_bytes(const Layout& lay, std::int64_t word_bytes) {
  return lay.chunk_bound() * lay.channels * word_bytes + 16;
}

// The carry into chunk number `chunk` of a sequence, chunk > 0. `own` is that chunk's word; the
// word of the chunk before it lies `step` bytes before. Chunk 0 publishes a carry without looking
// back, so the search ends; whoever holds an earlier chunk never waits for a later one.
template <class V>
__device__ __forceinline__ V look_back(const char* own, std::int64_t step, int chunk) {
  constexpr int kWindow = sizeof(V) == 4 ? MS_WINDOW : 4;
  V h = 0;
  bool have = false;  // h is the carry into the chunk behind the window
  int base = 0;       // the window holds the words at distances base + 1 ... base + kWindow
  for (;;) {
    Word<V> words[kWindow];
    for (;;) {
      unsigned carries = 0, empty = 0;
#pragma unroll
      for (int d = 0; d < kWindow; ++d) {
        const int distance = base + d + 1;
        if (distance <= chunk && words[d].empty()) words[d] = Word<V>::load(own - distance * step);
      }
#pragma unroll
      for (int d = 0; d < kWindow; ++d) {
        if (words[d].is_carry()) carries |= 1u << d;
        if (words[d].empty()) empty |= 1u << d;
      }
      // Nothing may be missing from here to the nearest carry, or to the end of the window.
      const unsigned needed = carries ? (carries & (0u - carries)) - 1u : (1u << kWindow) - 1u;
      if (empty & needed) continue;
      have = have || carries;
      break;
    }
    if (!have) {
      base += kWindow;
      continue;
    }
#pragma unroll
    for (int d = kWindow - 1; d >= 0; --d) {
      h = words[d].is_carry() ? words[d].b : fmadd(words[d].a(), h, words[d].b);
    }
    if (base == 0) return h;
    base -= kWindow;
  }
}

}  // namespace cuda
}  // namespace minserve
