// A row's tokens by their scaled probabilities: 2**-distance, a token's probability over that of
// the best one.
//
// Weights follow from scaled probabilities exactly. Scaled probabilities also order tokens nearly
// as distances do: ex2.approx is within two ulp, so of two tokens whose scaled probabilities are
// more than kSlack ulp apart the one with the greater is the nearer. Only where scaled
// probabilities are closer do distances have to be compared; such tokens are listed.
#pragma once

#include "coalesced_reader.cuh"
#include "weights.cuh"

namespace minserve {
namespace cuda {

// Scaled probabilities are not negative, so their bits order them.
constexpr unsigned kBestScaledProb = 0x3f800000u;   // 1
constexpr unsigned kLeastScaledProb = 0x2c800000u;  // 2**-38, of which the weight is 1
constexpr unsigned kSlack = 8;
// Scaled probabilities by way of another token than the best, or of two (a section's best, and what
// all are relative to meanwhile), are so many ulp from these or less. Exponents together are up to
// 64, of which a rounding is 2**-24, 3e-6 of the scaled probability or 45 ulp; there are two of
// them at most on the one that a section's tokens have beside its best, and one on each other. The
// distance's own two make up to 54; powers and products a few more: some 150. That attempts are
// kept or rejected without a further look relies on it.
constexpr unsigned kRough = 256;

// Of tokens by the bits of their scaled probabilities: what is above `above` is within a cut, what
// is not above `listed` is not. Those between are listed, and compared by distance and id.
struct Edges {
  unsigned above = kLeastScaledProb - 1,
           listed = kLeastScaledProb - 1;  // all tokens that weigh anything
};

// A token that was listed: distance bits << 32 | id, and its weight.
struct Listed {
  std::uint64_t key, weight;
};

// A sum of the weights of up to kMostSummed tokens. On GPUs that are quick with doubles it is one
// whose last place is what a weight of 1 is, so that adding scaled probabilities, rounded down,
// adds the weight; else there are sums of both pieces.
constexpr unsigned kMostSummed = 512;
template <bool kQuickDoubles>
class ScaledProbSumOf;

template <>
class ScaledProbSumOf<true> {
 public:
  using Term = double;

  // Of a float's bits, in three more bits of exponent; 0 becomes a number that weighs nothing.
  // (The GPU's own conversion takes the unit that powers of two do.)
  __device__ __forceinline__ static Term term(float scaled_prob) {
    const unsigned bits = __float_as_uint(scaled_prob);
    return __hiloint2double(static_cast<int>((bits >> 3) + ((1023u - 127u) << 20)),
                            static_cast<int>(bits << 29));
  }
  __device__ __forceinline__ void add(Term scaled_prob) { sum_ = __dadd_rd(sum_, scaled_prob); }
  __device__ __forceinline__ void add_if(bool wanted, Term scaled_prob) {
    if (wanted) add(scaled_prob);
  }
  __device__ __forceinline__ std::uint64_t sum() const {
    return static_cast<std::uint64_t>(__double_as_longlong(sum_) - __double_as_longlong(kNothing));
  }

 private:
  static constexpr double kNothing = 16384.0;  // 2**14: up to 2**15 the last place is 2**-38
  double sum_ = kNothing;
};

template <>
class ScaledProbSumOf<false> {
 public:
  using Term = Weight;  // raised, which is cheaper to take off from all together

  __device__ __forceinline__ static Term term(float scaled_prob) {
    return raised_weight_of_scaled_prob(scaled_prob);
  }
  __device__ __forceinline__ void add(Term weight) {
    high_ += weight.high;
    low_ += weight.low;
    ++count_;
  }
  __device__ __forceinline__ void add_if(bool wanted, Term weight) {
    add({wanted ? weight.high : kRaised, wanted ? weight.low : kRaised});
  }
  __device__ __forceinline__ std::uint64_t sum() const {
    const unsigned raised = count_ * kRaised;
    return whole({high_ - raised, low_ - raised});
  }

 private:
  unsigned high_ = 0, low_ = 0, count_ = 0;
};

// Half as many doubles as floats in a cycle, where others have a 32nd or a 64th.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ == 800 || __CUDA_ARCH__ == 900 || __CUDA_ARCH__ == 1000
using ScaledProbSum = ScaledProbSumOf<true>;
#else
using ScaledProbSum = ScaledProbSumOf<false>;
#endif

// A block's row in memory. No thread has more than kMostSummed tokens of it.
class ScaledProbRow {
 public:
  __device__ ScaledProbRow(const Row& logits, const Distances& distances)
      : row_(logits), distances_(distances) {}

