// A block's first look at a row: for the best logit, to weigh sections and, where a filter asks for
// a cut, to count scaled probabilities meanwhile.
#pragma once

#include "histogram.cuh"
#include "kernel.cuh"
#include "section_sums.cuh"

namespace minserve {
namespace cuda {

// What scaled probabilities are relative to while the best is not known, in octaves: the best of
// the tokens that all threads look at first. Has a barrier, so bins are empty.
__device__ __forceinline__ float first_origin(float best, float octaves, Block& block) {
  const float origin = block.all(best, kImpossible, max_or_nan) * octaves;
  return origin - origin == 0.0f ? origin : 0.0f;
}
// The block's best, for which all have looked at theirs. Has a barrier.
__device__ __forceinline__ float best_of_block(float best, Block& block) {
  return block.all(best, kImpossible, max_or_nan) + 0.0f;  // no -0, as ArgmaxKey has it
}
// Whether bins of scaled probabilities relative to the origin can be used, which then are relative
// to the best.
template <unsigned kThreads>
__device__ __forceinline__ bool set_found_best(float best, float octaves, float origin,
                                               ScaledProbHistogram<kThreads>& bins) {
  const float below = fmaf(best, octaves, -origin);
  if (!(below >= bins.kLeastOctavesBelow && below <= bins.kMostOctavesBelow)) return false;
  bins.set_best(below);
  return true;
}

// Finds the best logit of a row and counts scaled probabilities meanwhile. `counted`: whether the
// bins can be used.
template <unsigned kThreads>
__device__ __forceinline__ float best_and_histogram(const Row& row, float octaves, Block& block,
                                                    ScaledProbHistogram<kThreads>& bins,
                                                    bool& counted) {
  bins.clear();
  float best = kImpossible, origin = 0.0f;  // origin, in octaves, of scaled probabilities
  read_coalesced<false>(
      row,
      [&](const float4(&first)[kLoadsAhead]) {
        for (const float4& x : first) {
          best = max_or_nan(best, max_or_nan(max_or_nan(x.x, x.y), max_or_nan(x.z, x.w)));
        }
        origin = first_origin(best, octaves, block);
      },
      [&](const float (&logits)[kTogether], unsigned) {
        unsigned scaled_prob[kTogether];
#pragma unroll
        for (unsigned i = 0; i < kTogether; ++i) {
          best = max_or_nan(best, logits[i]);
          scaled_prob[i] = __float_as_uint(fast_exp2(fmaf(logits[i], octaves, -origin)));
        }
        bins.template add<false>(scaled_prob);
      });
  best = best_of_block(best, block);
  counted = set_found_best(best, octaves, origin, bins);
  return best;
}

// Finds the best logit of a row and weighs its sections, and with kCounts counts scaled
// probabilities by weight meanwhile. `counted`: whether the bins can be used.
template <bool kCounts, unsigned kThreads>
__device__ __forceinline__ float best_and_sections(const Row& row, float octaves, Block& block,
                                                   Sections& sections,
                                                   ScaledProbHistogram<kThreads>& bins,
                                                   bool& counted) {
  constexpr unsigned kWarps = kThreads / kWarp;
  if (kCounts) bins.clear();
  const unsigned lane = threadIdx.x % kWarp;
  const unsigned count = (row.vocab + kSectionTokens - 1) / kSectionTokens;
  const unsigned whole = row.aligned ? row.vocab / kSectionTokens : 0;
  LaneFours x;
  const auto load = [&](unsigned section, unsigned a) {
    const unsigned id = section * kSectionTokens + a * kStride + lane * kTogether;
    if (section < whole) {
      x[a] = *reinterpret_cast<const float4*>(row.logits + id);
    } else if (section < count) {
      x[a] = row.four(id);
    }
  };
  unsigned section = threadIdx.x / kWarp;
#pragma unroll
  for (unsigned a = 0; a < kFoursOfLane; ++a) {
    x[a] = {kImpossible, kImpossible, kImpossible, kImpossible};
    load(section, a);
  }
  float best = kImpossible, origin = 0.0f;
  if (kCounts) {
    for (const float4& four : x) {
      best = max_or_nan(best, max_or_nan(max_or_nan(four.x, four.y), max_or_nan(four.z, four.w)));
    }
    origin = first_origin(best, octaves, block);
  }
#pragma unroll 1
  for (; section < count; section += kWarps) {
    SectionSum section_sum(x, octaves);
    best = max_or_nan(best, section_sum.best());
    const float scale = kCounts ? fast_exp2(fmaf(section_sum.beside(), octaves, -origin)) : 0.0f;
#pragma unroll
    for (unsigned a = 0; a < kFoursOfLane; ++a) {
      float scaled_prob[kTogether];
      section_sum.add(x[a], scaled_prob);
      load(section + kWarps, a);
      if (kCounts) {
        unsigned rough[kTogether];
#pragma unroll
        for (unsigned i = 0; i < kTogether; ++i) rough[i] = __float_as_uint(scaled_prob[i] * scale);
        bins.template add<true>(rough);
      }
    }
    const std::uint64_t sum = section_sum.sum();
    if (lane == 0) {
      sections.best[section] = section_sum.best();
      sections.sums[section] = sum;
    }
  }
  best = best_of_block(best, block);
  counted = kCounts && set_found_best(best, octaves, origin, bins);
  return best;
}

// Without bins.
__device__ __forceinline__ Best best_alone(const Row& row, Block& block) {
  BestOfThread best;
  read_coalesced<false>(
      row, [](const float4(&)[kLoadsAhead]) {},
      [&](const float (&logits)[kTogether], unsigned id) { best.add(logits, id); });
  return best.of_block(block);
}

}  // namespace cuda
}  // namespace minserve
