// Where top_k or top_p cut a row, without sorting it.
//
// Tokens rank by (distance, id); those are kept before which the better ones sum to less than a
// limit, the sum being of ones (top_k) or of weights (top_p). Which bin of a histogram over
// distances holds the last one that is kept, is known from the bins' sums; its tokens are listed,
// and looked at in the same way, until they are few enough to compare each with each. All sums are
// of integers, so their order does not matter.
//
// Every block of the cluster has a histogram and lists of its own tokens; each sums a part of the
// bins up over all of them.
#pragma once

#include "weights.cuh"

namespace minserve {
namespace cuda {

// A block of n threads has 2 n bins and lists of as many tokens.
struct SelectShared {
  static constexpr unsigned kFew = 256;

  std::uint64_t* few;    // kFew tokens of all blocks
  std::uint64_t* lists;  // two, of distance bits << 32 | id
  unsigned *low, *high;  // of the bins' sums

  static constexpr unsigned bytes(unsigned threads) {
    return kFew * sizeof(std::uint64_t) + threads * 3 * 2 * sizeof(std::uint64_t);
  }

  __device__ explicit SelectShared(void* memory) {
    const unsigned room = 2 * blockDim.x;
    few = static_cast<std::uint64_t*>(memory);
    lists = few + kFew;
    low = reinterpret_cast<unsigned*>(lists + 2 * room);
    high = low + room;
  }
};
struct SelectResults {
  std::uint64_t before, bin;
  std::uint64_t cut;  // its key
  unsigned listed, found;
};

// The limit on the sum before a kept token: known, or top_p of the sum of all.
struct Limit {
  std::uint64_t known;
  double top_p;
  bool has_top_k;
};

template <bool kByWeight, bool kStored>
class Selection {
 public:
  // Of tokens at most `farthest` away, beyond which none of a weight lies, and within `allowed`.
  __device__ Selection(const Tokens<kStored>& tokens, float farthest, Cut allowed, Cluster& cluster,
                       const SelectShared& shared, SelectResults& results)
      : tokens_(tokens), allowed_(allowed), cluster_(cluster), shared_(shared), results_(results) {
    most_ = to_ = __float_as_uint(farthest);
    // Less than all bins, so that rounding leads to none behind the last.
    scale_ = farthest > 1e-30f ? (static_cast<float>(bins()) - 0.5f) / farthest : 0.0f;
  }

  __device__ Cut cut(const Limit& limit) {
    std::uint64_t wanted = limit.known;
    for (bool first = true;; first = false) {
      const Bins bins = histogram();
      if (first && kByWeight) {
        if (!has_nucleus(limit.top_p, limit.has_top_k, bins.total)) return allowed_;
        wanted = nucleus_limit(limit.top_p, bins.total);
      }
      if (first && bins.total <= wanted) return allowed_;
      find_bin(bins, wanted);
      gather();
      if (on_list_ && size_ <= SelectShared::kFew) return last_of_few(wanted);
      if (least_ == most_) return last_of_equals(wanted);
      choose_shift();
    }
  }

 private:
  // Two neighbouring bins of this thread, those of all blocks together.
  struct Bins {
    unsigned first;  // number of the first
    std::uint64_t sums[2], before, total;
  };

  __device__ static unsigned bins() { return 2 * blockDim.x; }
  __device__ std::uint64_t* list(unsigned number) const { return shared_.lists + number * bins(); }
  __device__ static std::uint64_t measure(unsigned bits) {
    return kByWeight ? whole(weight_of(__uint_as_float(bits))) : 1;
  }
  __device__ __forceinline__ unsigned bin_of(unsigned bits) const {
    if (!linear_) return (bits - least_) >> shift_;
    return whole_part(__uint_as_float(bits) * scale_);
  }
  __device__ void choose_shift() {
    linear_ = false;
    for (shift_ = 0; (most_ - least_) >> shift_ >= bins();) ++shift_;
  }

