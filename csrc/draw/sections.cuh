// A block's row in sections (tries.h): warps weigh them, one at a time, and find the tokens that
// numbers draw from them.
#pragma once

#include "../common/best.cuh"
#include "../common/row.cuh"
#include "tries.h"

namespace minserve {
namespace cuda {

constexpr unsigned kSectionTokens = static_cast<unsigned>(kSection);
constexpr unsigned kMostSections = static_cast<unsigned>(kMostTried / kSection);
constexpr unsigned kFoursOfLane = kSectionTokens / kStride;
using LaneFours = float4[kFoursOfLane];  // a section's, that a warp's lanes take side by side

struct Sections {
  float best[kMostSections];
  std::uint64_t units[kMostSections];
};

// A section as a warp weighs it. For all: x are the lanes' logits.
class SectionUnits {
 public:
  __device__ __forceinline__ SectionUnits(const LaneFours& x, float octaves) : octaves_(octaves) {
    float best = kImpossible;
#pragma unroll
    for (const float4& four : x) {
      best = max_or_nan(best, max_or_nan(max_or_nan(four.x, four.y), max_or_nan(four.z, four.w)));
    }
    best_ = logit_of(most_of_warp(order_of(best + 0.0f)));  // no -0, as BestKey has it
    // Nothing is as good as what is impossible, so that its own tokens weigh nothing.
    beside_ = best_ > kImpossible ? best_ : 0.0f;
  }

  __device__ float best() const { return best_; }
  // What tokens are weighed beside.
  __device__ float beside() const { return beside_; }
  // Of four of a lane's tokens; their odds to the section's best.
  __device__ __forceinline__ void add(const float4& x, float (&odds)[kTogether]) {
    const float logits[] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (unsigned i = 0; i < kTogether; ++i) {
      odds[i] = fast_exp2((logits[i] - beside_) * octaves_);
      raised_ += __float_as_uint(1.0f + odds[i]);
    }
  }
  // The section's, when all fours of all lanes are added.
  __device__ __forceinline__ std::uint64_t sum() const {
    const unsigned mine = raised_ - kFoursOfLane * kTogether * kBitsOfOne;  // below 2**28
    return (static_cast<std::uint64_t>(sum_of_warp(mine >> 16)) << 16) +
           sum_of_warp(mine & 0xffffu);
  }

 private:
  const float octaves_;
  float best_, beside_;
  unsigned raised_ = 0;
};

// Finds tokens of a block's piece of a row by numbers; a warp calls all of this. Its lanes have
// neighbouring sections each.
class SectionDraw {
 public:
  // best: the row's. base: the id of the piece's first token.
  __device__ __forceinline__ SectionDraw(const Row& piece, unsigned base, float best, float octaves,
                                         const Sections& sections)
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
    const std::uint64_t target = drawn_weight(number, total);
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
    found = token_of(section, drawn_unit(number, total, sum, weight, sections_.units[section]));
    return true;
  }

 private:
  __device__ __forceinline__ std::uint64_t weight_of_section(unsigned s) const {
    return section_weight(sections_.units[s], fast_exp2((sections_.best[s] - best_) * octaves_));
  }
  // Lanes have neighbouring tokens.
  __device__ __forceinline__ Found token_of(unsigned section, std::uint64_t unit) const {
    constexpr unsigned kOfLane = kFoursOfLane * kTogether;
    const float best = sections_.best[section];
    const unsigned first = section * kSectionTokens + threadIdx.x % kWarp * kOfLane;
    float logits[kOfLane];
    unsigned units[kOfLane], mine = 0;
#pragma unroll
    for (unsigned i = 0; i < kOfLane; i += kTogether) {
      const float4 x = piece_.four(first + i);
      logits[i] = x.x, logits[i + 1] = x.y, logits[i + 2] = x.z, logits[i + 3] = x.w;
    }
#pragma unroll
    for (unsigned i = 0; i < kOfLane; ++i) {
      const float odds = fast_exp2((logits[i] - best) * octaves_);
      mine += units[i] = __float_as_uint(1.0f + odds) - kBitsOfOne;
    }
    const std::uint64_t so_far = sum_so_far(mine);
    std::uint64_t left = unit - (so_far - mine);
    const bool holds = unit >= so_far - mine && left < mine;
    unsigned at = 0;
    float logit = logits[0];
#pragma unroll
    for (unsigned i = 0; i + 1 < kOfLane; ++i) {
      if (at == i && left >= units[i]) left -= units[i], at = i + 1, logit = logits[i + 1];
    }
    const int holder = __ffs(static_cast<int>(__ballot_sync(kAll, holds))) - 1;
    return {__shfl_sync(kAll, base_ + first + at, holder), __shfl_sync(kAll, logit, holder)};
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
