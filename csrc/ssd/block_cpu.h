// A block of tokens of Mamba-2's recurrence on the CPU: three products of matrices.
//
//     y_t = kept_t C_t S + sum over s <= t of weights_ts x_s + D x_t       S: before the block
//     weights_ts = (C_t B_s) dt_s left_ts      left_ts: what tokens s + 1 to t leave of token s
//     S <- kept_last S + sum over s of dt_s left_last,s x_s B_s^T
//
// What tokens leave is the exponential of a sum, which no difference of two larger sums replaces.
#pragma once

#include "args.h"
#include "token_cpu.h"

namespace minserve {
namespace MS_ISA {

constexpr int kBlock = 16;  // tokens
static_assert(kScanChunk % kBlock == 0, "blocks begin where the engine cuts prompts");

// Rows of floats, `stride` apart.
struct FloatRows {
  const float* data;
  std::int64_t stride;

  MS_CELL const float* operator[](std::int64_t row) const { return data + row * stride; }
};

// What a block has for all rows of a head's state. Of a token `t`: a row.
struct Block {
  int count;                                  // tokens, up to kBlock
  FloatRows B, C;                             // [count, states]
  alignas(64) float kept[kBlock];             // of what was before the block
  alignas(64) float weights[kBlock][kBlock];  // of x_s in y_t, for s <= t
  alignas(64) float added[kBlock];            // of x_s B_s^T in the state behind the block
};

constexpr int kDotTokens = kWidth / kQuad;

template <class L>
MS_CELL void add_products(const float* const (&rows)[kQuad], const float* const (&with)[kDotTokens],
                          std::int64_t n, VF (&sums)[kWidth], L lanes) {
  VF row[kQuad];
#pragma GCC unroll 4
  for (int r = 0; r < kQuad; ++r) row[r] = load<VF>(rows[r] + n, lanes);
#pragma GCC unroll 4
  for (int t = 0; t < kDotTokens; ++t) {
    const VF c = load<VF>(with[t] + n, lanes);
#pragma GCC unroll 4
    for (int r = 0; r < kQuad; ++r) sums[t * kQuad + r] = fmadd(c, row[r], sums[t * kQuad + r]);
  }
}

// out[t][r] = the sum over rows[r] C[t], for tokens from `first` to the block's last; out's rows
// are `stride` apart. Up to kDotTokens - 1 rows behind the last are overwritten, too.
MS_CELL void dots(const float* const (&rows)[kQuad], FloatRows C, int first, int count,
                  std::int64_t states, float* out, std::int64_t stride) {
  for (int t = first; t < count; t += kDotTokens) {
    const float* with[kDotTokens];
#pragma GCC unroll 4
    for (int i = 0; i < kDotTokens; ++i) with[i] = C[t + i < count ? t + i : count - 1];
    VF sums[kWidth] = {};
    std::int64_t n = 0;
    for (; n + kWidth <= states; n += kWidth) add_products(rows, with, n, sums, Full{});
    if (n < states) add_products(rows, with, n, sums, Part{static_cast<int>(states - n)});
    alignas(64) float flat[kWidth];
    store(flat, sums_of_each(sums), Full{});
#pragma GCC unroll 4
    for (int i = 0; i < kDotTokens; ++i) {
      __builtin_memcpy(out + (t + i) * stride, flat + i * kQuad, sizeof(float) * kQuad);
    }
  }
}

// Fills in all but count, B and C. dt [kBlock]: behind softplus; log [kBlock]: dt A, base 2.
MS_CELL void weigh(Block& block, const float* dt, const float* log, std::int64_t states) {
  const int count = block.count;
  alignas(64) float products[kBlock + kDotTokens][kBlock];
  for (int s = 0; s < count; s += kQuad) {
    const float* rows[kQuad];
#pragma GCC unroll 4
    for (int r = 0; r < kQuad; ++r) rows[r] = block.B[s + r < count ? s + r : count - 1];
    dots(rows, block.C, s, count, states, &products[0][s], kBlock);
  }
  alignas(64) float since[kBlock] = {}, from_start[kBlock] = {};  // sums of logarithms
  float sum = 0;
  for (int t = 0; t < count; ++t) {
    sum += log[t];
    from_start[t] = sum;
    for (int s = 0; s < t; ++s) since[s] += log[t];
    for (int s = 0; s <= t; s += kWidth) {
      const VF left = exp2_of(load<VF>(since + s, Full{})) * load<VF>(dt + s, Full{});
      store(block.added + s, left, Full{});
      store(block.weights[t] + s, left * load<VF>(products[t] + s, Full{}), Full{});
    }
  }
  for (int t = 0; t < kBlock; t += kWidth) {
    store(block.kept + t, exp2_of(load<VF>(from_start + t, Full{})), Full{});
  }
}

// h <- kept h + sum over tokens of added B, of kRows rows and kVectors vectors of their states.
// added: [tokens, rows], kMostSsdRows apart.
template <int kRows, int kVectors, class L>
MS_CELL void advance_tile(const Block& block, float* h, std::int64_t n, std::int64_t states,
                          const float* added, L lanes) {
  const VF kept = all_lanes(block.kept[block.count - 1]);
  VF after[kRows][kVectors];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      after[r][v] = kept * load<VF>(h + r * states + n + v * kWidth, lanes);
    }
  }
  for (int t = 0; t < block.count; ++t) {
    VF b[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) b[v] = load<VF>(block.B[t] + n + v * kWidth, lanes);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const VF add = all_lanes(added[t * kMostSsdRows + r]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) after[r][v] = fmadd(add, b[v], after[r][v]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      store(h + r * states + n + v * kWidth, after[r][v], lanes);
    }
  }
}

