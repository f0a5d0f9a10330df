// Rows of activations times a packed matrix.
//
// Every output is one chain of additions in the order of the inputs, begun at zero, whatever the
// number of rows, their place among them and the threads: so its bits depend on its own row alone.
// (A link of the chain is one input, with bfloat16 instructions two, and with tiles 32.) Blocking
// cuts that chain where sums lie in memory for a while, which changes no bit.
#pragma once

#include "avx512_blocks.h"
#if defined(MS_AMX)
#include "amx_blocks.h"
#endif

namespace minserve {
namespace MS_ISA {

// Rows of a block of what has activations of such a type.
template <class Fed>
constexpr std::int64_t kRowsOfBlock =
    Fed::kHalf ? Blocks<WeightsHalf>::kRowsOfOne : Blocks<WeightsFloat>::kRowsOfOne;
// Of such rows as many as are to pass all panels before others do.
template <class Fed>
std::int64_t rows_in_cache(std::int64_t row_bytes) {
  return Fed::kHalf ? Blocks<WeightsHalf>::rows_in_cache(row_bytes)
                    : Blocks<WeightsFloat>::rows_in_cache(row_bytes);
}

// Rows of `fed` times panels of `matrix`; then, for each row and run of panels:
// finish(row, panel, panels, sums), the sums in the order of the panels. A run holds all gates of
// its outputs when `panels` does.
template <class W, class F>
void multiply_with(const Matrix& matrix, const char* fed, std::int64_t fed_stride, Range rows,
                   Range panels, F& finish) {
  using Wide = typename Widened<W>::Weights;
  using WideBlocks = Blocks<Wide>;
  constexpr std::int64_t rows_together = WideBlocks::kRowsTogether;
  constexpr std::int64_t widened_steps = W::kInputs / Wide::kInputs;  // for one step of W
  constexpr std::int64_t widened_bytes =
      WideBlocks::kStepsTogether * kMostPanels * widened_steps * 64;
  alignas(64) float sums[rows_together * kMostPanels * kPanel];
  alignas(64) char widened[Widened<W>::kNeeded ? widened_bytes : 64];
  const std::int64_t steps = matrix.steps(), group = matrix.group();
  Blocks<W> blocks;
  WideBlocks wide_blocks;
  for (std::int64_t panel = panels.begin; panel < panels.end;) {
    std::int64_t together = group - panel % group;  // those of a group lie side by side
    if (together > panels.end - panel) together = panels.end - panel;
    std::int64_t stride;
    const char* weights = matrix.at(panel, stride);
    for (std::int64_t row = rows.begin; row < rows.end;) {
      const std::int64_t left = rows.end - row;
      const std::int64_t count = left < rows_together ? left : rows_together;
      const bool widens = Widened<W>::kNeeded && count > Blocks<W>::kNarrowRows;
      const std::int64_t at_once =
          widens ? WideBlocks::kStepsTogether : Blocks<W>::steps_together(count);
      for (std::int64_t step = 0; step < steps; step += at_once) {
        const std::int64_t n = steps - step < at_once ? steps - step : at_once;
        const char* from = weights + step * stride;
        const char* input = fed + row * fed_stride + step * kInputBytes<W>;
        // With one block weights are fetched a little ahead, with more, or while they are widened,
        // the next steps' meanwhile; the first rows bring them into the cache for all others.
        const bool one = !widens && count <= Blocks<W>::kRowsOfOne;
        Fetch fetch{from + (one ? Blocks<W>::kBytesAhead : n * stride), row > rows.begin ? 0
                                                                        : stride > 64 ? stride / 64
                                                                                      : 1};
        if constexpr (Widened<W>::kNeeded) {
          if (widens) {
            widen<W>(from, stride, n, together, widened);
            fetch.lines = (fetch.lines + widened_steps - 1) / widened_steps;
            wide_blocks.run(widened, together * Wide::kStepBytes, together, input, fed_stride,
                            count, n * widened_steps, sums, step == 0, fetch);
            continue;
          }
        }
        blocks.run(from, stride, together, input, fed_stride, count, n, sums, step == 0, fetch);
      }
      for (std::int64_t r = 0; r < count; ++r) {
        finish(row + r, panel, together, sums + r * kMostPanels * kPanel);
      }
      row += count;
    }
    panel += together;
  }
}

template <class Fed, class F>
void multiply(const Matrix& matrix, const char* fed, std::int64_t fed_stride, Range rows,
              Range panels, F& finish) {
  if (matrix.stored == Kind::i8) {
    return multiply_with<WeightsByte<Fed>>(matrix, fed, fed_stride, rows, panels, finish);
  }
  if constexpr (Fed::kHalf) {
    multiply_with<WeightsHalf>(matrix, fed, fed_stride, rows, panels, finish);
  } else {
    multiply_with<WeightsFloat>(matrix, fed, fed_stride, rows, panels, finish);
  }
}

}  // namespace MS_ISA
}  // namespace minserve
