// Which products go by tiles (AMX): those of bfloat16 activations, from three rows on.
#pragma once

#include "few_rows.h"

namespace minserve {
namespace MS_ISA {

// What holds for all weights that may go with such activations, and one or two rows of them.
template <class W>
class ByTiles {
 public:
  static constexpr std::int64_t kRowsOfOne = 2 * kTileRows;
  static constexpr std::int64_t kNarrowRows = kFewRows;
  static constexpr std::int64_t kBytesAhead = 8192;
  // As vectors have them: 32 KB of sums, 16 KB of weights. Where one block has all rows and panels
  // weights pass once; where it has all rows, half of the panels do at a time.
  static constexpr std::int64_t kRowsTogether = 128, kStepsTogether = 64;
  static_assert(kStepsTogether % kTileSteps == 0, "a tile cut in two would be summed otherwise");
  static constexpr std::int64_t steps_together(std::int64_t rows) {
    return rows <= kTileRows ? kAllSteps : rows <= kRowsOfOne ? 2 * kStepsTogether : kStepsTogether;
  }
  // Rows that stay in the second-level cache, with room for weights, while all panels pass; not
  // fewer than have their sums together.
  static constexpr std::int64_t rows_in_cache(std::int64_t row_bytes) {
    const std::int64_t most = kRowBytesInCache / row_bytes / kRowsTogether * kRowsTogether;
    return most < kRowsTogether ? kRowsTogether : most;
  }

  void run(const char* weights, std::int64_t stride, std::int64_t panels, const char* fed,
           std::int64_t fed_stride, std::int64_t rows, std::int64_t steps, float* sums, bool begin,
           Fetch fetch) {
    few_rows_block_for<W>(rows, panels)(weights, stride, fed, fed_stride, steps, sums, begin,
                                        fetch.part(0, 1, steps));
  }

 private:
  static constexpr std::int64_t kAllSteps = INT64_MAX, kRowBytesInCache = 1250 * 1024;
};

// Bytes: more rows have them widened.
template <>
class Blocks<WeightsByte<FedHalf>> : public ByTiles<WeightsByte<FedHalf>> {};

template <>
class Blocks<WeightsHalf> : public ByTiles<WeightsHalf> {
 public:
  void run(const char* weights, std::int64_t stride, std::int64_t panels, const char* fed,
           std::int64_t fed_stride, std::int64_t rows, std::int64_t steps, float* sums, bool begin,
           Fetch fetch) {
    if (rows <= kFewRows) {
      return ByTiles::run(weights, stride, panels, fed, fed_stride, rows, steps, sums, begin,
                          fetch);
    }
    const std::int64_t blocks = (rows + kRowsOfOne - 1) / kRowsOfOne;
    for (std::int64_t b = 0; b < blocks; ++b) {
      const std::int64_t first = b * kRowsOfOne;
      const std::int64_t own = rows - first < kRowsOfOne ? rows - first : kRowsOfOne;
      const std::int64_t most = own > kTileRows ? 2 : 4;
      for (std::int64_t p = 0; p < panels; p += most) {
        const std::int64_t wide = panels - p < most ? panels - p : most;
        const Ahead ahead = p == 0 ? fetch.part(b, blocks, steps) : Ahead{};
        tile_block_for(own, wide)(shapes_, weights + p * kTileLine, stride,
                                  fed + first * fed_stride, fed_stride, own, steps,
                                  sums + (first * kMostPanels + p) * kPanel, begin, ahead);
      }
    }
  }

 private:
  TileShapes shapes_;
};

}  // namespace MS_ISA
}  // namespace minserve
