// A block's histogram over rough scaled probabilities: how many tokens, or how much weight, lies in
// each bin.
//
// A bin is 1/128 of an octave of scaled probabilities, one of the first two has the best token.
// Weights are counted in 16 bits of their mantissa, fewer where a row has more than 65,536 tokens,
// so one addition of 32 bits does for a token; from them follows, within a known error, where a sum
// of weights passes a limit.
//
// Bins lie in a ring of 64 octaves, of which a row needs 38. So scaled probabilities may also be
// relative to another token than the best, which is not known before all have been seen.
#pragma once

#include "scaled_probs.cuh"

namespace minserve {
namespace cuda {

struct HistogramResults {
  std::uint64_t up_to_last;
  unsigned first, last;
};

template <unsigned kThreads>
class ScaledProbHistogram {
 public:
  static constexpr unsigned kOfOctave = 128;
  static constexpr unsigned kWords = kOfOctave * 64;  // of the ring
  // 2**-38 weighs 1; its bin, that of the best, and up to three at either end: fours are looked at.
  static constexpr unsigned kBins = (kOfOctave * 38 + 2 + 3 + 3) / 4 * 4;
  // Of the best to another token, when all that weigh something beside the best are added.
  static constexpr float kMostOctavesBelow = 24.0f, kLeastOctavesBelow = -0.5f;

  __device__ ScaledProbHistogram(void* memory, std::int64_t vocab, Block& block,
                                 HistogramResults& results)
      : bins_(static_cast<unsigned*>(memory)),
        dropped_(bits_to_drop(static_cast<unsigned>(vocab))),
        block_(block),
        results_(results) {}

  // Before any `add`, and before a barrier. Scaled probabilities are relative to the best, until
  // `set_best` says otherwise.
  __device__ void clear() {
    first_ = kBestScaledProb >> kBinBits;
    scale_ = 1.0f;
    for (unsigned i = threadIdx.x; i < kWords / 4; i += kThreads) {
      reinterpret_cast<uint4*>(bins_)[i] = {0, 0, 0, 0};
    }
  }
  // Scaled probabilities are relative to what is so many octaves below the best, between kLeast-
  // and kMostOctavesBelow. Before `sum`.
  __device__ void set_best(float octaves) {
    first_ = (__float_as_uint(fast_exp2(octaves)) + kRough) >> kBinBits;
    scale_ = fast_exp2(-octaves);
  }
  // Of tokens that a thread has side by side, those that may weigh something. A warp's lanes call
  // this together.
  template <bool kByWeight, unsigned kTokens>
  __device__ __forceinline__ void add(const unsigned (&scaled_prob)[kTokens]) const {
    bool all = true;
#pragma unroll
    for (unsigned odd : scaled_prob) all &= odd >= kLeastCounted;
    if (__all_sync(kAll, all)) {  // one branch for all instead of one for each
#pragma unroll
      for (unsigned odd : scaled_prob) add_shared(bins_, bytes_of(odd), more<kByWeight>(odd));
    } else {
#pragma unroll
      for (unsigned odd : scaled_prob) add<kByWeight>(odd, odd >= kLeastCounted);
    }
  }
  // Of a token whose scaled probability is `wanted`, which has to weigh something.
  template <bool kByWeight>
  __device__ __forceinline__ void add(unsigned scaled_prob, bool wanted) const {
    add_shared_if(wanted, bins_, bytes_of(scaled_prob), more<kByWeight>(scaled_prob));
  }
  // After all `add`, and a barrier.
  template <bool kByWeight>
  __device__ __forceinline__ void sum() {
    const unsigned first = threadIdx.x * kEach, number = above_best() - first;
#pragma unroll
    for (unsigned i = 0; i < kEach; i += 4) {  // all asked for at once
      uint4 bins = {0, 0, 0, 0};
      if (first + i < kBins) {
        bins = reinterpret_cast<const uint4*>(bins_)[(number - i) % kWords / 4];
      }
      mine_[i] = bins.w, mine_[i + 1] = bins.z, mine_[i + 2] = bins.y, mine_[i + 3] = bins.x;
    }
    Sum own(*this);
#pragma unroll
    for (unsigned i = 0; i < kEach; ++i) own.add(mine_[i], i);
    own_ = own.template scaled<kByWeight>();
    Block::Totals totals[1];
    block_.totals({own_}, totals);
    before_warp_ = block_.before_warp(totals[0]);
    of_warp_ = block_.of_warp(totals[0]);
    total_ = totals[0].total;
  }
  __device__ std::uint64_t total() const { return total_; }

