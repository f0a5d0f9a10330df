// A row's tokens by their odds: 2**-distance, 1 for the best one.
//
// Weights follow from odds exactly. Odds also order tokens nearly as distances do: ex2.approx is
// within two ulp, so of two tokens whose odds are more than kSlack ulp apart the one with the
// greater is the nearer. Only where odds are closer do distances have to be compared; such tokens
// are listed.
#pragma once

#include "fours.cuh"
#include "weigh.cuh"

namespace minserve {
namespace cuda {

// Odds are not negative, so their bits order them.
constexpr unsigned kBestOdds = 0x3f800000u;   // 1
constexpr unsigned kLeastOdds = 0x2c800000u;  // 2**-38, of which the weight is 1
constexpr unsigned kSlack = 8;
// Odds by way of another token than the best are so many ulp from these or less: of each of two
// exponents, together up to 64, a rounding is 2**-24 of it, which is 3e-6 of the odds, 45 ulp; the
// distance's own two make up to 54, and powers a few more.
constexpr unsigned kRough = 256;

// Of tokens by the bits of their odds: what is above `above` is within a cut, what is not above
// `listed` is not. Those between are listed, and compared by distance and id.
struct Edges {
  unsigned above = kLeastOdds - 1, listed = kLeastOdds - 1;  // all tokens that weigh anything
};

// A token that was listed: distance bits << 32 | id, and its weight.
struct Listed {
  std::uint64_t key, weight;
};

// A sum of the weights of up to kMostSummed tokens.
constexpr unsigned kMostSummed = 512;
class OddsSum {
 public:
  // With kWhole in both pieces, which is cheaper to take off from all together.
  __device__ __forceinline__ void add_raised(Weight weight) {
    high_ += weight.high;
    low_ += weight.low;
  }
  __device__ std::uint64_t sum(unsigned count) const {
    const unsigned raised = count * kRaised;
    return whole({high_ - raised, low_ - raised});
  }

 private:
  unsigned high_ = 0, low_ = 0;
};

// A block's row in memory. No thread has more than kMostSummed tokens of it.
class OddsRow {
 public:
  __device__ OddsRow(const Row& logits, const Distances& distances)
      : row_(logits), distances_(distances) {}

  // Calls visit(bits of odds) for this thread's tokens.
  template <class Visit>
  __device__ __forceinline__ void each_odds(Visit visit) const {
    each<false>([&](const float (&logits)[kTogether], unsigned) {
#pragma unroll
      for (unsigned i = 0; i < kTogether; ++i) visit(odds_of(logits[i]));
    });
  }
  // Sums of the weights of this thread's tokens, and a count.
  struct Sums {
    std::uint64_t all = 0, above = 0;
    unsigned count_above = 0;
  };
  enum Wanted { kAbove, kAboveAndAll, kAboveAndCount };
  // Calls list(Listed) for those between the edges.
  template <Wanted kWanted, class List>
  __device__ __forceinline__ Sums sums(const Edges& edges, List list) const {
    OddsSum all, above;
    Sums sums;
    unsigned count = 0;
    const unsigned between = edges.above - edges.listed;
    each<true>([&](const float (&logits)[kTogether], unsigned id) {
      unsigned bits[kTogether];
      bool any = false;
#pragma unroll
      for (unsigned i = 0; i < kTogether; ++i) {
        bits[i] = odds_of(logits[i]);
        any |= bits[i] - edges.listed - 1 < between;
        const Weight weight = raised_weight_of_odds(__uint_as_float(bits[i]));
        const bool is_above = bits[i] > edges.above;
        if (kWanted == kAboveAndAll) all.add_raised(weight);
        above.add_raised({is_above ? weight.high : kRaised, is_above ? weight.low : kRaised});
        if (kWanted == kAboveAndCount) sums.count_above += is_above;
      }
      count += kTogether;
      if (any) {
#pragma unroll
        for (unsigned i = 0; i < kTogether; ++i) {
          if (bits[i] > edges.listed && bits[i] <= edges.above) list(listed(id + i, logits[i]));
        }
      }
    });
    if (kWanted == kAboveAndAll) sums.all = all.sum(count);
    sums.above = above.sum(count);
    return sums;
  }
  // Calls list(Listed) for those with greater odds.
  template <class List>
  __device__ __forceinline__ void list_above(unsigned least, List list) const {
    each<true>([&](const float (&logits)[kTogether], unsigned id) {
      unsigned bits[kTogether];
      bool any = false;
#pragma unroll
      for (unsigned i = 0; i < kTogether; ++i) {
        bits[i] = odds_of(logits[i]);
        any |= bits[i] > least;
      }
      if (any) {
#pragma unroll
        for (unsigned i = 0; i < kTogether; ++i) {
          if (bits[i] > least) list(listed(id + i, logits[i]));
        }
      }
    });
  }

  __device__ __forceinline__ unsigned odds_of(float logit) const {
    return __float_as_uint(fast_exp2(-distances_(logit)));
  }
  __device__ __forceinline__ Listed listed(unsigned id, float logit) const {
    const std::uint64_t distance = __float_as_uint(distances_(logit));
    const float odds = __uint_as_float(odds_of(logit));
    return {distance << 32 | id, whole(weight_of_odds(odds))};
  }
  __device__ const Row& row() const { return row_; }

 private:
  template <bool kLast, class Visit>
  __device__ __forceinline__ void each(Visit visit) const {
    each_four<kLast>(row_, [](const float4(&)[kFoursAhead]) {}, visit);
  }

  const Row row_;
  const Distances distances_;
};

}  // namespace cuda
}  // namespace minserve
