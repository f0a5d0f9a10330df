// Powers for distributions over a vocabulary: in float64, the same bits on every instruction set.
#pragma once

#include "vec.h"

namespace minserve {
namespace MS_ISA {

// exp(-x) for 0 <= x <= 600, to 7e-12 relative, so that rounded to float32 it is the nearest but
// for one in some thousands. Sums and products do not fuse; loops over it become vector code. 2^n
// e^r with |r| <= ln(2) / 2, and of e^r the Taylor series up to the ninth power.
MS_CELL double exp_of_minus(float x) {
  constexpr double kLn2 = 0.6931471805599453, kLog2e = 1.4426950408889634;
  // 1.5 * 2^52 and the exponent's bias: adding it rounds to an integer, whose biased value is left
  // in the low bits.
  constexpr double kMagic = 6755399441055744.0 + 1023.0;
  const double y = static_cast<double>(x) * -kLog2e;
  const double shifted = y + kMagic;
  const double r = (y - (shifted - kMagic)) * kLn2;
  double p = 1.0 / 362880;
  p = p * r + 1.0 / 40320;
  p = p * r + 1.0 / 5040;
  p = p * r + 1.0 / 720;
  p = p * r + 1.0 / 120;
  p = p * r + 1.0 / 24;
  p = p * r + 1.0 / 6;
  p = p * r + 0.5;
  p = p * r + 1.0;
  p = p * r + 1.0;
  return p * bit_cast<double>(bit_cast<std::uint64_t>(shifted) << 52);
}

// The best of a row, NaN if there is one. As integers, which order as the floats do: so the
// compiler may take them in any order.
inline float best_logit(const float* logits, std::int64_t vocab) {
  std::int32_t most = INT32_MIN, widest = 0;
  for (std::int64_t i = 0; i < vocab; ++i) {
    const std::int32_t bits = bit_cast<std::int32_t>(logits[i]);
    const std::int32_t magnitude = bits & 0x7fffffff;
    const std::int32_t ordered = bits ^ ((bits >> 31) & 0x7fffffff);
    most = ordered > most ? ordered : most;
    widest = magnitude > widest ? magnitude : widest;
  }
  if (widest > 0x7f800000) return bit_cast<float>(widest);  // a NaN
  return bit_cast<float>(most ^ ((most >> 31) & 0x7fffffff));
}

}  // namespace MS_ISA
}  // namespace minserve
