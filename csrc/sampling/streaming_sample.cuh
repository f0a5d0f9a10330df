// One block samples the token of one of many rows, and mostly reads it once: for the best logit,
// what sections weigh (rejection.h) and, where a filter asks for a cut, to count scaled
// probabilities in bins.
//
// The best logit is not known while scaled probabilities are counted, so they are relative to the
// best of the tokens that come first. Where another one is better by a factor of 2**24 they are
// counted once more.
//
// The bins say between which scaled probabilities a filter's cut lies, and so mostly whether it
// keeps an attempt (rejection.h). Where it keeps none, and of rows with top_k, a second pass sums
// the weights of all tokens above, exactly, and lists those between, which are few; the cut is
// found among them, by distance and id. With the listed ones that are kept, each warp's part of the
// sum is known, so only the tokens of the warp that has the sampled one are looked at again.
//
// Several blocks share a multiprocessor, and what each has to do alone is done by few warps. Where
// too many tokens lie between (equal logits, very high temperatures), or more than 32,768 are asked
// for by top_k, this gives up, and the row is sampled as in kernel.cuh.
#pragma once

#include "histogram.cuh"
#include "kernel.cuh"
#include "section_sums.cuh"

namespace minserve {
namespace cuda {

constexpr unsigned kListed = 512;  // whose weights sum to 32 bits in either piece

template <unsigned kThreads>
struct StreamingShared {
  Listed list[kListed];
  unsigned bins[ScaledProbHistogram<kThreads>::kWords];
  unsigned high_of_warps[kWarp], low_of_warps[kWarp];  // sums of what is kept of the list
  HistogramResults results;
  std::uint64_t cut;
  unsigned listed, found;
  Sections sections;
  SectionSampler::Found attempts[kAttempts];
  // Of the row: threads do not keep them while they look at it.
  RowParameters given;
  std::int64_t position;
  Block::Shared block;

  // Before anything is listed.
  __device__ __forceinline__ void clear_list() {
    if (threadIdx.x == 0) listed = 0;
    if (threadIdx.x < kWarp) high_of_warps[threadIdx.x] = low_of_warps[threadIdx.x] = 0;
  }
  // Before anything is listed among which a cut is to be found: behind it are tokens that none is
  // worse than.
  __device__ __forceinline__ void fill_list() {
    for (unsigned i = threadIdx.x; i < kListed; i += kThreads) list[i] = {~std::uint64_t{0}, 0};
  }
  __device__ __forceinline__ void clear_cut() {
    if (threadIdx.x == 0) cut = ~std::uint64_t{0};
  }
};

template <unsigned kThreads>
class StreamingSampler {
 public:
  using Shared = StreamingShared<kThreads>;
  using ScaledProbHistogram = cuda::ScaledProbHistogram<kThreads>;

  // counted: whether the bins have all tokens by a first look.
  __device__ StreamingSampler(const ScaledProbRow& scaled_probs, Block& block, Shared& shared,
                              const ScaledProbHistogram& bins, bool counted)
      : scaled_probs_(scaled_probs),
        block_(block),
        shared_(shared),
        bins_(bins),
        counted_(counted) {}

  // Instead of a token.
  static constexpr unsigned kGivenUp = 0xfffffffdu;

  // Of a row with top_k.
  __device__ __forceinline__ unsigned token_of_top_k(const RowParameters& given, double number) {
    Edges edges;
    bool summed = false;    // between these edges
    bool complete = false;  // all that is kept is on the list
    if (counted_) {
      bins_.template sum<false>();
    } else {
      count<false>(edges.above, false);
    }
    const auto most = static_cast<std::uint64_t>(given.top_k);
    if (bins_.total() > most) {
      const typename ScaledProbHistogram::Range range = bins_.template range<false>(most - 1, most);
      edges = range.edges;
      complete = range.up_to_last <= kListed;
      if (complete) {
        edges.above = kBestScaledProb;
        if (!list_above(edges.listed) || !find_cut<false>(0, most)) return kGivenUp;
      } else {
        if (!sum<ScaledProbRow::kAboveAndCount>(edges) || !find_cut<false>(count_above_, most))
          return kGivenUp;
      }
      summed = true;
    }
    if (complete && given.top_p < 1.0) {
      if (!find_cut<true>(0, nucleus_limit(given.top_p, kept_of_list()))) return kGivenUp;
    } else if (given.top_p < 1.0) {
      const std::uint64_t left = summed ? above_ + kept_of_list() : 0;  // by top_k
      count<true>(edges.above, summed);
      const unsigned least = edges.above;
      edges = bins_.range_of(given.top_p).edges;
      // Bins below the last of those that top_k left have none of them but by rounding.
      if (summed && edges.above < least) return kGivenUp;
      if (!sum<ScaledProbRow::kAboveAndAll>(edges)) return kGivenUp;
      if (!find_cut<true>(above_, nucleus_limit(given.top_p, summed ? left : all_)))
        return kGivenUp;
      summed = true;
    }
    return within_min_p(given.min_p, edges, summed, complete, number);
  }

