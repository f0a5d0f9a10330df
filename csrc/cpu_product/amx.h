// Blocks of a product in tiles (AMX): 16 rows or 16 pairs of inputs of 64 bytes each, which one
// instruction multiplies and adds up.
//
// A step of a packed bfloat16 panel is a row of a tile as it lies in memory, and so is a row of
// activations. The instruction sums up the even and the odd ones of 32 inputs by themselves, then
// adds both to the sum, whatever the other rows are: so bits still depend on a row alone, if all
// products are formed this way, or added up alike (few_rows.h).
//
// Source: Intel 64 and IA-32 Architectures Software Developer's Manual. Volume 1, "Programming with
// Intel Advanced Matrix Extensions": palette 1 (eight tiles of 16 rows of 64 bytes) and the 64
// bytes that LDTILECFG reads (TileShapes::Config). Volume 2, TDPBF16PS: row k of the second operand
// holds inputs 2k and 2k + 1 of 16 outputs side by side (VNNI), which is how a panel is packed
// (matrix.h).
#pragma once

#include "avx512_blocks.h"

namespace minserve {
namespace MS_ISA {

constexpr std::int64_t kTileRows = 16;
constexpr std::int64_t kTileSteps = 16;  // of two inputs each
constexpr std::int64_t kTileLine = 64;   // bytes of a tile's row

constexpr std::int64_t kSumsLine = kMostPanels * kPanel * 4;  // bytes from a row's sums to the next

template <int kNumber>
struct Number {
  static constexpr int value = kNumber;
};

// The instructions; compilers' own names for them say nothing of the memory that they touch.
template <int kTile>
MS_CELL void load_tile(const void* from, std::int64_t stride) {
  asm volatile("tileloadd (%1, %2, 1), %%tmm%c0" ::"i"(kTile), "r"(from), "r"(stride) : "memory");
}
template <int kTile>
MS_CELL void store_tile(void* to, std::int64_t stride) {
  asm volatile("tilestored %%tmm%c0, (%1, %2, 1)" ::"i"(kTile), "r"(to), "r"(stride) : "memory");
}
template <int kTile>
MS_CELL void clear_tile() {
  asm volatile("tilezero %%tmm%c0" ::"i"(kTile));
}
// sums += rows times weights
template <int kSums, int kRows, int kWeights>
MS_CELL void multiply_tiles() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSums), "i"(kRows), "i"(kWeights));
}

// What a thread's tiles look like while one of these lives. Others may use them before and after.
class TileShapes {
 public:
  TileShapes() = default;
  ~TileShapes() {
    if (first_) asm volatile("tilerelease");
  }
  TileShapes(const TileShapes&) = delete;
  TileShapes& operator=(const TileShapes&) = delete;

  // Tiles 0 and 1 have sums of `first` rows, 2 and 3 of `second`, 4 and 5 the activations of
  // these; 6 and 7 weights. Without second ones all sums are of the first, and 5 has weights too.
  void ask(std::int64_t first, std::int64_t second) {
    if (first == first_ && second == second_) return;
    Config config = {};
    config.palette = 1;
    for (int tile = 0; tile < 8; ++tile) {
      const bool weights = tile > 5 || (tile == 5 && second == 0);
      const bool later = second > 0 && (tile == 2 || tile == 3 || tile == 5);
      config.bytes[tile] = kTileLine;
      config.rows[tile] = static_cast<std::uint8_t>(weights ? kTileSteps : later ? second : first);
    }
    asm volatile("ldtilecfg %0" ::"m"(config));
    first_ = first, second_ = second;
  }

 private:
  struct alignas(64) Config {
    std::uint8_t palette, start_row, reserved[14];
    std::uint16_t bytes[16];
    std::uint8_t rows[16];
  };
  static_assert(sizeof(Config) == 64, "as LDTILECFG reads it");
  std::int64_t first_ = 0, second_ = 0;
};

// The last steps of rows and weights where they do not fill a tile: copied, and followed by zeros.
// (What lies behind the rows may be anything, and NaN times zero is NaN.)
struct LastSteps {
  alignas(64) char fed[2 * kTileRows * kTileLine];
  alignas(64) char weights[kMostPanels * kTileSteps * kTileLine];

  void copy(const char* rows, std::int64_t row_stride, std::int64_t count, const char* steps,
            std::int64_t step_stride, std::int64_t step_count, std::int64_t panels) {
    __builtin_memset(this, 0, sizeof(*this));
    for (std::int64_t r = 0; r < count; ++r) {
      __builtin_memcpy(fed + r * kTileLine, rows + r * row_stride,
                       static_cast<std::size_t>(step_count * 4));
    }
    for (std::int64_t s = 0; s < step_count; ++s) {
      __builtin_memcpy(weights + s * kMostPanels * kTileLine, steps + s * step_stride,
                       static_cast<std::size_t>(panels * kTileLine));
    }
  }
};