  // Some tokens side by side; whether they are among those in which the cut is.
  template <unsigned kTokens>
  struct Some {
    unsigned bits[kTokens], first_id;
    bool within[kTokens];
  };
  // Calls visit(Some) for the tokens of this thread; not for those of which none is within.
  template <class Visit>
  __device__ __forceinline__ void each(Visit visit) const {
    if (on_list_) {
#pragma unroll 1
      for (unsigned i = threadIdx.x; i < mine_; i += blockDim.x) {
        const std::uint64_t key = list(list_)[i];
        visit(Some<1>{{static_cast<unsigned>(key >> 32)}, static_cast<unsigned>(key), {true}});
      }
      return;
    }
    const bool all = to_ < allowed_.distance;  // rather than those within `allowed`
    const unsigned wide = to_ - from_;
    tokens_.each([&](const Four& distances, unsigned id) {
      Some<kTogether> some;
      some.first_id = id;
      bool any = false;
#pragma unroll
      for (unsigned i = 0; i < kTogether; ++i) {
        some.bits[i] = __float_as_uint(distances[i]);
        some.within[i] = some.bits[i] - from_ <= wide;
        if (!all) some.within[i] &= allowed_.keeps(some.bits[i], id + i);
        any |= some.within[i];
      }
      if (any) visit(some);
    });
  }
  // Without branches, so that what one token waits for others do not.
  template <unsigned kTokens>
  __device__ __forceinline__ void put_in_bins(const Some<kTokens>& some) const {
    unsigned bins[kTokens], low[kTokens], high[kTokens];
#pragma unroll
    for (unsigned i = 0; i < kTokens; ++i) {
      bins[i] = some.within[i] ? bin_of(some.bits[i]) : 0;
      const Weight weight = kByWeight ? weight_of(__uint_as_float(some.bits[i])) : Weight{0, 1};
      low[i] = some.within[i] ? weight.high << 23 | weight.low : 0;
      high[i] = some.within[i] ? weight.high >> 9 : 0;
    }
    unsigned before[kTokens];
#pragma unroll
    for (unsigned i = 0; i < kTokens; ++i) {
      before[i] = low[i] ? atomicAdd(&shared_.low[bins[i]], low[i]) : 0;
    }
    if (kByWeight) {
#pragma unroll
      for (unsigned i = 0; i < kTokens; ++i) {
        high[i] += before[i] > ~low[i] ? 1 : 0;  // carried
        if (high[i]) atomicAdd(&shared_.high[bins[i]], high[i]);
      }
    }
  }

  __device__ Bins histogram() {
    for (unsigned i = threadIdx.x; i < bins(); i += blockDim.x)
      shared_.low[i] = shared_.high[i] = 0;
    if (threadIdx.x == 0) results_.listed = 0;
    __syncthreads();
    each([&](const auto& some) { put_in_bins(some); });
    cluster_.meet();
    // Blocks take equal runs of the bins, and threads pairs, while there are some.
    Bins mine = {};
    const unsigned run = bins() / cluster_.blocks();
    mine.first = cluster_.rank() * run + 2 * threadIdx.x;
    if (2 * threadIdx.x < run) {
#pragma unroll
      for (unsigned i = 0; i < 2; ++i) mine.sums[i] = bin_sum(mine.first + i);
    }
    const Cluster::Sums sums = cluster_.sums(mine.sums[0] + mine.sums[1]);
    mine.before = sums.before;
    mine.total = sums.total;
    return mine;
  }
  __device__ std::uint64_t bin_sum(unsigned bin) const {
    if (cluster_.blocks() == 1) return joined(shared_.low[bin], shared_.high[bin]);
    std::uint64_t sum = 0;
    for (unsigned b = 0; b < cluster_.blocks(); ++b) {
      sum += joined(load_from_block(b, shared_.low + bin), load_from_block(b, shared_.high + bin));
    }
    return sum;
  }
  __device__ static std::uint64_t joined(unsigned low, unsigned high) {
    return static_cast<std::uint64_t>(high) << 32 | low;
  }

  // The bin in which the sum, before_ and the bins so far, reaches what is wanted: one thread's.
  __device__ void find_bin(const Bins& bins_of_thread, std::uint64_t wanted) {
    std::uint64_t before = before_ + bins_of_thread.before;
    for (unsigned i = 0; i < 2; ++i) {
      const std::uint64_t sum = bins_of_thread.sums[i];
      if (before < wanted && wanted - before <= sum) {
        cluster_.tell(results_.before, before);
        cluster_.tell(results_.bin, bins_of_thread.first + i);
      }
      before += sum;
    }
    cluster_.meet();
    before_ = results_.before;
    bin_ = static_cast<unsigned>(results_.bin);
    if (!linear_) {
      from_ = least_ + (bin_ << shift_);
      to_ = min(most_, from_ + ((1u << shift_) - 1));
      return;
    }
    constexpr float kSlack = 1e-5f;  // many times what rounding takes or adds
    const float from = static_cast<float>(bin_) / scale_ * (1.0f - kSlack);
    const float to = static_cast<float>(bin_ + 1) / scale_ * (1.0f + kSlack);
    from_ = bin_ ? __float_as_uint(from) : 0;
    if (bin_ + 1 < bins()) to_ = min(to_, __float_as_uint(to));
  }

