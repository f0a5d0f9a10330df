// Where top_k or top_p cut a row, without sorting it.
//
// Tokens rank by (distance, id); those are kept before which the better ones sum to less than a
// limit, the sum being of ones (top_k) or of weights (top_p). Which bin of a histogram over
// distances holds the last one that is kept, is known from the bins' sums; its tokens are gathered,
// and looked at in the same way, until they are few enough to compare each with each. Of the others
// a subtraction and comparisons tell that they are not in the bin. All sums are of integers, so
// their order does not matter.
#pragma once

#include "weigh.cuh"

namespace minserve {
namespace cuda {

// A block of n threads has 2 n bins and lists of as many tokens.
struct SelectShared {
  std::uint64_t* lists;  // two, of distance bits << 32 | id
  unsigned *low, *high;  // of the bins' sums

  static constexpr unsigned kBytesPerThread = 3 * 2 * sizeof(std::uint64_t);

  __device__ explicit SelectShared(void* memory) {
    const unsigned room = 2 * blockDim.x;
    lists = static_cast<std::uint64_t*>(memory);
    low = reinterpret_cast<unsigned*>(lists + 2 * room);
    high = low + room;
  }
};
struct SelectResults {
  unsigned listed, bin;
  std::uint64_t before;
  Cut cut;
  unsigned found;
};

// The limit on the sum before a kept token: known, or top_p of the sum of all.
struct Limit {
  std::uint64_t known;
  double top_p;
  bool has_top_k;
};

template <bool kWeighs>
class Selection {
 public:
  __device__ Selection(const Tokens& tokens, float farthest, Cut allowed, Block& block,
                       const SelectShared& shared, SelectResults& results)
      : tokens_(tokens), allowed_(allowed), block_(block), shared_(shared), results_(results) {
    most_ = __float_as_uint(farthest);
    span_ = tokens.span(0.0f, farthest);
    scale_ = farthest > 1e-30f ? static_cast<float>(bins()) / farthest : 0.0f;
  }

  // The cut within the allowed tokens. farthest: no token of a weight lies further from the best.
  __device__ Cut cut(const Limit& limit) {
    std::uint64_t wanted = limit.known;
    for (bool first = true;; first = false) {
      const Block::Sums sums = histogram();
      if (first && kWeighs) {
        if (!has_nucleus(limit.top_p, limit.has_top_k, sums.total)) return allowed_;
        wanted = nucleus_limit(limit.top_p, sums.total);
      }
      if (first && sums.total <= wanted) return allowed_;
      find_bin(sums, wanted);
      gather();
      if (on_list_ && size_ <= kFew) return last_of_list(wanted);
      span_ = tokens_.span(__uint_as_float(least_), __uint_as_float(most_));
      if (least_ == most_) return last_of_equals(wanted);
      choose_shift();
    }
  }

 private:
  static constexpr unsigned kOfLane = 4, kFew = kOfLane * kWarp;

  __device__ static unsigned bins() { return 2 * blockDim.x; }
  __device__ std::uint64_t* list(unsigned number) const { return shared_.lists + number * bins(); }
  __device__ static std::uint64_t measure(float distance) {
    return kWeighs ? whole(weight_of(distance)) : 1;
  }
  __device__ __forceinline__ unsigned bin_of(unsigned bits) const {
    if (!linear_) return (bits - least_) >> shift_;
    return min(whole_part(__uint_as_float(bits) * scale_), bins() - 1);
  }
  __device__ void choose_shift() {
    linear_ = false;
    for (shift_ = 0; (most_ - least_) >> shift_ >= bins();) ++shift_;
  }

  // Calls visit(bits, id) for the tokens of this thread among which the cut is.
  template <class Visit>
  __device__ __forceinline__ void each(Visit visit) const {
    if (on_list_) {
#pragma unroll 1
      for (unsigned i = threadIdx.x; i < size_; i += blockDim.x) {
        const std::uint64_t key = list(list_)[i];
        visit(static_cast<unsigned>(key >> 32), static_cast<unsigned>(key));
      }
      return;
    }
    const Cut equals = {most_, 0xffffffffu};
    const Cut last = equals.key() < allowed_.key() ? equals : allowed_;
    tokens_.each(span_, [&](unsigned id, float distance) {
      const unsigned bits = __float_as_uint(distance);
      if (bits >= least_ && last.keeps(bits, id)) visit(bits, id);
    });
  }

  // Sums of this thread's two bins, and those before.
  __device__ Block::Sums histogram() {
    for (unsigned i = threadIdx.x; i < bins(); i += blockDim.x)
      shared_.low[i] = shared_.high[i] = 0;
    if (threadIdx.x == 0) results_.listed = 0;
    __syncthreads();
    each([&](unsigned bits, unsigned) {
      const unsigned bin = bin_of(bits);
      if (!kWeighs) {
        atomicAdd(&shared_.low[bin], 1u);
        return;
      }
      const std::uint64_t weight = measure(__uint_as_float(bits));
      const unsigned low = static_cast<unsigned>(weight);
      const unsigned carried = atomicAdd(&shared_.low[bin], low) > ~low ? 1 : 0;
      const unsigned high = static_cast<unsigned>(weight >> 32) + carried;
      if (high) atomicAdd(&shared_.high[bin], high);
    });
    __syncthreads();
    return block_.sums(bin_sum(2 * threadIdx.x) + bin_sum(2 * threadIdx.x + 1));
  }
  __device__ std::uint64_t bin_sum(unsigned bin) const {
    return static_cast<std::uint64_t>(shared_.high[bin]) << 32 | shared_.low[bin];
  }

