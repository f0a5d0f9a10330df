// A block's histogram over rough odds: how many tokens, or how much weight, lies in each bin.
//
// A bin is 1/128 of an octave of odds, the first has the best token. Weights are counted in 16 bits
// of their mantissa, fewer where a row has more than 65,536 tokens, so one addition of 32 bits does
// for a token; from them follows, within a known error, where a sum of weights passes a limit.
//
// Bins lie in a ring of 64 octaves, of which a row needs 38. So odds may also be to another token
// than the best, which is not known before all have been seen.
#pragma once

#include "odds.cuh"

namespace minserve {
namespace cuda {

class OddsBins {
 public:
  static constexpr unsigned kOfOctave = 128, kOctaves = 38;    // 2**-38 weighs 1
  static constexpr unsigned kBins = kOfOctave * kOctaves + 2;  // those of 2**-38 and of the best
  static constexpr unsigned kWords = kOfOctave * 64;
  // Of the best to another token, at most, when all that are added weigh something beside that one.
  static constexpr float kMostOctavesBelow = 24.0f;

  struct Results {
    std::uint64_t before, after;
    unsigned first, last;
  };

  __device__ OddsBins(void* memory, std::int64_t vocab, Block& block, Results& results)
      : bins_(static_cast<unsigned*>(memory)),
        dropped_(bits_to_drop(vocab)),
        block_(block),
        results_(results) {}

  // Before any `add`, and before a barrier. Odds are to the best, until `set_best` says otherwise.
  __device__ void clear() {
    first_ = (kBestOdds - 1) >> kBinBits;
    scale_ = 1.0f;
    for (unsigned i = threadIdx.x; i < kWords / 4; i += blockDim.x) {
      reinterpret_cast<uint4*>(bins_)[i] = {0, 0, 0, 0};
    }
  }
  // Odds are to a token that is so many octaves below the best, up to kMostOctavesBelow. Before
  // `sum`.
  __device__ void set_best(float octaves) {
    first_ = (__float_as_uint(fast_exp2(octaves)) + kRough) >> kBinBits;
    scale_ = fast_exp2(-octaves);
  }
  // Of a token whose odds are `wanted`, for which they have to weigh something.
  template <bool kWeighs>
  __device__ __forceinline__ void add(unsigned odds, bool wanted) const {
    const unsigned below = odds - 1;  // so that 1 is in the octave below it
    // A number's mantissa with its leading one, less the bits to drop.
    const unsigned more = kWeighs ? __funnelshift_r(below << 9, 1, dropped_ + 9) : 1u;
    add_if(wanted, bins_, place(below >> kBinBits), more);
  }
  // After all `add`.
  template <bool kWeighs>
  __device__ void sum() {
    __syncthreads();
    std::uint64_t mine = 0;
    visit([&](unsigned bin) {
      mine += scaled<kWeighs>(bin);
      return true;
    });
    const Block::Sums sums = block_.sums(mine);
    before_ = sums.before;
    total_ = sums.total;
  }
  __device__ std::uint64_t total() const { return total_; }

  struct Range {
    Edges edges;                  // of odds to the best
    std::uint64_t before, after;  // the sums of the bins before the first, and up to the last
  };
  // The bins from the one in which the sum passes `from` to the one in which it reaches `to`; `to`
  // is at least 1, both are at most the total, `from` below it.
  template <bool kWeighs>
  __device__ Range range(std::uint64_t from, std::uint64_t to) const {
    std::uint64_t before = before_;
    visit([&](unsigned bin) {
      const std::uint64_t after = before + scaled<kWeighs>(bin);
      if (before <= from && from < after) {
        results_.first = bin;
        results_.before = before;
      }
      if (before < to && to <= after) {
        results_.last = bin;
        results_.after = after;
      }
      before = after;
      return after < to;
    });
    __syncthreads();
    const unsigned best = bits_above(results_.first), least = bits_above(results_.last + 1);
    const unsigned listed = max(least, kLeastOdds + kRough) - kRough - 1;
    // The last bin may have none but tokens that weigh nothing: then nothing lies between.
    return {{max(min(best, kBestOdds) + kRough, listed), listed}, results_.before, results_.after};
  }
  // The bins in which the sum of weights passes this share of the total.
  __device__ Range range_of(double share) const {
    const auto most = static_cast<std::int64_t>(total_);
    const double wanted = share * static_cast<double>(most);
    // Twice what counting drops of a mantissa of 24 bits; rough odds are off by 1.4e-5 at most.
    // Were this too little, the cut would not be on the list, and the row be drawn in another way.
    const double error = static_cast<double>(1u << dropped_) * 0x1p-22;
    const auto from = static_cast<std::int64_t>(wanted * (1.0 - error));
    const auto to = static_cast<std::int64_t>(wanted * (1.0 + error)) + 1;
    return range<true>(static_cast<std::uint64_t>(from < most ? from : most - 1),
                       static_cast<std::uint64_t>(to < most ? to : most));
  }

 private:
  static constexpr unsigned kBinBits = 16;  // of a mantissa's 23, 128 bins are 7
  // Of mantissas, so that the sum of so many fits 32 bits.
  __device__ static unsigned bits_to_drop(std::int64_t vocab) {
    unsigned bits = 8;
    while (vocab > std::int64_t{1} << (bits + 8)) ++bits;
    return bits;
  }
  __device__ __forceinline__ static unsigned place(unsigned number) { return number % kWords; }
  // In the ring they lie in the order of their odds, the best one's last.
  __device__ unsigned of(unsigned bin) const { return bins_[place(first_ - bin)]; }
  // The odds, to the best, that those of a bin are not above.
  __device__ unsigned bits_above(unsigned bin) const {
    return __float_as_uint(__uint_as_float((first_ + 1 - bin) << kBinBits) * scale_);
  }
  // In one unit for all bins; what this drops is less than one part in 2**39 of the total, a bin.
  template <bool kWeighs>
  __device__ std::uint64_t scaled(unsigned bin) const {
    const unsigned octaves = first_ / kOfOctave - (first_ - bin) / kOfOctave;
    return kWeighs ? (static_cast<std::uint64_t>(of(bin)) << 24) >> octaves : of(bin);
  }
  // Threads take equal runs of the bins, of an odd length, as long as visit(bin) says so.
  template <class Visit>
  __device__ __forceinline__ void visit(Visit visit) const {
    const unsigned each = (kBins + blockDim.x - 1) / blockDim.x | 1;
    const unsigned first = threadIdx.x * each, end = min(first + each, kBins);
#pragma unroll 1
    for (unsigned bin = first; bin < end; ++bin) {
      if (!visit(bin)) break;
    }
  }

  unsigned* const bins_;
  const unsigned dropped_;
  Block& block_;
  Results& results_;
  unsigned first_;  // the number of the best one's bin, a bin's odds without their lower bits
  float scale_;     // from the odds that are counted to those to the best
  std::uint64_t before_ = 0, total_ = 0;
};

}  // namespace cuda
}  // namespace minserve