  // Between which scaled probabilities the nucleus of all tokens ends.
  __device__ __forceinline__ Edges edges_of_nucleus(double top_p) {
    if (counted_) {
      bins_.template sum<true>();
    } else {
      count<true>(Edges().above, false);
    }
    return bins_.range_of(top_p).edges;
  }

  // Of a row without, whose attempts have been made.
  __device__ __forceinline__ unsigned token_by_rejection(const RowParameters& given,
                                                         std::int64_t position) {
    const bool has_top_p = given.top_p < 1.0;
    Edges nucleus;
    if (has_top_p) {
      nucleus = edges_of_nucleus(given.top_p);
    } else {
      __syncthreads();
    }
    const std::uint64_t least = (given.min_p > 0.0f ? min_p_cut(given.min_p) : Cut()).key();
#pragma unroll 1
    for (int t = 0; t < kAttempts; ++t) {
      const SectionSampler::Found found = shared_.attempts[t];
      const std::uint64_t key = scaled_probs_.listed(found.id, found.logit).key;
      if (key > least) continue;
      if (!has_top_p) return found.id;
      const unsigned scaled_prob = scaled_probs_.scaled_prob_of(found.logit);
      if (scaled_prob > nucleus.above) return found.id;
      if (scaled_prob > nucleus.listed && is_in_nucleus(key, given.top_p)) return found.id;
    }
    // Nothing is on the list yet.
    shared_.clear_list();
    shared_.clear_cut();
    shared_.fill_list();
    __syncthreads();
    if (has_top_p) {
      if (!sum<ScaledProbRow::kAboveAndAll>(nucleus)) return kGivenUp;
      if (!find_cut<true>(above_, nucleus_limit(given.top_p, all_))) return kGivenUp;
    }
    const double number = uniform_number(given.stream, position, kAttempts);
    return within_min_p(given.min_p, nucleus, has_top_p, false, number);
  }

 private:
  __device__ __forceinline__ unsigned within_min_p(float min_p, Edges edges, bool summed,
                                                   bool complete, double number) {
    const Cut least = min_p_cut(min_p);
    if (min_p > 0.0f && least.distance < cut_.distance) {
      cut_ = least;
      if (!complete) {
        const unsigned scaled_prob = __float_as_uint(fast_exp2(-__uint_as_float(least.distance)));
        edges = {max(scaled_prob, kLeastScaledProb) + kSlack,
                 max(scaled_prob, kLeastScaledProb + kSlack) - kSlack - 1};
        summed = false;
      }
    }
    if (!summed && !sum<ScaledProbRow::kAbove>(edges)) return kGivenUp;
    return sampled(edges, number);
  }

  // Exactly, where bins do not tell.
  __device__ __forceinline__ bool is_in_nucleus(std::uint64_t key, double top_p) {
    const ScaledProbRow::Better better = scaled_probs_.better_than(key);
    Block::Totals totals[2];
    block_.totals({better.weight, better.all}, totals);
    return totals[0].total < nucleus_limit(top_p, totals[1].total);
  }

  // Fills the bins with tokens above these scaled probabilities and with those on the list that are
  // kept.
  template <bool kByWeight>
  __device__ __forceinline__ void count(unsigned above, bool with_list) {
    bins_.clear();
    __syncthreads();
    scaled_probs_.each_scaled_prob([&](unsigned scaled_prob) {
      bins_.template add<kByWeight>(scaled_prob, scaled_prob > above);
    });
    if (with_list) {
      for (unsigned i = threadIdx.x; i < listed_; i += kThreads) {
        if (shared_.list[i].key > cut_.key()) continue;
        const float distance = __uint_as_float(static_cast<unsigned>(shared_.list[i].key >> 32));
        bins_.template add<kByWeight>(__float_as_uint(fast_exp2(-distance)), true);
      }
    }
    __syncthreads();
    bins_.template sum<kByWeight>();
  }

