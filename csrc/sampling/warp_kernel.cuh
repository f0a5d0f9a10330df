// One warp samples the token of one row of a small vocabulary, which it holds in registers.
//
// The filters' cuts are found by halving the range of distances in which they lie, each time down
// to distances that tokens have: about as many rounds as the number of tokens has bits. Nothing is
// shared between warps and nothing waits for memory but the first reads, which go out together.
#pragma once

#include "../core/reduce/argmax_key.cuh"
#include "warp_row.cuh"
#include "weights.cuh"

namespace minserve {
namespace cuda {

// Lane l holds the tokens from l * kTokens on.
template <unsigned kTokens>
class RegisterRow {
 public:
  // Whether a lane's tokens begin at a whole four of them.
  static constexpr bool kWhole = kTokens % kTogether == 0;

  __device__ explicit RegisterRow(const Row& row) : first_(threadIdx.x % kWarp * kTokens) {
#pragma unroll
    for (unsigned i = 0; i < kTokens; i += kTogether) {
      const float4 x = row.four(first_ + i);
      const float four[kTogether] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (unsigned k = 0; k < kTogether; ++k) {
        if (i + k < kTokens) logits_[i + k] = four[k];
      }
    }
  }

  // NaN if there is one.
  __device__ float best() const {
    float best = logits_[0];
#pragma unroll
    for (unsigned i = 1; i < kTokens; ++i) best = max_or_nan(best, logits_[i]);
    return logit_of(most_of_warp(order_of(best)));
  }

  __device__ std::int32_t first_equal(float logit) const {
    unsigned id = 0xffffffffu;
#pragma unroll
    for (unsigned i = kTokens; i-- > 0;) id = logits_[i] == logit ? first_ + i : id;
    return static_cast<std::int32_t>(least_of_warp(id));
  }

  // What follows takes weights, which this finds.
  __device__ void find_weights(float best, float octaves) {
#pragma unroll
    for (unsigned i = 0; i < kTokens; ++i) {
      const float distance = (best - logits_[i]) * octaves;
      distances_[i] = __float_as_uint(distance);
      weights_[i] = weight_of(distance);
    }
  }
  __device__ void keep(const Cut& cut) {
#pragma unroll
    for (unsigned i = 0; i < kTokens; ++i) {
      if (cut.keeps(distances_[i], first_ + i)) continue;
      distances_[i] = 0xffffffffu;
      weights_[i] = {0, 0};
    }
  }

  // The last token before which the better ones sum to less than a limit, the sum being of weights
  // or of ones, and the limit limit_of(sum of all); those that weigh nothing are not looked at.
  template <bool kByWeight, class LimitOf>
  __device__ Cut cut(LimitOf limit_of) const {
    unsigned least = 0, most = __float_as_uint(kFarthest);  // the cut's distance is among these
    const std::uint64_t total = sum_up_to<kByWeight>(most);
    const std::uint64_t limit = limit_of(total);
    if (total <= limit) return Cut();
    std::uint64_t before = 0;  // the sum of those nearer than `least`
    while (least < most) {
      const unsigned middle = least + (most - least) / 2;
      const std::uint64_t sum = sum_up_to<kByWeight>(middle);
      unsigned below = 0, above = 0xffffffffu;
#pragma unroll
      for (unsigned i = 0; i < kTokens; ++i) {
        if (distances_[i] <= middle) {
          below = distances_[i] > below ? distances_[i] : below;
        } else {
          above = distances_[i] < above ? distances_[i] : above;
        }
      }
      below = most_of_warp(below), above = least_of_warp(above);
      if (sum >= limit) {
        most = below;
      } else {
        least = above;
        before = sum;
      }
    }
    return last_of_equals<kByWeight>(least, limit - before);
  }

  // The first token at which the sum of weights passes sampled_weight.
  __device__ std::int32_t sampled(double number) const {
    std::uint64_t mine = 0;
#pragma unroll
    for (unsigned i = 0; i < kTokens; ++i) mine += whole(weights_[i]);
    const std::uint64_t so_far = sum_so_far(mine);
    const std::uint64_t total = __shfl_sync(kAll, so_far, static_cast<int>(kWarp - 1));
    const std::uint64_t target = sampled_weight(number, total);
    std::uint64_t sum = so_far - mine;
    unsigned id = first_;
#pragma unroll
    for (unsigned i = 0; i < kTokens; ++i) {
      sum += whole(weights_[i]);
      id += sum <= target;
    }
    // Lanes before the token's end with the next lane's first, those after it with their own.
    const unsigned reached = so_far > target ? id : 0xffffffffu;
    return static_cast<std::int32_t>(least_of_warp(reached));
  }

