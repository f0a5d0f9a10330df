// Tiles of rows of time: the order in which blocks take them, and how the carry into one is found.
#pragma once

#include "tiles.cuh"
#include "lookback.cuh"

namespace minserve {
namespace cuda {

// More than there are tiles at work on the GPU at once, and few enough for its address translation.
constexpr unsigned kRowsTogether = 1024;

struct RowTiles {
  unsigned rows, per_row, total;
  unsigned* counter;  // null where no tile waits for another: one tile per row

  __host__ __device__ std::int64_t words() const {
    return per_row > 1 ? static_cast<std::int64_t>(rows) * (per_row - 1) : 0;
  }
};

struct RowTile {
  static constexpr unsigned kNone = 0xffffffffu;
  unsigned row, index;  // row kNone: no more tiles
};

__device__ __forceinline__ unsigned take_ticket(const RowTiles& tiles, unsigned iteration) {
  // The counter starts at all ones, as cudaMemsetAsync left it.
  return tiles.counter ? atomicAdd(tiles.counter, 1u) + 1u : blockIdx.x + iteration * gridDim.x;
}

__device__ __forceinline__ RowTile tile_of(const RowTiles& tiles, unsigned ticket) {
  if (ticket >= tiles.total) return {RowTile::kNone, 0};
  const unsigned whole = min(tiles.rows, kRowsTogether);
  const unsigned first = ticket / (whole * tiles.per_row) * whole;
  const unsigned rest = ticket - first * tiles.per_row;
  const unsigned together = min(whole, tiles.rows - first);
  return {first + rest % together, rest / together};
}

// The carry into tile `index` > 0 of a row, found by a whole warp, where the word before, `own` -
// sizeof(LookbackWord), held none yet. Tile 0 publishes a carry without looking back, so the search
// ends.
template <class V>
__device__ __forceinline__ V look_back_in_row(const char* own, unsigned index) {
  constexpr int kEach = 2, kWindow = 32 * kEach;
  const unsigned lane = threadIdx.x % 32;
  V h = 0;
  bool have = false;  // h is the carry into the tile behind the window
  unsigned base = 0;  // the window holds the words at distances base + 1 ... base + kWindow
  for (;;) {
    const unsigned before = base + lane * kEach;
    const char* const nearest =
        own - static_cast<std::int64_t>(before + 1) * sizeof(LookbackWord<V>);
    LookbackWord<V> words[kEach];
    int oldest;  // lane whose words hold the nearest carry, or the last
    for (;;) {
      bool carry = false, missing = false;
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        if (before + i >= index) continue;
        if (words[i].empty())
          words[i] = LookbackWord<V>::load(nearest - i * sizeof(LookbackWord<V>));
        missing = missing || (!carry && words[i].empty());
        carry = carry || words[i].is_carry();
      }
      const unsigned carries = __ballot_sync(0xffffffffu, carry);
      const unsigned gaps = __ballot_sync(0xffffffffu, missing);
      oldest = carries ? __ffs(static_cast<int>(carries)) - 1 : 31;
      // Nothing may be missing from here to the nearest carry, or to the end of the window.
      if ((gaps & (0xffffffffu >> (31 - oldest))) == 0) {
        have = have || carries;
        break;
      }
      __nanosleep(40);
    }
    if (!have) {
      base += kWindow;
      continue;
    }
#pragma unroll 1
    for (int from = oldest; from >= 0; --from) {
#pragma unroll
      for (int i = kEach - 1; i >= 0; --i) {
        LookbackWord<V> word;
        word.kind = __shfl_sync(0xffffffffu, words[i].kind, from);
        word.b = __shfl_sync(0xffffffffu, words[i].b, from);
        h = word.is_carry() ? word.b : fmadd(word.a(), h, word.b);
      }
    }
    if (base == 0) return h;
    base -= kWindow;
  }
}

}  // namespace cuda
}  // namespace minserve