  // Sums up what is above the edges and lists what is between and not beyond the cut. Whether there
  // was room.
  template <ScaledProbRow::Wanted kWanted>
  __device__ __forceinline__ bool sum(const Edges& edges) {
    clear_list();
    const ScaledProbRow::Sums sums = scaled_probs_.template sums<kWanted>(edges, lister());
    constexpr unsigned kNumbers = kWanted == ScaledProbRow::kAbove ? 1 : 2;
    std::uint64_t mine[kNumbers] = {sums.above};
    if (kNumbers > 1) {
      mine[kNumbers - 1] = kWanted == ScaledProbRow::kAboveAndAll ? sums.all : sums.count_above;
    }
    Block::Totals totals[kNumbers];
    block_.totals(mine, totals);  // has a barrier, so the list is whole
    above_of_lane_ = totals[0].of_lane;
    above_ = totals[0].total;
    if (kWanted == ScaledProbRow::kAboveAndAll) all_ = totals[kNumbers - 1].total;
    if (kWanted == ScaledProbRow::kAboveAndCount) count_above_ = totals[kNumbers - 1].total;
    return settle_list();
  }
  // Lists all with greater scaled probabilities. Whether there was room.
  __device__ __forceinline__ bool list_above(unsigned least) {
    clear_list();
    scaled_probs_.list_above(least, lister());
    __syncthreads();
    above_ = above_of_lane_ = 0;
    return settle_list();
  }
  __device__ __forceinline__ void clear_list() {
    if (clean_) {
      clean_ = false;
      return;
    }
    shared_.clear_list();
    shared_.fill_list();
    __syncthreads();
    shared_.clear_cut();  // which all have read
  }
  // Puts a token on the list, as its logit and id: what else is wanted of it takes few instructions
  // where each thread has one of the list, and many where some lane has one of its own.
  struct Lister {
    Shared& shared;

    __device__ __forceinline__ void operator()(unsigned id, float logit) const {
      const unsigned at = take_shared(shared.listed);
      if (at < kListed) {
        shared.list[at].key = static_cast<std::uint64_t>(__float_as_uint(logit)) << 32 | id;
      }
    }
  };
  __device__ __forceinline__ Lister lister() const { return {shared_}; }
  // Of a list that is whole. Tokens beyond the cut become such that none is worse than. Whether
  // there was room.
  __device__ __forceinline__ bool settle_list() {
    listed_ = shared_.listed;
    if (listed_ > kListed) return false;
    const std::uint64_t most = cut_.key();
    for (unsigned i = threadIdx.x; i < listed_; i += kThreads) {
      const std::uint64_t found = shared_.list[i].key;
      const auto id = static_cast<unsigned>(found);
      Listed one = scaled_probs_.listed(id, __uint_as_float(static_cast<unsigned>(found >> 32)));
      if (one.key > most) one = {~std::uint64_t{0}, 0};
      shared_.list[i] = one;
    }
    __syncthreads();
    return true;
  }

  // The cut is the last token before which the better ones sum to less than the limit; those above
  // the edges sum to `before`. False where it is not on the list.
  template <bool kByWeight>
  __device__ __forceinline__ bool find_cut(std::uint64_t before, std::uint64_t limit) {
    // So many lanes for each share the others.
    constexpr unsigned kLanes = 8;
    constexpr unsigned kOfWarp = kWarp / kLanes;
    constexpr unsigned kOnce = 4;  // others of a lane
    const Listed* const others = shared_.list + threadIdx.x % kLanes;
#pragma unroll 1
    for (unsigned first = block_.warp() * kOfWarp; first < listed_; first += kThreads / kLanes) {
      const unsigned at = first + block_.lane() / kLanes;
      const Listed one = shared_.list[min(at, kListed - 1)];
      std::uint64_t better = 0;
#pragma unroll 1
      for (unsigned from = 0; from < listed_; from += kOnce * kLanes) {  // and some that are none
#pragma unroll
        for (unsigned i = 0; i < kOnce; ++i) {
          const Listed other = others[from + i * kLanes];
          if (other.key < one.key) better += kByWeight ? other.weight : 1;
        }
      }
#pragma unroll
      for (int distance = kLanes / 2; distance > 0; distance /= 2) {
        better += __shfl_sync(kAll, better, static_cast<int>(block_.lane()) ^ distance);
      }
      better += before;
      const bool asks = at < listed_ && threadIdx.x % kLanes == 0;
      if (asks && better < limit && limit - better <= (kByWeight ? one.weight : 1)) {
        shared_.cut = one.key;
      }
    }
    __syncthreads();
    const std::uint64_t key = shared_.cut;
    cut_ = {static_cast<unsigned>(key >> 32), static_cast<unsigned>(key)};
    return key != ~std::uint64_t{0};
  }