 private:
  template <bool kByWeight>
  __device__ std::uint64_t sum_up_to(unsigned distance) const {
    Weight sum = {0, 0};
#pragma unroll
    for (unsigned i = 0; i < kTokens; ++i) {
      if (distances_[i] > distance) continue;
      sum.high += kByWeight ? weights_[i].high : 0;
      sum.low += kByWeight ? weights_[i].low : 1;
    }
    if (!kByWeight) return sum_of_warp(sum.low);
    return long_sum_of_warp(whole(sum));
  }

  // Of the tokens at this distance, those before which the others of them sum to less than `limit`.
  template <bool kByWeight>
  __device__ Cut last_of_equals(unsigned distance, std::uint64_t limit) const {
    unsigned mine = 0;
#pragma unroll
    for (unsigned i = 0; i < kTokens; ++i) mine += distances_[i] == distance;
    const unsigned equals = sum_of_warp(mine);
    if (equals == 1) return {distance, 0xffffffffu};
    const std::uint64_t each = kByWeight ? whole(weight_of(__uint_as_float(distance))) : 1;
    const std::uint64_t kept = (limit - 1) / each + 1;
    std::uint64_t before = sum_so_far(mine) - mine;
    unsigned last = 0;  // of those that are kept
#pragma unroll
    for (unsigned i = 0; i < kTokens; ++i) {
      if (distances_[i] != distance) continue;
      if (before < kept) last = first_ + i;
      ++before;
    }
    return {distance, most_of_warp(last)};
  }

  const unsigned first_;
  float logits_[kTokens];
  unsigned distances_[kTokens];  // their bits
  Weight weights_[kTokens];
};

// The row's token, or -1.
template <unsigned kTokens>
__device__ __forceinline__ std::int32_t small_token(RegisterRow<kTokens>& row, std::int64_t vocab,
                                                    const RowParameters& given, double number) {
  const float best = row.best();
  if (!(best - best == 0.0f)) return -1;  // NaN or infinite
  if (!(given.temperature > 0.0f)) return row.first_equal(best);
  row.find_weights(best, octaves_of(given.temperature));
  const bool has_top_k = given.top_k > 0 && given.top_k < vocab;
  if (has_top_k) {
    const auto limit = static_cast<std::uint64_t>(given.top_k);
    row.keep(row.template cut<false>([=](std::uint64_t) { return limit; }));
  }
  // Small vocabularies' sums are exact doubles, so top_p = 1 takes nothing away.
  if (given.top_p < 1.0) {
    row.keep(row.template cut<true>(
        [&](std::uint64_t total) { return nucleus_limit(given.top_p, total); }));
  }
  if (given.min_p > 0.0f) row.keep(min_p_cut(given.min_p));
  return row.sampled(number);
}

constexpr unsigned kWarpKernelThreads = 128;

template <unsigned kTokens>
__global__ void __launch_bounds__(kWarpKernelThreads)
    warp_kernel(const __grid_constant__ SampleArgs args) {
  const std::int64_t r =
      static_cast<std::int64_t>(blockIdx.x) * (kWarpKernelThreads / kWarp) + threadIdx.x / kWarp;
  pdl_launch_dependents();
  wait_for_previous_kernel();
  if (r >= args.rows) return;
  const float* const logits = args.logits + r * args.row_stride;
  const bool aligned = RegisterRow<kTokens>::kWhole && Row::is_aligned(logits);
  RegisterRow<kTokens> row({logits, static_cast<unsigned>(args.vocab), aligned});
  const RowParameters given(args, r);
  const WarpRow place(args, r);
  if (!args.is_active(r)) return;
  place.move_on(
      small_token(row, args.vocab, given, uniform_number(given.stream, place.position())));
}

}  // namespace cuda
}  // namespace minserve
