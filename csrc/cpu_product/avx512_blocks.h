// Blocks of a product in vectors: a few rows times a few panels, whose sums stay in registers.
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

// What one block fetches while it is computed: `lines` cache lines per step from `next` on.
struct Ahead {
  const char* next;
  std::int64_t lines;

  MS_CELL void fetch(std::int64_t steps) {
    for (std::int64_t n = 0; n < lines * steps; ++n, next += 64) {
      __builtin_prefetch(next, 0, 2);  // to the second level: the first is full
    }
  }
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
    ahead.fetch(1);
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

// What the blocks of all rows fetch together, each a part: `lines` cache lines per step from `next`
// on.
struct Fetch {
  const char* next;
  std::int64_t lines;

  // The part of block `index` of `count`, which fetch it together.
  Ahead part(std::int64_t index, std::int64_t count, std::int64_t steps) const {
    const std::int64_t each = (lines + count - 1) / count;
    return {next + index * each * 64 * steps, index * each < lines ? each : 0};
  }
};

// All blocks of some rows times some panels over some steps.
template <class W>
class Blocks {
 public:
  static constexpr std::int64_t kRowsOfOne = kRows;
  static constexpr std::int64_t kNarrowRows = kRows;  // more have bytes widened for all of them
  // How far ahead of one block of rows weights are fetched.
  static constexpr std::int64_t kBytesAhead = 4096;
  // Rows whose sums lie in the first-level cache together, and the steps of weights that stay near
  // while all of those rows pass: 32 KB, of widened bytes with float32 activations 64.
  static constexpr std::int64_t kRowsTogether = 48, kStepsTogether = 128;
  static constexpr std::int64_t steps_together(std::int64_t) { return kStepsTogether; }
  // Rows that all panels pass before others: all, for they are multiplied more slowly than read.
  static constexpr std::int64_t rows_in_cache(std::int64_t) { return INT64_MAX; }

  // sums [rows, panels] += fed [rows, steps] times weights [steps, panels]; those of a row lie
  // kMostPanels panels after those of the row before, and are zeros where they `begin`.
  void run(const char* weights, std::int64_t stride, std::int64_t panels, const char* fed,
           std::int64_t fed_stride, std::int64_t rows, std::int64_t steps, float* sums, bool begin,
           Fetch fetch) {
    if (rows == 1) {
      all<1, kPanelsOfOneRow>(weights, stride, panels, fed, fed_stride, rows, steps, sums, begin,
                              fetch);
    } else {
      all<kRows, kPanelsAtOnce>(weights, stride, panels, fed, fed_stride, rows, steps, sums, begin,
                                fetch);
    }
  }

 private:
  template <int R, int P>
  void all(const char* weights, std::int64_t stride, std::int64_t panels, const char* fed,
           std::int64_t fed_stride, std::int64_t rows, std::int64_t steps, float* sums, bool begin,
           Fetch fetch) {
    const std::int64_t blocks = (rows + R - 1) / R;
    for (std::int64_t p = 0; p < panels; p += P) {
      const std::int64_t wide = panels - p < P ? panels - p : P;
      for (std::int64_t b = 0; b < blocks; ++b) {
        const Range own = part_of(rows, b, blocks);
        block_for<W, R, P>(own.end - own.begin, wide)(
            weights + p * W::kStepBytes, stride, fed + own.begin * fed_stride, fed_stride, steps,
            sums + (own.begin * kMostPanels + p) * kPanel, begin,
            p == 0 ? fetch.part(b, blocks, steps) : Ahead{});
      }
    }
  }
};

}  // namespace MS_ISA
}  // namespace minserve
