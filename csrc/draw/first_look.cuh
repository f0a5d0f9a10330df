// A block's first look at a row: for the best logit, and where a filter asks for a cut, to count
// odds meanwhile.
#pragma once

#include "bins.cuh"
#include "kernel.cuh"

namespace minserve {
namespace cuda {

// Finds the best logit of a row, and counts odds by weight (kWeighs) or number meanwhile.
// `counted`: whether the bins can be used.
template <bool kWeighs, unsigned kThreads>
__device__ __forceinline__ Best best_and_bins(const Row& row, float octaves, Block& block,
                                              OddsBins<kThreads>& bins, bool& counted) {
  bins.clear();
  float best = kImpossible, origin = 0.0f;  // origin: octaves, of what odds are to
  each_four<false>(
      row,
      [&](const float4(&first)[kFoursAhead]) {
        for (const float4& x : first) {
          best = max_or_nan(best, max_or_nan(max_or_nan(x.x, x.y), max_or_nan(x.z, x.w)));
        }
        // Has a barrier, so the bins are empty.
        origin = block.all(best, kImpossible, max_or_nan) * octaves;
        if (origin - origin != 0.0f) origin = 0.0f;
      },
      [&](const float (&logits)[kTogether], unsigned) {
        unsigned odds[kTogether];
#pragma unroll
        for (unsigned i = 0; i < kTogether; ++i) {
          best = max_or_nan(best, logits[i]);
          odds[i] = __float_as_uint(fast_exp2(fmaf(logits[i], octaves, -origin)));
        }
        bins.template add<kWeighs>(odds);
      });
  best = block.all(best, kImpossible, max_or_nan) + 0.0f;  // no -0, as BestOfThread has it
  const float below = fmaf(best, octaves, -origin);
  counted = below >= bins.kLeastOctavesBelow && below <= bins.kMostOctavesBelow;
  if (counted) bins.set_best(below);
  Best found = {};
  found.key = BestKey::of(best, 0).key;
  return found;
}

// Without bins.
__device__ __forceinline__ Best best_alone(const Row& row, Block& block) {
  BestOfThread best;
  each_four<false>(
      row, [](const float4(&)[kFoursAhead]) {},
      [&](const float (&logits)[kTogether], unsigned id) { best.add(logits, id); });
  return best.of_block(block);
}

}  // namespace cuda
}  // namespace minserve
