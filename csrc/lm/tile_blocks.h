// Which products go by tiles (AMX): those of bfloat16 activations, from five rows on.
#pragma once

#include "few_rows.h"
#include "multiply.h"
#include "tiles.h"

namespace minserve {
namespace MS_ISA {

// Up to kFewRows rows, which any weights may have.
template <class W>
class TileBlocks {
 public:
  static constexpr std::int64_t kRowsOfOne = 2 * kTileRows;
  static constexpr std::int64_t kRowsTogether = 64;
  static constexpr std::int64_t kUnturnedRows = kFewRows;

  void run(const char* weights, std::int64_t stride, std::int64_t panels, const char* fed,
           std::int64_t fed_stride, std::int64_t count, std::int64_t steps, float* sums, bool begin,
           Fetch fetch) {
    const WithoutSubnormals as_tiles;
    const std::int64_t most = count > 2 ? 2 : 4;  // of panels, whose sums fit the registers
    for (std::int64_t p = 0; p < panels; p += most) {
      const std::int64_t wide = panels - p < most ? panels - p : most;
      few_rows_block_for<W>(count, wide)(weights + p * W::kStepBytes, stride, fed, fed_stride,
                                         steps, sums + p * kPanel, begin,
                                         p == 0 ? fetch.part(0, 1, steps) : Ahead{});
    }
  }
};

template <>
class Blocks<WeightsByte<FedHalf>> : public TileBlocks<WeightsByte<FedHalf>> {};

template <>
class Blocks<WeightsHalf> : public TileBlocks<WeightsHalf> {
 public:
  void run(const char* weights, std::int64_t stride, std::int64_t panels, const char* fed,
           std::int64_t fed_stride, std::int64_t count, std::int64_t steps, float* sums, bool begin,
           Fetch fetch) {
    if (count <= kFewRows) {
      return TileBlocks::run(weights, stride, panels, fed, fed_stride, count, steps, sums, begin,
                             fetch);
    }
    const std::int64_t blocks = (count + kRowsOfOne - 1) / kRowsOfOne;
    for (std::int64_t b = 0; b < blocks; ++b) {
      const std::int64_t row = b * kRowsOfOne;
      const std::int64_t rows = count - row < kRowsOfOne ? count - row : kRowsOfOne;
      const std::int64_t most = rows > kTileRows ? 2 : 4;
      for (std::int64_t p = 0; p < panels; p += most) {
        const std::int64_t wide = panels - p < most ? panels - p : most;
        const Ahead ahead = p == 0 ? fetch.part(b, blocks, steps) : Ahead{};
        tile_block_for(rows, wide)(shapes_, weights + p * kTileLine, stride, fed + row * fed_stride,
                                   fed_stride, rows, steps, sums + (row * kMostPanels + p) * kPanel,
                                   begin, ahead.next, ahead.lines);
      }
    }
  }

 private:
  TileShapes shapes_;
};

}  // namespace MS_ISA
}  // namespace minserve