template <int kRows>
MS_CELL void advance_block(const Block& block, float* h, std::int64_t states, const float* added) {
#if defined(MS_AVX512)
  constexpr int kVectors = 4;
#else
  constexpr int kVectors = 2;  // of 16 registers
#endif
  std::int64_t n = 0;
  for (; n + kVectors * kWidth <= states; n += kVectors * kWidth) {
    advance_tile<kRows, kVectors>(block, h, n, states, added, Full{});
  }
  for (; n + kWidth <= states; n += kWidth) {
    advance_tile<kRows, 1>(block, h, n, states, added, Full{});
  }
  if (n < states) {
    const Part rest{static_cast<int>(states - n)};
    advance_tile<kRows, 1>(block, h, n, states, added, rest);
  }
}

// kVectors vectors of y's columns from p on, at all tokens; before: C_t S.
template <class T, int kVectors, class L>
MS_CELL void outputs(const Block& block, FloatRows x, FloatRows before, VF D, std::int64_t p, T* y,
                     std::int64_t y_stride, L lanes) {
  for (int t = 0; t < block.count; ++t) {
    const VF kept = all_lanes(block.kept[t]);
    VF sums[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      sums[v] = kept * load<VF>(before[t] + p + v * kWidth, lanes);
    }
    for (int s = 0; s <= t; ++s) {
      const VF weight = all_lanes(block.weights[t][s]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        sums[v] = fmadd(weight, load<VF>(x[s] + p + v * kWidth, lanes), sums[v]);
      }
    }
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const std::int64_t at = p + v * kWidth;
      store(y + t * y_stride + at, fmadd(D, load<VF>(x[t] + at, lanes), sums[v]), lanes);
    }
  }
}

// Reads the block for `rows` rows of a head, up to kMostSsdRows: h [rows, states], x and y
// [tokens, rows].
template <class T>
MS_CELL void read_block(const Block& block, FloatRows x, float D, std::int64_t rows,
                        std::int64_t states, float* h, T* y, std::int64_t y_stride) {
  constexpr int kVectors = 4;
  alignas(64) float added[kBlock * kMostSsdRows];
  alignas(64) float before[(kBlock + kDotTokens) * kMostSsdRows];
  for (int t = 0; t < block.count; ++t) {
    float* const out = added + t * kMostSsdRows;
    for (std::int64_t p = 0; p < rows; ++p) out[p] = block.added[t] * x[t][p];
  }
  for (std::int64_t p = 0; p < rows; p += kQuad) {
    const float* quad[kQuad];
#pragma GCC unroll 4
    for (int r = 0; r < kQuad; ++r) quad[r] = h + (p + r < rows ? p + r : rows - 1) * states;
    dots(quad, block.C, 0, block.count, states, before + p, kMostSsdRows);
    if (p + kQuad <= rows) {
      advance_block<kQuad>(block, h + p * states, states, added + p);
    } else {
      for (std::int64_t r = p; r < rows; ++r) {
        advance_block<1>(block, h + r * states, states, added + r);
      }
    }
  }
  const VF d = all_lanes(D);
  const FloatRows begun{before, kMostSsdRows};
  std::int64_t p = 0;
  for (; p + kVectors * kWidth <= rows; p += kVectors * kWidth) {
    outputs<T, kVectors>(block, x, begun, d, p, y, y_stride, Full{});
  }
  for (; p + kWidth <= rows; p += kWidth) {
    outputs<T, 1>(block, x, begun, d, p, y, y_stride, Full{});
  }
  if (p < rows) {
    const Part rest{static_cast<int>(rows - p)};
    outputs<T, 1>(block, x, begun, d, p, y, y_stride, rest);
  }
}

}  // namespace MS_ISA
}  // namespace minserve
