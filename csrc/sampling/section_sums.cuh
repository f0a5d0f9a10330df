// A block's row in sections (rejection.h): warps weigh them, one at a time, and find the tokens
// that numbers pick from them.
#pragma once

#include "../core/reduce/argmax_key.cuh"
#include "scaled_probs.cuh"
#include "rejection.h"

namespace minserve {
namespace cuda {

constexpr unsigned kSectionTokens = static_cast<unsigned>(kSection);
constexpr unsigned kMostSections = static_cast<unsigned>(kMostRejectionVocab / kSection);
constexpr unsigned kFoursOfLane = kSectionTokens / kStride;
static_assert(kSectionTokens % kStride == 0, "lanes have whole fours of a section");
using LaneFours = float4[kFoursOfLane];  // a section's, that a warp's lanes take side by side

struct Sections {
  float best[kMostSections];
  std::uint64_t sums[kMostSections];  // of the weights beside that
};

// A section as a warp weighs it. For all: x are the lanes' logits.
class SectionSum {
 public:
  __device__ __forceinline__ SectionSum(const LaneFours& x, float octaves) : octaves_(octaves) {
    float best = kImpossible;
#pragma unroll
    for (const float4& four : x) {
      best = max_or_nan(best, max_or_nan(max_or_nan(four.x, four.y), max_or_nan(four.z, four.w)));
    }
    best_ = logit_of(most_of_warp(order_of(best + 0.0f)));  // no -0, as ArgmaxKey has it
    // Nothing is as good as what is impossible, so that its own tokens weigh nothing.
    beside_ = best_ > kImpossible ? best_ : 0.0f;
  }

  __device__ float best() const { return best_; }
  // What tokens are weighed beside.
  __device__ float beside() const { return beside_; }
  // Of four of a lane's tokens; their scaled probabilities relative to the section's best.
  __device__ __forceinline__ void add(const float4& x, float (&scaled_prob)[kTogether]) {
    const float logits[] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (unsigned i = 0; i < kTogether; ++i) {
      scaled_prob[i] = fast_exp2((logits[i] - beside_) * octaves_);
      sum_.add(ScaledProbSum::term(scaled_prob[i]));
    }
  }
  // The section's, when all fours of all lanes are added.
  __device__ __forceinline__ std::uint64_t sum() const { return long_sum_of_warp(sum_.sum()); }

 private:
  const float octaves_;
  float best_, beside_;
  ScaledProbSum sum_;
};

// Finds tokens of a block's piece of a row by numbers; a warp calls all of this. Its lanes have
// neighbouring sections each.
class SectionSampler {
 public:
  // best: the row's. base: the id of the piece's first token.
  __device__ __forceinline__ SectionSampler(const Row& piece, unsigned base, float best,
                                            float octaves, const Sections& sections)
      : piece_(piece), base_(base), best_(best), octaves_(octaves), sections_(sections) {
    const unsigned count = (piece.vocab + kSectionTokens - 1) / kSectionTokens;
    const unsigned each = (count + kWarp - 1) / kWarp, lane = threadIdx.x % kWarp;
    first_ = min(lane * each, count), last_ = min(first_ + each, count);
    for (unsigned s = first_; s < last_; ++s) mine_ += weight_of_section(s);
    so_far_ = sum_so_far(mine_);
  }

  // What the piece weighs.
  __device__ std::uint64_t weight() const {
    return __shfl_sync(kAll, so_far_, static_cast<int>(kWarp - 1));
  }

  struct Found {
    unsigned id;
    float logit;
  };
  // The token that a number finds in a row of this weight, where pieces before this one weigh so
  // much. False where it lies in another piece.
  __device__ __forceinline__ bool find(double number, std::uint64_t before, std::uint64_t total,
                                       Found& found) const {
    const std::uint64_t target = sampled_weight(number, total);
    std::uint64_t sum = before + so_far_ - mine_;
    const bool holds = target >= sum && target - sum < mine_;
    const unsigned holders = __ballot_sync(kAll, holds);
    if (holders == 0) return false;
    unsigned section = first_;
    std::uint64_t weight = 0;
    if (holds) {
      while (target - sum >= (weight = weight_of_section(section))) sum += weight, ++section;
    }
    const int holder = __ffs(static_cast<int>(holders)) - 1;
    section = __shfl_sync(kAll, section, holder);
    sum = __shfl_sync(kAll, sum, holder);
    weight = __shfl_sync(kAll, weight, holder);
    found =
        token_of(section, sampled_of_section(number, total, sum, weight, sections_.sums[section]));
    return true;
  }

 private:
  __device__ __forceinline__ std::uint64_t weight_of_section(unsigned s) const {
    return section_weight(sections_.sums[s], fast_exp2((sections_.best[s] - best_) * octaves_));
  }
  // The first token at which the sum passes a target: among 16 neighbours that a lane sums up, of
  // which lanes then have one each.
  __device__ __forceinline__ Found token_of(unsigned section, std::uint64_t target) const {
    constexpr unsigned kOfLane = kFoursOfLane * kTogether;
    const unsigned lane = threadIdx.x % kWarp, first = section * kSectionTokens + lane * kOfLane;
    const float best = sections_.best[section];
    const auto scaled_prob = [&](float logit) { return fast_exp2((logit - best) * octaves_); };
    ScaledProbSum of_lane;
#pragma unroll
    for (unsigned i = 0; i < kOfLane; i += kTogether) {
      const float4 x = piece_.four(first + i);
      of_lane.add(ScaledProbSum::term(scaled_prob(x.x)));
      of_lane.add(ScaledProbSum::term(scaled_prob(x.y)));
      of_lane.add(ScaledProbSum::term(scaled_prob(x.z)));
      of_lane.add(ScaledProbSum::term(scaled_prob(x.w)));
    }
    const std::uint64_t so_far = sum_so_far(of_lane.sum());
    const int holder = first_lane(so_far > target);
    target -= __shfl_sync(kAll, so_far - of_lane.sum(), holder);
    const unsigned at = __shfl_sync(kAll, first, holder) + lane;
    const bool is_one = lane < kOfLane && at < piece_.vocab;
    const float logit = is_one ? piece_.logits[at] : kImpossible;
    const std::uint64_t weight = is_one ? whole(weight_of_scaled_prob(scaled_prob(logit))) : 0;
    const int found = first_lane(sum_so_far(weight) > target);
    return {__shfl_sync(kAll, base_ + at, found), __shfl_sync(kAll, logit, found)};
  }
  // Of a warp, where it is so; there is one.
  __device__ __forceinline__ static int first_lane(bool so) {
    return __ffs(static_cast<int>(__ballot_sync(kAll, so))) - 1;
  }

  const Row& piece_;
  const unsigned base_;
  const float best_, octaves_;
  const Sections& sections_;
  unsigned first_, last_;
  std::uint64_t mine_ = 0, so_far_;
};

}  // namespace cuda
}  // namespace minserve