  __device__ std::uint64_t kept_of_list() const {
    std::uint64_t kept = 0;
    for (unsigned i = threadIdx.x; i < listed_; i += kThreads) {
      if (shared_.list[i].key <= cut_.key()) kept += shared_.list[i].weight;
    }
    Block::Totals totals[1];
    block_.totals({kept}, totals);
    return totals[0].total;
  }

  // The token at which the sum of the kept ones' weights, in the order of ids, passes a number.
  __device__ __forceinline__ unsigned sampled(const Edges& edges, double number) {
    const Row& row = scaled_probs_.row();
    const std::uint64_t last = cut_.key();
    for (unsigned i = threadIdx.x; i < listed_; i += kThreads) {
      const Listed one = shared_.list[i];
      if (one.key > last) continue;
      const unsigned warp = static_cast<unsigned>(one.key) / row.run();
      atomicAdd(shared_.high_of_warps + warp, static_cast<unsigned>(one.weight >> 23));
      atomicAdd(shared_.low_of_warps + warp, static_cast<unsigned>(one.weight) & 0x7fffffu);
    }
    __syncthreads();
    const unsigned lane = block_.lane();
    Block::Sums of_warps = {};
    of_warps.of_lane =
        above_of_lane_ + whole({shared_.high_of_warps[lane], shared_.low_of_warps[lane]});
    const std::uint64_t so_far = sum_so_far(of_warps.of_lane);
    of_warps.before_lane = so_far - of_warps.of_lane;
    of_warps.total = __shfl_sync(kAll, so_far, static_cast<int>(kWarp - 1));
    const std::uint64_t target = sampled_weight(number, of_warps.total);
    const Block::Holder holder = block_.holder(of_warps, target);

    // Threads share that warp's run of tokens, each some neighbouring fours.
    std::uint64_t weights[kTogether];
    const auto weights_of_four = [&](unsigned id) {
      const float4 x = row.four(id);
      const float logits[] = {x.x, x.y, x.z, x.w};
      std::uint64_t sum = 0;
#pragma unroll
      for (unsigned i = 0; i < kTogether; ++i) {
        const Listed one = scaled_probs_.listed(id + i, logits[i]);
        const unsigned scaled_prob = scaled_probs_.scaled_prob_of(logits[i]);
        const bool kept =
            scaled_prob > edges.above || (scaled_prob > edges.listed && one.key <= last);
        weights[i] = kept ? one.weight : 0;
        sum += weights[i];
      }
      return sum;
    };
    const unsigned end = row.last(holder.warp);
    const unsigned threads = kThreads, fours = (row.run() / kTogether + threads - 1) / threads;
    unsigned id = row.first(holder.warp) + threadIdx.x * fours * kTogether;
    const unsigned past = min(id + fours * kTogether, end);
    std::uint64_t mine = 0;
#pragma unroll 1
    for (unsigned at = id; at < past; at += kTogether) mine += weights_of_four(at);
    Block::Totals totals[1];
    block_.totals({mine}, totals);
    const std::uint64_t of_warp = block_.of_warp(totals[0]);
    std::uint64_t left = target - holder.before - block_.before_warp(totals[0]);
    const bool has_it = left < of_warp;  // if it is not below 0, which is a great number here
    if (has_it) left -= sum_so_far(mine) - mine;
    if (has_it && left < mine) {
      if (fours > 1) {  // else the weights are those of its only four
        for (std::uint64_t sum; (sum = weights_of_four(id)) <= left; left -= sum) id += kTogether;
      }
#pragma unroll
      for (unsigned i = 0; i + 1 < kTogether; ++i) {
        if (left < weights[i]) break;
        left -= weights[i];
        ++id;
      }
      shared_.found = id;
    }
    __syncthreads();
    return shared_.found;
  }

  const ScaledProbRow& scaled_probs_;
  Block& block_;
  Shared& shared_;
  ScaledProbHistogram bins_;
  const bool counted_;

  Cut cut_;
  std::uint64_t above_ = 0, all_ = 0;  // sums of what is above the edges, and of all
  std::uint64_t count_above_ = 0;
  std::uint64_t above_of_lane_ = 0;  // of that, the part of the warp that has this lane's number
  unsigned listed_ = 0;
  bool clean_ = true;  // nothing was listed yet
};

}  // namespace cuda
}  // namespace minserve