// Sums of up to 16 rows by four panels, or, where there are two parts, of up to 32 by two.
template <int kPanels, bool kTwoParts>
class TileBlock {
 public:
  static_assert(kPanels <= (kTwoParts ? 2 : 4), "there are four tiles of sums");

  explicit TileBlock(std::int64_t rows)
      : first_(kTwoParts ? (rows + 1) / 2 : rows), second_(rows - first_) {}

  void ask(TileShapes& shapes) const { shapes.ask(first_, second_); }

  // f(number of the tile, where its sums are)
  template <class F>
  MS_CELL void each(char* sums, const F& f) const {
    f(Number<0>{}, sums);
    if constexpr (kPanels > 1) f(Number<1>{}, sums + kTileLine);
    if constexpr (kTwoParts) {
      f(Number<2>{}, sums + first_ * kSumsLine);
      if constexpr (kPanels > 1) f(Number<3>{}, sums + first_ * kSumsLine + kTileLine);
    } else {
      if constexpr (kPanels > 2) f(Number<2>{}, sums + 2 * kTileLine);
      if constexpr (kPanels > 3) f(Number<3>{}, sums + 3 * kTileLine);
    }
  }
  // What a tile of steps gives.
  MS_CELL void add(const char* weights, std::int64_t stride, const char* fed,
                   std::int64_t fed_stride) const {
    load_tile<4>(fed, fed_stride);
    load_tile<6>(weights, stride);
    multiply_tiles<0, 4, 6>();
    if constexpr (kPanels > 1) load_tile<7>(weights + kTileLine, stride);
    if constexpr (kPanels > 1) multiply_tiles<1, 4, 7>();
    if constexpr (kTwoParts) {
      load_tile<5>(fed + first_ * fed_stride, fed_stride);
      multiply_tiles<2, 5, 6>();
      if constexpr (kPanels > 1) multiply_tiles<3, 5, 7>();
    } else {
      if constexpr (kPanels > 2) load_tile<5>(weights + 2 * kTileLine, stride);
      if constexpr (kPanels > 2) multiply_tiles<2, 4, 5>();
      if constexpr (kPanels > 3) load_tile<6>(weights + 3 * kTileLine, stride);
      if constexpr (kPanels > 3) multiply_tiles<3, 4, 6>();
    }
  }

 private:
  std::int64_t first_, second_;
};

// sums [rows, panels] += rows [rows, steps] times panels; the sums lie kMostPanels panels apart.
template <int kPanels, bool kTwoParts>
void tile_block(TileShapes& shapes, const char* weights, std::int64_t stride, const char* fed,
                std::int64_t fed_stride, std::int64_t rows, std::int64_t steps, float* sums,
                bool begin, Ahead ahead) {
  const TileBlock<kPanels, kTwoParts> block(rows);
  char* const to = reinterpret_cast<char*>(sums);
  block.ask(shapes);
  block.each(to, [&](auto tile, char* at) {
    if (begin) {
      clear_tile<decltype(tile)::value>();
    } else {
      load_tile<decltype(tile)::value>(at, kSumsLine);
    }
  });
  std::int64_t step = 0;
  for (; step + kTileSteps <= steps; step += kTileSteps) {
    block.add(weights + step * stride, stride, fed + step * 4, fed_stride);
    ahead.fetch(kTileSteps);
  }
  if (step < steps) {
    LastSteps last;
    last.copy(fed + step * 4, fed_stride, rows, weights + step * stride, stride, steps - step,
              kPanels);
    block.add(last.weights, kMostPanels * kTileLine, last.fed, kTileLine);
  }
  block.each(to, [&](auto tile, char* at) { store_tile<decltype(tile)::value>(at, kSumsLine); });
}

using TileBlockFn = void (*)(TileShapes&, const char*, std::int64_t, const char*, std::int64_t,
                             std::int64_t, std::int64_t, float*, bool, Ahead);
inline TileBlockFn tile_block_for(std::int64_t rows, std::int64_t panels) {
  if (rows > kTileRows) return panels > 1 ? &tile_block<2, true> : &tile_block<1, true>;
  constexpr TileBlockFn of_one_part[] = {&tile_block<1, false>, &tile_block<2, false>,
                                         &tile_block<3, false>, &tile_block<4, false>};
  return of_one_part[panels - 1];
}

}  // namespace MS_ISA
}  // namespace minserve
