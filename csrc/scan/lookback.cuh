// The words by which tiles of one sequence pass carries on: one per chunk and channel.
//
// A word is empty, an aggregate (A, B) of its chunk, or the carry that leaves the chunk. It is read
// and written whole, so the value is its own flag: no fence and no second look is needed. A reader
// that finds only aggregates folds them, oldest first, onto the newest carry that it finds; since
// every carry is defined as that same fold from the sequence's start, the bits do not depend on how
// far a reader had to look back (the look-back of Merrill and Garland, "Single-pass Parallel Prefix
// Scan with Decoupled Look-back", NVR-2016-002, with a fold instead of a tree).
#pragma once

#include <cstdint>

#include "../core/vec.h"

namespace minserve {
namespace cuda {

// Empty words are all ones: a byte pattern that cudaMemsetAsync can write and
// that no arithmetic gives. The lower half says which kind a word is.
template <class V>
struct LookbackWord;

template <>
struct LookbackWord<float> {
  static constexpr unsigned kEmpty = 0xffffffffu, kCarry = 0xfffffffeu;
  unsigned kind = kEmpty;
  float b = 0.0f;

  static __device__ __forceinline__ LookbackWord aggregate(float a, float b) {
    return {a == a ? __float_as_uint(a) : 0x7fffffffu, b};
  }
  static __device__ __forceinline__ LookbackWord carry(float h) { return {kCarry, h}; }
  LookbackWord() = default;
  __device__ __forceinline__ LookbackWord(unsigned kind_given, float b_given)
      : kind(kind_given), b(b_given) {}
  __device__ __forceinline__ bool empty() const { return kind == kEmpty; }
  __device__ __forceinline__ bool is_carry() const { return kind == kCarry; }
  __device__ __forceinline__ float a() const { return __uint_as_float(kind); }

  static __device__ __forceinline__ LookbackWord load(const void* at) {
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
struct LookbackWord<double> {
  static constexpr unsigned long long kEmpty = ~0ull, kCarry = ~0ull - 1;
  unsigned long long kind = kEmpty;
  double b = 0.0;

  static __device__ __forceinline__ LookbackWord aggregate(double a, double b) {
    return {
        a == a ? static_cast<unsigned long long>(__double_as_longlong(a)) : 0x7fffffffffffffffull,
        b};
  }
  static __device__ __forceinline__ LookbackWord carry(double h) { return {kCarry, h}; }
  LookbackWord() = default;
  __device__ __forceinline__ LookbackWord(unsigned long long kind_given, double b_given)
      : kind(kind_given), b(b_given) {}
  __device__ __forceinline__ bool empty() const { return kind == kEmpty; }
  __device__ __forceinline__ bool is_carry() const { return kind == kCarry; }
  __device__ __forceinline__ double a() const {
    return __longlong_as_double(static_cast<long long>(kind));
  }

  static __device__ __forceinline__ LookbackWord load(const void* at) {
    unsigned long long low, high;
    load_relaxed(at, low, high);
    return {low, __longlong_as_double(static_cast<long long>(high))};
  }
  __device__ __forceinline__ void store(void* at) const {
    store_relaxed(at, kind, static_cast<unsigned long long>(__double_as_longlong(b)));
  }
};

// A word per chunk and channel, then what the tickets share; in sixteens.
constexpr std::int64_t kTicketBytes = 16;
inline std::int64_t workspace_bytes(const Layout& lay, std::int64_t word_bytes) {
  return (lay.chunk_bound() * lay.channels * word_bytes + 15) / 16 * 16 + kTicketBytes;
}

// Empties the words and what the tickets share. It lets the scan start at once, which then waits
// for it with lookback_cleared() while it already looks for its first tiles.
static __global__ void __launch_bounds__(256)
    clear_lookback_kernel(uint4* words, std::int64_t count) {
  pdl_launch_dependents();
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += step) {
    words[i] = {~0u, ~0u, ~0u, ~0u};
  }
}
__device__ __forceinline__ void lookback_cleared() {
  wait_for_previous_kernel();
}

// Some words of one channel, of the chunks at distances base + 1 ... base + kWindow before one of
// number `chunk`; those of the chunk before lie `step` bytes before `own`.
template <class V, int kWindow>
struct LookbackWindow {
  static constexpr unsigned kAll = (1u << kWindow) - 1u;
  LookbackWord<V> words[kWindow];

  __device__ __forceinline__ void load(const char* own, std::int64_t step, int chunk, int base) {
#pragma unroll
    for (int n = 0; n < kWindow; ++n) {
      const int distance = base + n + 1;
      if (distance <= chunk && words[n].empty())
        words[n] = LookbackWord<V>::load(own - distance * step);
    }
  }
  // Whether a carry is among them. Waits until nothing is missing up to the nearest one, or, if
  // there is none, at all.
  __device__ __forceinline__ bool wait(const char* own, std::int64_t step, int chunk, int base) {
    for (;;) {
      unsigned others = 0, missing = 0;  // by distance: no carries, empty
#pragma unroll
      for (int n = 0; n < kWindow; ++n) {
        if (!words[n].is_carry()) others |= 1u << n;
        if (words[n].empty()) missing |= 1u << n;
      }
      const unsigned carries = ~others & kAll;
      missing &= carries ? (carries & (0u - carries)) - 1u : kAll;
      if (!missing) return carries != 0;
      __nanosleep(32);
      load(own, step, chunk, base);
    }
  }
  // The carry behind the nearest chunk, from that behind the farthest.
  __device__ __forceinline__ V fold(V h) const {
#pragma unroll
    for (int n = kWindow - 1; n >= 0; --n) {
      h = words[n].is_carry() ? words[n].b : fmadd(words[n].a(), h, words[n].b);
    }
    return h;
  }
  __device__ __forceinline__ void forget() {
#pragma unroll
    for (int n = 0; n < kWindow; ++n) words[n] = LookbackWord<V>();
  }
};

// The carry into chunk number `chunk` > 0 of a sequence, from a window that was loaded at base 0;
// it is moved back as far as there is no carry, and forth again. Chunk 0 publishes a carry without
// looking back, so the search ends; whoever holds an earlier chunk never waits for a later one.
template <class V, int kWindow>
__device__ __forceinline__ V look_back(LookbackWindow<V, kWindow>& window, const char* own,
                                       std::int64_t step, int chunk) {
  V h = V(0);
  bool have = false;
  int base = 0;
  for (;;) {
    have = window.wait(own, step, chunk, base) || have;
    if (have) {
      h = window.fold(h);
      if (base == 0) return h;
      base -= kWindow;
    } else {
      base += kWindow;
    }
    window.forget();
    window.load(own, step, chunk, base);
  }
}

}  // namespace cuda
}  // namespace minserve
