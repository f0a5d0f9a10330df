// A row's tokens as they are drawn by: distances from the best, weights, and the token at which the
// sum of weights, in the order of ids, passes a number.
#pragma once

#include "../common/row.cuh"
#include "draw.h"

namespace minserve {
namespace cuda {

// exp(-distance) * 2**38, rounded down, in two pieces that sums of 512 keep within 32 bits each.
struct Weight {
  unsigned high, low;  // high * 2**23 + low
};
__device__ __forceinline__ Weight weight_of(float distance) {
  // Adding 2**23 rounded down leaves a float's whole part in the low bits.
  constexpr float kWhole = 8388608.0f;
  const float scaled = expf(-distance) * 32768.0f;  // all products here are exact
  const float high = __fadd_rd(scaled, kWhole);
  const float rest = scaled - (high - kWhole);
  const float low = __fadd_rd(rest * kWhole, kWhole);
  const unsigned zero = __float_as_uint(kWhole);
  return {__float_as_uint(high) - zero, __float_as_uint(low) - zero};
}
__device__ __forceinline__ std::uint64_t whole(Weight weight) {
  return (static_cast<std::uint64_t>(weight.high) << 23) + weight.low;
}

struct Tokens {
  Row row;
  float best, temperature;

  __device__ __forceinline__ float distance(float logit) const {
    const float apart = best - logit;
    return temperature == 1.0f ? apart : apart / temperature;
  }
  // Calls visit(id, distance) for every token of this lane.
  template <class Visit>
  __device__ __forceinline__ void each(Visit visit) const {
    row.each<2>([&](unsigned id, const float4& x) {
      visit(id, distance(x.x));
      visit(id + 1, distance(x.y));
      visit(id + 2, distance(x.z));
      visit(id + 3, distance(x.w));
    });
  }
};

// Measures are functors (id, distance) -> std::uint64_t. The token at which their sum in the order
// of ids passes target_of(sum of all), which is below that sum.
template <class Measure, class TargetOf>
__device__ unsigned token_at(const Tokens& tokens, Block& block, unsigned& found, Measure measure,
                             TargetOf target_of) {
  std::uint64_t mine = 0;
  tokens.each([&](unsigned id, float distance) { mine += measure(id, distance); });
  const Block::Sums sums = block.sums(mine);
  const std::uint64_t target = target_of(sums.total);
  if (target >= sums.before_warp && target - sums.before_warp < sums.warp) {
    const Row& row = tokens.row;
    std::uint64_t before = sums.before_warp;
    for (unsigned from = row.first();; from += kStride) {
      const unsigned id = from + block.lane() * kTogether;
      const float4 x = row.four(id);
      const float logits[kTogether] = {x.x, x.y, x.z, x.w};
      std::uint64_t part[kTogether], sum = 0;
#pragma unroll
      for (unsigned i = 0; i < kTogether; ++i) {
        part[i] = measure(id + i, tokens.distance(logits[i]));
        sum += part[i];
      }
      const std::uint64_t so_far = sum_so_far(sum);
      const std::uint64_t of_stride = __shfl_sync(kAll, so_far, static_cast<int>(kWarp - 1));
      if (target - before < of_stride) {
        std::uint64_t at = before + so_far - sum;
        if (target >= at && target - at < sum) {
          unsigned passed = 0;  // tokens up to which the sum is not above the target
#pragma unroll
          for (unsigned i = 0; i < kTogether; ++i) {
            at += part[i];
            passed += at <= target;
          }
          found = id + passed;
        }
        break;
      }
      before += of_stride;
    }
  }
  __syncthreads();
  return found;
}

}  // namespace cuda
}  // namespace minserve
