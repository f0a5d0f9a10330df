// Rows of activations times a packed matrix.
//
// Every output is one chain of additions in the order of the inputs, begun at zero, whatever the
// number of rows, their place among them and the threads: so its bits depend on its own row alone.
// Blocking cuts that chain where sums lie in memory for a while, which changes no bit.
#pragma once

#include "weights.h"

namespace minserve {
namespace MS_ISA {

// Rows and panels of a block; panels where there is one row, whose sums must be enough to hide how
// long an addition takes.
#if defined(MS_AVX512)
constexpr int kRows = 6, kPanelsAtOnce = 4;  // 24 sums, 4 weights, 1 activation in 32 registers
#elif defined(MS_AVX2)
constexpr int kRows = 4, kPanelsAtOnce = 1;  // 8 sums, up to 4 halves of weights in 16 registers
#else
constexpr int kRows = 2, kPanelsAtOnce = 1;
#endif
constexpr int kPanelsOfOneRow = kParts > 2 ? 2 : 4;

// What is fetched while a block is computed: `lines` cache lines per step from `next` on.
struct Ahead {
  const char* next;
  std::int64_t lines;
};

// sums [R, P panels] += rows [R, steps] times P panels; they lie kMostPanels panels apart.
template <class W, int R, int P>
inline __attribute__((noinline)) void block(const char* weights, std::int64_t stride,
                                            const char* fed, std::int64_t fed_stride,
                                            std::int64_t steps, float* sums, bool begin,
                                            Ahead ahead) {
  constexpr std::int64_t line = kMostPanels * kPanel;
  VF sum[R][P][kParts];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) {
#pragma GCC unroll 8
      for (int i = 0; i < kParts; ++i) {
        const float* at = sums + r * line + p * kPanel + i * kWidth;
        sum[r][p][i] = begin ? splat<VF>(0.0f) : load<VF>(at, Full{});
      }
    }
  }
  for (std::int64_t s = 0; s < steps; ++s) {
    for (std::int64_t n = 0; n < ahead.lines; ++n, ahead.next += 64) {
      __builtin_prefetch(ahead.next, 0, 2);  // to the second level: the first is full
    }
    W w[P];
    if constexpr (R == 1 &&
                  kParts > 1) {  // one after the other: no more of them in registers than needed
      const typename W::Input x = W::input(fed);
#pragma GCC unroll 8
      for (int p = 0; p < P; ++p) {
        w[p].load(weights + p * W::kStepBytes);
        w[p].add(sum[0][p], x);
      }
      weights += stride;
      fed += kInputBytes<W>;
      continue;
    }
    load_all<R>(weights, w);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const typename W::Input x = W::input(fed + r * fed_stride);
#pragma GCC unroll 8
      for (int p = 0; p < P; ++p) w[p].add(sum[r][p], x);
    }
    weights += stride;
    fed += kInputBytes<W>;
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) {
#pragma GCC unroll 8
      for (int i = 0; i < kParts; ++i) {
        store(sums + r * line + p * kPanel + i * kWidth, sum[r][p][i], Full{});
      }
    }
  }
}

using BlockFn = void (*)(const char*, std::int64_t, const char*, std::int64_t, std::int64_t, float*,
                         bool, Ahead);

template <class W, int R, int P>
BlockFn block_for(std::int64_t rows, std::int64_t panels) {
  if constexpr (R > 1) {
    if (rows < R) return block_for<W, R - 1, P>(rows, panels);
  }
  if constexpr (P > 1) {
    if (panels < P) return block_for<W, R, P - 1>(rows, panels);
  }
  return &block<W, R, P>;
}

// How far ahead of one block of rows weights are fetched.
constexpr std::int64_t kBytesAhead = 4096;

// What is fetched meanwhile: `lines` cache lines per step from `next` on.
struct Fetch {
  const char* next;
  std::int64_t lines;

  // The part of block `index` of `count`, which fetch it together.
  Ahead part(std::int64_t index, std::int64_t count, std::int64_t steps) const {
    const std::int64_t each = (lines + count - 1) / count;
    return {next + index * each * 64 * steps, index * each < lines ? each : 0};
  }
};

// Steps of weights that stay near while all rows pass: 32 KB at most.
constexpr std::int64_t kStepsTogether = 128;