  // Lists the tokens of the bin, where there is room, and finds their least and greatest distance.
  __device__ void gather() {
    const unsigned to = on_list_ ? list_ ^ 1 : list_;
    Listed listed = {};
    each([&](const auto& some) {
      constexpr unsigned kTokens = sizeof some.within;
#pragma unroll
      for (unsigned i = 0; i < kTokens; ++i) {
        const unsigned bits = some.bits[i];
        if (!some.within[i] || bin_of(bits) != bin_) continue;
        listed.widen(bits, ~bits);
        const unsigned at = atomicAdd(&results_.listed, 1u);
        if (at < bins()) list(to)[at] = joined(some.first_id + i, bits);
      }
    });
    const std::uint64_t ends =
        cluster_.block.all(joined(listed.inverted_most, listed.least), ~std::uint64_t{0},
                           [](std::uint64_t x, std::uint64_t y) {
                             Listed all = {};
                             all.widen(static_cast<unsigned>(x >> 32), static_cast<unsigned>(x));
                             all.widen(static_cast<unsigned>(y >> 32), static_cast<unsigned>(y));
                             return joined(all.inverted_most, all.least);
                           });
    listed.least = static_cast<unsigned>(ends >> 32);
    listed.inverted_most = static_cast<unsigned>(ends);
    listed.size = mine_ = results_.listed;
    Listed all = {};
    unsigned largest = 0;
    place_ = 0;
    cluster_.each(listed, [&](unsigned b, const Listed& said) {
      all.widen(said.least, said.inverted_most);
      if (b < cluster_.rank()) place_ += said.size;
      all.size += said.size;
      largest = max(largest, said.size);
    });
    least_ = from_ = all.least;
    most_ = to_ = ~all.inverted_most;
    size_ = all.size;
    on_list_ = largest <= bins();
    list_ = to;
    __syncthreads();  // `listed` is set to 0 again
  }
  struct Listed {
    unsigned least = ~0u, inverted_most = ~0u;
    unsigned size = 0, unused = 0;

    __device__ void widen(unsigned other_least, unsigned other_inverted_most) {
      least = min(least, other_least);
      inverted_most = min(inverted_most, other_inverted_most);
    }
  };

  // Of few tokens: each warp sums those that rank before one, for one after the other.
  __device__ Cut last_of_few(std::uint64_t wanted) {
    const Block& block = cluster_.block;
    constexpr unsigned kOfLane = SelectShared::kFew / kWarp;
    for (unsigned i = threadIdx.x; i < mine_; i += blockDim.x) {
      cluster_.tell(shared_.few[place_ + i], list(list_)[i]);
    }
    cluster_.meet();
    std::uint64_t others[kOfLane], measures[kOfLane];
#pragma unroll
    for (unsigned i = 0; i < kOfLane; ++i) {
      if (i * kWarp >= size_) break;
      const unsigned at = i * kWarp + block.lane();
      others[i] = at < size_ ? shared_.few[at] : ~std::uint64_t{0};
      measures[i] = measure(static_cast<unsigned>(others[i] >> 32));
    }
    const unsigned warps = block.warps() * cluster_.blocks();
#pragma unroll 1
    for (unsigned at = cluster_.rank() * block.warps() + block.warp(); at < size_; at += warps) {
      const std::uint64_t key = shared_.few[at];
      std::uint64_t better = 0;
#pragma unroll
      for (unsigned i = 0; i < kOfLane; ++i) {
        if (i * kWarp >= size_) break;
        better += others[i] < key ? measures[i] : 0;
      }
      const std::uint64_t before = before_ + long_sum_of_warp(better);
      if (before < wanted && wanted - before <= measure(static_cast<unsigned>(key >> 32)) &&
          block.lane() == 0) {
        cluster_.tell(results_.cut, key);
      }
    }
    cluster_.meet();
    return told_cut();
  }
  __device__ Cut told_cut() const {
    return {static_cast<unsigned>(results_.cut >> 32), static_cast<unsigned>(results_.cut)};
  }

  // Of many tokens with one distance: the last id.
  __device__ Cut last_of_equals(std::uint64_t wanted) {
    const std::uint64_t skipped = (wanted - before_ - 1) / measure(least_);
    const unsigned last = allowed_.distance == least_ ? allowed_.id : ~0u;
    const unsigned id = token_at(tokens_, cluster_, results_.found, CountOfEquals({least_, last}),
                                 [&](std::uint64_t) { return skipped; });
    if (id != kElsewhere && threadIdx.x == 0) cluster_.tell(results_.cut, Cut{least_, id}.key());
    cluster_.meet();
    return told_cut();
  }

  const Tokens<kStored>& tokens_;
  const Cut allowed_;
  Cluster& cluster_;
  const SelectShared& shared_;
  SelectResults& results_;

  // The cut is among the tokens with these distances, before which better ones sum to before_.
  unsigned least_ = 0, most_;
  unsigned from_ = 0, to_;  // what each() visits of the row; a bin's has a little more
  std::uint64_t before_ = 0;
  bool linear_ = true;
  float scale_;
  unsigned shift_ = 0, bin_ = 0;
  // Whether they are all on lists; how many they are, of this block and of those before it.
  bool on_list_ = false;
  unsigned list_ = 0, size_ = 0, mine_ = 0, place_ = 0;
};

}  // namespace cuda
}  // namespace minserve