  // The bin in which the sum, before_ and the bins so far, reaches what is wanted: one thread's.
  __device__ void find_bin(const Block::Sums& sums, std::uint64_t wanted) {
    std::uint64_t before = before_ + sums.before;
    for (unsigned bin = 2 * threadIdx.x; bin < 2 * threadIdx.x + 2; ++bin) {
      const std::uint64_t sum = bin_sum(bin);
      if (before < wanted && wanted - before <= sum) {
        results_.bin = bin;
        results_.before = before;
      }
      before += sum;
    }
    __syncthreads();
    bin_ = results_.bin;
    before_ = results_.before;
    if (linear_) {
      span_ = tokens_.span(bin_ ? static_cast<float>(bin_) / scale_ : 0.0f,
                           bin_ + 1 < bins() ? static_cast<float>(bin_ + 1) / scale_ : kFarthest);
    }
  }

  // Lists the tokens of the bin, where there is room, and finds their least and greatest distance.
  __device__ void gather() {
    const unsigned to = on_list_ ? list_ ^ 1 : list_;
    std::uint64_t ends = ~std::uint64_t{0};  // least << 32 | inverted greatest: the less, the wider
    each([&](unsigned bits, unsigned id) {
      if (bin_of(bits) != bin_) return;
      ends = Wider{}(ends, static_cast<std::uint64_t>(bits) << 32 | ~bits);
      const unsigned at = atomicAdd(&results_.listed, 1u);
      if (at < bins()) list(to)[at] = static_cast<std::uint64_t>(bits) << 32 | id;
    });
    ends = block_.all(ends, ~std::uint64_t{0}, Wider{});
    least_ = static_cast<unsigned>(ends >> 32);
    most_ = ~static_cast<unsigned>(ends);
    size_ = results_.listed;
    on_list_ = size_ <= bins();
    list_ = to;
    __syncthreads();  // `listed` is set to 0 again
  }
  struct Wider {
    __device__ std::uint64_t operator()(std::uint64_t x, std::uint64_t y) const {
      const std::uint64_t least = x >> 32 < y >> 32 ? x >> 32 : y >> 32;
      const unsigned a = static_cast<unsigned>(x), b = static_cast<unsigned>(y);
      return least << 32 | (a < b ? a : b);
    }
  };

  // Of few tokens: each warp sums those that rank before one, for one after the other.
  __device__ Cut last_of_list(std::uint64_t wanted) {
    const std::uint64_t* keys = list(list_);
    std::uint64_t others[kOfLane], measures[kOfLane];
#pragma unroll
    for (unsigned i = 0; i < kOfLane; ++i) {
      const unsigned at = i * kWarp + block_.lane();
      others[i] = at < size_ ? keys[at] : ~std::uint64_t{0};
      measures[i] = measure(__uint_as_float(static_cast<unsigned>(others[i] >> 32)));
    }
#pragma unroll 1
    for (unsigned at = block_.warp(); at < size_; at += block_.warps()) {
      const std::uint64_t key = keys[at];
      std::uint64_t better = 0;
#pragma unroll
      for (unsigned i = 0; i < kOfLane; ++i) better += others[i] < key ? measures[i] : 0;
      const std::uint64_t before = before_ + long_sum_of_warp(better);
      const Cut cut = {static_cast<unsigned>(key >> 32), static_cast<unsigned>(key)};
      if (before < wanted && wanted - before <= measure(__uint_as_float(cut.distance)) &&
          block_.lane() == 0) {
        results_.cut = cut;
      }
    }
    __syncthreads();
    return results_.cut;
  }

  // Of many tokens with one distance: the last id.
  __device__ Cut last_of_equals(std::uint64_t wanted) {
    const std::uint64_t each = measure(__uint_as_float(least_));
    const std::uint64_t skipped = (wanted - before_ - 1) / each;
    const unsigned id = token_at(
        tokens_, span_, block_, results_.found,
        [&](unsigned id, float distance) -> std::uint64_t {
          return __float_as_uint(distance) == least_ && allowed_.keeps(least_, id);
        },
        [&](std::uint64_t) { return skipped; });
    return {least_, id};
  }

  const Tokens& tokens_;
  const Cut allowed_;
  Block& block_;
  const SelectShared& shared_;
  SelectResults& results_;

  // The cut is among the tokens with these distances, before which better ones sum to before_.
  unsigned least_ = 0, most_;
  Span span_;
  std::uint64_t before_ = 0;
  bool linear_ = true;
  float scale_;
  unsigned shift_ = 0, bin_ = 0;
  // Whether they are all on list_; size_: how many they are.
  bool on_list_ = false;
  unsigned list_ = 0, size_ = 0;
};

}  // namespace cuda
}  // namespace minserve