  // Calls visit(bits of the scaled probability) for this thread's tokens.
  template <class Visit>
  __device__ __forceinline__ void each_scaled_prob(Visit visit) const {
    each<false>([&](const float (&logits)[kTogether], unsigned) {
#pragma unroll
      for (unsigned i = 0; i < kTogether; ++i) visit(scaled_prob_of(logits[i]));
    });
  }
  // Sums of the weights of this thread's tokens, and a count.
  struct Sums {
    std::uint64_t all = 0, above = 0;
    unsigned count_above = 0;
  };
  enum Wanted { kAbove, kAboveAndAll, kAboveAndCount };
  // Calls list(id, logit) for those between the edges.
  template <Wanted kWanted, class List>
  __device__ __forceinline__ Sums sums(const Edges& edges, List list) const {
    ScaledProbSum all, above;
    Sums sums;
    // Distances from the middle are rounded as those of its ends are, so none between is missed.
    const float highest = __uint_as_float(edges.above), lowest = __uint_as_float(edges.listed);
    const float middle = (highest + lowest) / 2;
    const float apart = edges.above > edges.listed ? max(highest - middle, middle - lowest) : -1.0f;
    each<true>([&](const float (&logits)[kTogether], unsigned id) {
      unsigned bits[kTogether];
      bool any = false;
#pragma unroll
      for (unsigned i = 0; i < kTogether; ++i) {
        bits[i] = scaled_prob_of(logits[i]);
        const float scaled_prob = __uint_as_float(bits[i]);
        any |= fabsf(scaled_prob - middle) <= apart;
        const ScaledProbSum::Term term = ScaledProbSum::term(scaled_prob);
        const bool is_above = bits[i] > edges.above;
        if (kWanted == kAboveAndAll) all.add(term);
        above.add_if(is_above, term);
        if (kWanted == kAboveAndCount) sums.count_above += is_above;
      }
      if (any) {
#pragma unroll
        for (unsigned i = 0; i < kTogether; ++i) {
          if (bits[i] > edges.listed && bits[i] <= edges.above) list(id + i, logits[i]);
        }
      }
    });
    if (kWanted == kAboveAndAll) sums.all = all.sum();
    sums.above = above.sum();
    return sums;
  }
  // Calls list(id, logit) for those with a greater scaled probability.
  template <class List>
  __device__ __forceinline__ void list_above(unsigned least, List list) const {
    each<true>([&](const float (&logits)[kTogether], unsigned id) {
      unsigned bits[kTogether];
      bool any = false;
#pragma unroll
      for (unsigned i = 0; i < kTogether; ++i) {
        bits[i] = scaled_prob_of(logits[i]);
        any |= bits[i] > least;
      }
      if (any) {
#pragma unroll
        for (unsigned i = 0; i < kTogether; ++i) {
          if (bits[i] > least) list(id + i, logits[i]);
        }
      }
    });
  }

  __device__ __forceinline__ unsigned scaled_prob_of(float logit) const {
    return __float_as_uint(fast_exp2(-distances_(logit)));
  }
  __device__ __forceinline__ Listed listed(unsigned id, float logit) const {
    const std::uint64_t distance = __float_as_uint(distances_(logit));
    const float scaled_prob = __uint_as_float(scaled_prob_of(logit));
    return {distance << 32 | id, whole(weight_of_scaled_prob(scaled_prob))};
  }
  // Sums of the weights of this thread's tokens: of those that rank before a key, and of all.
  struct Better {
    std::uint64_t weight = 0, all = 0;
  };
  __device__ __forceinline__ Better better_than(std::uint64_t key) const {
    Better better;
    each<true>([&](const float (&logits)[kTogether], unsigned id) {
#pragma unroll
      for (unsigned i = 0; i < kTogether; ++i) {
        const Listed one = listed(id + i, logits[i]);
        better.all += one.weight;
        better.weight += one.key < key ? one.weight : 0;
      }
    });
    return better;
  }
  __device__ const Row& row() const { return row_; }

 private:
  template <bool kAgain, class Visit>
  __device__ __forceinline__ void each(Visit visit) const {
    read_coalesced<kAgain>(row_, [](const float4(&)[kLoadsAhead]) {}, visit);
  }

  const Row row_;
  const Distances distances_;
};

}  // namespace cuda
}  // namespace minserve