// All blocks of `count` rows times `panels` panels over `steps` steps.
template <class W>
class Blocks {
 public:
  static constexpr std::int64_t kRowsOfOne = kRows;
  static constexpr std::int64_t kUnturnedRows = kRows;  // more have bytes turned for all of them
  // Rows whose sums lie in the first-level cache together.
  static constexpr std::int64_t kRowsTogether = 48;

  void run(const char* weights, std::int64_t stride, std::int64_t panels, const char* fed,
           std::int64_t fed_stride, std::int64_t count, std::int64_t steps, float* sums, bool begin,
           Fetch fetch) {
    if (count == 1) {
      all<1, kPanelsOfOneRow>(weights, stride, panels, fed, fed_stride, count, steps, sums, begin,
                              fetch);
    } else {
      all<kRows, kPanelsAtOnce>(weights, stride, panels, fed, fed_stride, count, steps, sums, begin,
                                fetch);
    }
  }

 private:
  template <int R, int P>
  void all(const char* weights, std::int64_t stride, std::int64_t panels, const char* fed,
           std::int64_t fed_stride, std::int64_t count, std::int64_t steps, float* sums, bool begin,
           Fetch fetch) {
    const std::int64_t blocks = (count + R - 1) / R;
    for (std::int64_t p = 0; p < panels; p += P) {
      const std::int64_t wide = panels - p < P ? panels - p : P;
      for (std::int64_t b = 0; b < blocks; ++b) {
        const Range rows = share_of(count, b, blocks);
        block_for<W, R, P>(rows.end - rows.begin, wide)(
            weights + p * W::kStepBytes, stride, fed + rows.begin * fed_stride, fed_stride, steps,
            sums + rows.begin * kMostPanels * kPanel + p * kPanel, begin,
            p == 0 ? fetch.part(b, blocks, steps) : Ahead{});
      }
    }
  }
};

}  // namespace MS_ISA
}  // namespace minserve

#if defined(MS_AMX)
#include "tile_blocks.h"
#endif

namespace minserve {
namespace MS_ISA {

// Rows of a block of what has activations of such a type.
template <class Fed>
constexpr std::int64_t kRowsOfBlock =
    Fed::kHalf ? Blocks<WeightsHalf>::kRowsOfOne : Blocks<WeightsFloat>::kRowsOfOne;

// Rows of `fed` times panels of `matrix`; then, for each row and run of panels:
// finish(row, panel, panels, sums), the sums in the order of the panels. A run holds all gates of
// its outputs when `panels` does.
template <class W, class F>
void multiply_with(const Matrix& matrix, const char* fed, std::int64_t fed_stride, Range rows,
                   Range panels, const F& finish) {
  using Wide = typename Turned<W>::Weights;
  using WideBlocks = Blocks<Wide>;
  constexpr std::int64_t turned_steps = W::kInputs / Wide::kInputs;  // for one step of W
  alignas(64) float sums[WideBlocks::kRowsTogether * kMostPanels * kPanel];
  alignas(
      64) char turned[Turned<W>::kNeeded ? kStepsTogether * kMostPanels * turned_steps * 64 : 64];
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
      const std::int64_t count = left < WideBlocks::kRowsTogether ? left : WideBlocks::kRowsTogether;
      for (std::int64_t step = 0; step < steps; step += kStepsTogether) {
        const std::int64_t n = steps - step < kStepsTogether ? steps - step : kStepsTogether;
        const char* from = weights + step * stride;
        const char* input = fed + row * fed_stride + step * kInputBytes<W>;
        // With one block weights are fetched a little ahead, with more the next steps' meanwhile;
        // the first rows bring them into the cache for all others.
        const bool one = count <= WideBlocks::kRowsOfOne;
        const std::int64_t lines = row > rows.begin ? 0 : stride > 64 ? stride / 64 : 1;
        Fetch fetch{from + (one ? kBytesAhead : n * stride), lines};
        if constexpr (Turned<W>::kNeeded) {
          if (count > Blocks<W>::kUnturnedRows) {
            turn<W>(from, stride, n, together, turned);
            fetch.lines = (lines + turned_steps - 1) / turned_steps;
            wide_blocks.run(turned, together * Wide::kStepBytes, together, input, fed_stride, count,
                            n * turned_steps, sums, step == 0, fetch);
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
              Range panels, const F& finish) {
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
