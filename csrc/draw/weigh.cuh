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
// Adding it, rounded down, leaves a float's whole part in the low bits.
constexpr float kWhole = 8388608.0f;  // 2**23
__device__ __forceinline__ unsigned whole_part(float x) {
  return __float_as_uint(__fadd_rd(x, kWhole)) - __float_as_uint(kWhole);
}
__device__ __forceinline__ Weight weight_of(float distance) {
  const float scaled = expf(-distance) * 32768.0f;  // all products here are exact
  const float high = __fadd_rd(scaled, kWhole);
  const float rest = scaled - (high - kWhole);
  return {__float_as_uint(high) - __float_as_uint(kWhole), whole_part(rest * kWhole)};
}
__device__ __forceinline__ std::uint64_t whole(Weight weight) {
  return (static_cast<std::uint64_t>(weight.high) << 23) + weight.low;
}

// The warp's sum of numbers below 2**54.
__device__ __forceinline__ std::uint64_t long_sum_of_warp(std::uint64_t mine) {
  constexpr unsigned kLow = 27;  // 32 numbers of so many bits sum to 32 bits
  const unsigned low = static_cast<unsigned>(mine) & ((1u << kLow) - 1);
  return (static_cast<std::uint64_t>(sum_of_warp(static_cast<unsigned>(mine >> kLow))) << kLow) +
         sum_of_warp(low);
}

// min_p keeps the tokens whose weight is no less than min_p of the best's.
__device__ inline Cut min_p_cut(float min_p) {
  const float farthest = -logf(min_p);
  return {farthest > 0.0f ? __float_as_uint(farthest) : 0, 0xffffffffu};
}

// How far below the best some logits are.
struct Span {
  float from, to;
};

class Tokens {
 public:
  const Row row;

  __device__ Tokens(const Row& row, float best, float temperature)
      : row(row), best_(best), temperature_(temperature), inverse_(1.0f / temperature) {
    // Then all that is met in dividing is far from overflow and from subnormal numbers: two logits
    // that differ do so by 2**-25 of the best's magnitude or more.
    const float size = best < 0.0f ? -best : best;
    quick_ = temperature > 0x1p-20f && temperature < 0x1p20f && size > 0x1p-30f && size < 0x1p60f;
  }

  // A span that holds all tokens with distances from `nearest` to `farthest`, and few others: they
  // are left out without a division.
  __device__ Span span(float nearest, float farthest) const {
    constexpr float kSlack = 1e-5f;  // many times what rounding takes or adds
    const float least = 0x1p-126f + temperature_ * 0x1p-149f;  // the same of subnormal numbers
    const float to = farthest < kFarthest ? farthest : kFarthest;
    return {nearest * temperature_ * (1.0f - kSlack) - least,
            to * temperature_ * (1.0f + kSlack) + least};
  }

  // Of any logit.
  __device__ float distance(float logit) const { return (best_ - logit) / temperature_; }

  // Calls visit(id, distance) if the token is in the span.
  template <class Visit>
  __device__ __forceinline__ void if_within(const Span& span, unsigned id, float logit,
                                            Visit visit) const {
    if (is_within(span, logit)) visit(id, quotient(best_ - logit));
  }
  // The same for every token of this lane.
  template <class Visit>
  __device__ __forceinline__ void each(const Span& span, Visit visit) const {
    row.each_token([&](float logit) { return is_within(span, logit); },
                   [&](unsigned id, float logit) { if_within(span, id, logit, visit); });
  }

 private:
  __device__ __forceinline__ bool is_within(const Span& span, float logit) const {
    const float apart = best_ - logit;
    return (apart >= span.from) & (apart <= span.to);
  }
  // apart / temperature, to the bit. The second quotient is within an ulp, so its remainder is
  // exact, and with the nearest inverse the third is the nearest number (Markstein, 1990).
  __device__ __forceinline__ float quotient(float apart) const {
    if (!quick_) return apart / temperature_;
    const float first = apart * inverse_;
    const float second = __fmaf_rn(__fmaf_rn(-first, temperature_, apart), inverse_, first);
    return __fmaf_rn(__fmaf_rn(-second, temperature_, apart), inverse_, second);
  }

  const float best_, temperature_, inverse_;
  bool quick_;
};

// Measures are functors (id, distance) -> std::uint64_t, 0 for tokens outside of the span. The
// token at which their sum in the order of ids passes target_of(sum of all), which is below that
// sum: first the warp whose run of tokens holds it, then all threads share that run.
template <class Measure, class TargetOf>
__device__ unsigned token_at(const Tokens& tokens, const Span& span, Block& block, unsigned& found,
                             Measure measure, TargetOf target_of) {
  std::uint64_t mine = 0;
  const auto add = [&](unsigned id, float distance) { mine += measure(id, distance); };
  tokens.each(span, add);
  const Block::Sums of_runs = block.sums(mine);
  const std::uint64_t target = target_of(of_runs.total);
  const Block::Holder holder = block.holder(of_runs, target);

  const Row& row = tokens.row;
  const unsigned end = row.last(holder.warp);
  const unsigned each = (row.run() + blockDim.x - 1) / blockDim.x;
  const unsigned first = row.first(holder.warp) + threadIdx.x * each;
  const unsigned last = first + each < end ? first + each : end;
  mine = 0;
#pragma unroll 1
  for (unsigned id = first; id < last; ++id) tokens.if_within(span, id, row.logits[id], add);
  std::uint64_t at = holder.before + block.sums(mine).before;
  if (target >= at && target - at < mine) {
    unsigned id = first;
#pragma unroll 1
    for (; id + 1 < last; ++id) {
      mine = 0;
      tokens.if_within(span, id, row.logits[id], add);
      if (target - at < mine) break;
      at += mine;
    }
    found = id;
  }
  __syncthreads();
  return found;
}

}  // namespace cuda
}  // namespace minserve
