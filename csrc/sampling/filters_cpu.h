// The loops over a row that filters need on the CPU, made for vector code.
//
// Each file that includes this has its own: none built for one instruction set may be linked where
// another is meant.
#pragma once

#include "sample.h"

namespace minserve {
namespace {

inline std::int32_t bits_of_float(float x) {
  std::int32_t bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  return bits;
}

std::int64_t first_place(const float* logits, std::int64_t vocab, float logit) {
  constexpr std::int64_t look = 256;  // at so many together
  for (std::int64_t first = 0;; first += look) {
    const std::int64_t end = first + look < vocab ? first + look : vocab;
    std::int32_t any = 0;
    for (std::int64_t i = first; i < end; ++i) any |= logits[i] == logit;
    if (!any) continue;
    while (logits[first] != logit) ++first;
    return first;
  }
}

void bin(const float* __restrict distances, std::int64_t vocab, float scale,
         std::uint16_t* __restrict bins) {
  constexpr float last = kRowBins - 1;
  for (std::int64_t i = 0; i < vocab; ++i) {
    const float place = distances[i] * scale;
    bins[i] = static_cast<std::uint16_t>(static_cast<std::int32_t>(place < last ? place : last));
  }
}

bool holds(const std::uint16_t* bins, std::int64_t count, std::uint16_t bin) {
  std::uint16_t any = 0;
  for (std::int64_t i = 0; i < count; ++i) any |= static_cast<std::uint16_t>(bins[i] == bin);
  return any != 0;
}

// Signed, for which all instruction sets have comparisons.
inline std::int32_t bounded(std::uint32_t x) {
  return static_cast<std::int32_t>(x < 0x7fffffffu ? x : 0x7fffffffu);
}

std::uint64_t before(const float* __restrict distances, std::int64_t vocab, Cut cut,
                     const std::int64_t* __restrict weights) {
  const std::int32_t furthest = bounded(cut.distance), last = bounded(cut.id);
  std::int64_t sum = 0;
  for (std::int64_t i = 0; i < vocab; ++i) {
    const std::int32_t bits = bits_of_float(distances[i]) & 0x7fffffff;
    const bool better = (bits < furthest) | ((bits == furthest) & (i < last));
    sum += better ? weights[i] : 0;
  }
  return static_cast<std::uint64_t>(sum);
}

void keep(const float* __restrict distances, std::int64_t vocab, Cut cut,
          std::int64_t* __restrict weights, std::int64_t* __restrict sums) {
  const std::int32_t furthest = bounded(cut.distance), last = bounded(cut.id);
  for (std::int64_t first = 0; first < vocab; first += kPiece) {
    const std::int64_t end = first + kPiece < vocab ? first + kPiece : vocab;
    std::int64_t sum = 0;
    for (std::int64_t i = first; i < end; ++i) {
      const std::int32_t bits = bits_of_float(distances[i]) & 0x7fffffff;
      const bool kept = (bits < furthest) | ((bits == furthest) & (i <= last));
      weights[i] = kept ? weights[i] : 0;
      sum += weights[i];
    }
    *sums++ = sum;
  }
}

}  // namespace
}  // namespace minserve