  struct Range {
    Edges edges;               // of scaled probabilities
    std::uint64_t up_to_last;  // the sum of the bins up to the last
  };
  // The bins from the one in which the sum passes `from` to the one in which it reaches `to`; `to`
  // is at least 1, both are at most the total, `from` below it.
  template <bool kByWeight>
  __device__ __forceinline__ Range range(std::uint64_t from, std::uint64_t to) const {
    if (before_warp_ < to && from < before_warp_ + of_warp_) {  // which few are
      const std::uint64_t before = before_warp_ + sum_so_far(own_) - own_;
      unsigned passed = 0, unreached = 0;
      std::uint64_t sum = 0, reached = 0;
      Sum own(*this);
#pragma unroll
      for (unsigned i = 0; i < kEach; ++i) {
        own.add(mine_[i], i);
        sum = before + own.template scaled<kByWeight>();
        passed += sum <= from;
        if (sum < to) ++unreached;
        if (unreached == i) reached = sum;
      }
      if (before <= from && from < sum) results_.first = threadIdx.x * kEach + passed;
      if (before < to && to <= sum) {
        results_.last = threadIdx.x * kEach + unreached;
        results_.up_to_last = reached;
      }
    }
    __syncthreads();
    const unsigned best = bits_above(results_.first), least = bits_above(results_.last + 1);
    const unsigned listed = max(least, kLeastScaledProb + kRough) - kRough - 1;
    // The last bin may have none but tokens that weigh nothing: then nothing lies between.
    return {{max(min(best, kBestScaledProb) + kRough, listed), listed}, results_.up_to_last};
  }
  // The bins in which the sum of weights passes this share of the total. A token's weight is off by
  // what counting drops of its mantissa, and rough scaled probabilities by 1.4e-5. The sums above
  // and below a cut are each off by no more than that part of themselves, so the share of what is
  // above is off by no more than 2 * share * (1 - share) of it. Beside that sums are rounded, and a
  // weight is a whole number: a token loses up to 2**-38 of the best one's.
  __device__ Range range_of(double share) const {
    const auto most = static_cast<std::int64_t>(total_);
    const auto total = static_cast<double>(most);
    const double of_token = static_cast<double>(1u << dropped_) * 0x1p-23 + 1.4e-5;
    const double rounded = 0x1p-25 + static_cast<double>(1u << dropped_) * 0x1p-30;
    const double off = 2.0 * share * (1.0 - share) * of_token + rounded;
    const auto from = static_cast<std::int64_t>(fmax((share - off) * total, 0.0));
    const auto to = static_cast<std::int64_t>((share + off) * total) + 1;
    return range<true>(static_cast<std::uint64_t>(from < most ? from : most - 1),
                       static_cast<std::uint64_t>(to < most ? to : most));
  }

 private:
  static constexpr unsigned kBinBits = 16;  // of a mantissa's 23, 128 bins are 7
  // Threads take equal runs of the bins, in fours: 12 of 512 threads and 20 of 256, so that eight
  // lanes, which shared memory serves at once, read from all banks.
  static constexpr unsigned kEach = ((kBins + kThreads - 1) / kThreads + 3) / 4 * 4;
  // Scaled probabilities may be relative to something above the best, and are rough.
  static constexpr unsigned kLeastCounted = kLeastScaledProb - (1u << 23);

  // Of mantissas, so that the sum of so many fits 32 bits.
  __device__ static unsigned bits_to_drop(unsigned vocab) {
    const auto bits_of_count = static_cast<unsigned>(32 - __clz(static_cast<int>(vocab - 1)));
    return max(bits_of_count, 16u) - 8;
  }
  // A number's mantissa with its leading one, less the bits to drop; or one for each.
  template <bool kByWeight>
  __device__ __forceinline__ unsigned more(unsigned scaled_prob) const {
    return kByWeight ? __funnelshift_r(scaled_prob << 9, 1, dropped_ + 9) : 1u;
  }
  // In the ring bins lie in the order of their scaled probabilities, the best one's last.
  __device__ __forceinline__ static unsigned bytes_of(unsigned scaled_prob) {
    return (scaled_prob & ((kWords - 1) << kBinBits)) >> (kBinBits - 2);
  }
  // The number of the first bin that is looked at, from which on fours of them are aligned.
  __device__ __forceinline__ unsigned above_best() const { return first_ | 3; }
  // The scaled probability, relative to the best, that those of a bin are not above.
  __device__ unsigned bits_above(unsigned bin) const {
    return __float_as_uint(__uint_as_float((above_best() + 1 - bin) << kBinBits) * scale_);
  }
  // Of the first of this thread's bins, which lie in one octave or in two.
  class Sum {
   public:
    __device__ __forceinline__ explicit Sum(const ScaledProbHistogram& bins)
        : number_(bins.above_best() - threadIdx.x * kEach),
          octaves_(bins.above_best() / kOfOctave - number_ / kOfOctave) {}

    __device__ __forceinline__ void add(unsigned bin, unsigned i) {
      (number_ % kOfOctave < i ? of_next_ : of_first_) += bin;
    }
    // In one unit for all octaves. It drops less than two units, which of all threads together are
    // 2**-27 of the total at most: little beside the error in range_of().
    template <bool kByWeight>
    __device__ __forceinline__ std::uint64_t scaled() const {
      if (!kByWeight) return of_first_ + of_next_;
      return ((static_cast<std::uint64_t>(of_first_) << 24) >> octaves_) +
             ((static_cast<std::uint64_t>(of_next_) << 24) >> (octaves_ + 1));
    }

   private:
    const unsigned number_, octaves_;      // of the first bin; below the best one's
    unsigned of_first_ = 0, of_next_ = 0;  // of all bins together less than 2**32
  };
  static_assert(kEach <= kOfOctave, "of more octaves than two");

  unsigned* const bins_;
  const unsigned dropped_;
  Block& block_;
  HistogramResults& results_;
  unsigned first_;  // the number of the best one's bin, a bin's scaled probability without its
                    // lower bits
  float scale_;     // from the scaled probabilities that are counted to those relative to the best
  unsigned mine_[kEach];
  // Sums of this thread's bins, of its warp's, of the warps' before it and of all.
  std::uint64_t own_ = 0, of_warp_ = 0, before_warp_ = 0, total_ = 0;
};

}  // namespace cuda
}  // namespace minserve
