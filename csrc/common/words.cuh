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
    const unsigned long long bits = load_relaxed(at);
    return {static_cast<unsigned>(bits), __uint_as_float(static_cast<unsigned>(bits >> 32))};
  }
  __device__ __forceinline__ void store(void* at) const {
    const unsigned long long bits =
        static_cast<unsigned long long>(__float_as_uint(b)) << 32 | kind;
    store_relaxed(at, bits);
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
    load_relaxed(at, low, high);
    return {low, __longlong_as_double(static_cast<long long>(high))};
  }
  __device__ __forceinline__ void store(void* at) const {
    store_relaxed(at, kind, static_cast<unsigned long long>(__double_as_longlong(b)));
  }
};

// A word per chunk and channel, then the counter of tiles; in sixteens.
inline std::int64_t workspace_bytes(const Layout& lay, std::int64_t word_bytes) {
  return (lay.chunk_bound() * lay.channels * word_bytes + 15) / 16 * 16 + 16;
}

// Empties the words and the counter. It lets the scan start at once, which then waits for it with
// words_cleared() while it already looks for its first tiles.
static __global__ void __launch_bounds__(256) clear_kernel(uint4* words, std::int64_t count) {
  let_next_kernel_start();
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += step) {
    words[i] = {~0u, ~0u, ~0u, ~0u};
  }
}
__device__ __forceinline__ void words_cleared() {
  wait_for_previous_kernel();
}

// The carries into chunk number `chunk` > 0 of a sequence, for the first `real` of kEach
// neighbouring channels. `own` is the word of that chunk and the first channel; those of the chunk
// before lie `step` bytes before. close: the chunk before may still be under way, so that it is
// worth looking at kWindow chunks at once. Chunk 0 publishes a carry without looking back, so the
// search ends; whoever holds an earlier chunk never waits for a later one.
template <class V, int kEach, int kWindow>
__device__ __forceinline__ void look_back(const char* own, std::int64_t step, int chunk, bool close,
                                          int real, V (&h)[kEach]) {
  constexpr unsigned kAll = (1u << kWindow) - 1u;
  constexpr std::int64_t kBytes = sizeof(Word<V>);
  if (!close) {
    bool ready = true;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const Word<V> word = Word<V>::load(own - step + (i < real ? i : 0) * kBytes);
      ready = ready && word.is_carry();
      h[i] = word.b;
    }
    if (ready) return;
  }
  bool have = false;  // h is the carry into the chunk behind the window
  int base = 0;       // the window holds the words at distances base + 1 ... base + kWindow
  for (;;) {
    Word<V> words[kWindow * kEach];
    unsigned carries, missing;  // by distance
    do {
      unsigned others = 0;  // no carries
      missing = 0;
#pragma unroll
      for (int n = 0; n < kWindow * kEach; ++n) {
        const int distance = base + n / kEach + 1;
        const int i = n % kEach < real ? n % kEach : 0;
        if (distance <= chunk && words[n].empty()) {
          words[n] = Word<V>::load(own - distance * step + i * kBytes);
        }
      }
#pragma unroll
      for (int n = 0; n < kWindow * kEach; ++n) {
        if (!words[n].is_carry()) others |= 1u << n / kEach;
        if (words[n].empty()) missing |= 1u << n / kEach;
      }
      carries = ~others & kAll;
      // Nothing may be missing from here to the nearest carry, or to the end of the window.
      missing &= carries ? (carries & (0u - carries)) - 1u : kAll;
      if (missing) __nanosleep(64);
    } while (missing);
    have = have || carries;
    if (!have) {
      base += kWindow;
      continue;
    }
#pragma unroll
    for (int n = kWindow * kEach - 1; n >= 0; --n) {
      V& carry = h[n % kEach];
      carry = words[n].is_carry() ? words[n].b : fmadd(words[n].a(), carry, words[n].b);
    }
    if (base == 0) return;
    base -= kWindow;
  }
}

}  // namespace cuda
}  // namespace minserve
