// A row's tokens as they are sampled by: distances from the best, weights, and the token at which
// the sum of weights, in the order of ids, passes a number. A cluster of blocks has a row, each of
// them a piece.
#pragma once

#include "../core/reduce/row_reader.cuh"
#include "../core/reduce/cluster_reduce.cuh"
#include "sample.h"

namespace minserve {
namespace cuda {

// 2**(38 - distance), rounded down, in two pieces that sums of 512 keep within 32 bits each.
struct Weight {
  unsigned high, low;  // high * 2**23 + low
};
// Adding it, rounded down, leaves a float's whole part in the low bits.
constexpr float kWhole = 8388608.0f;       // 2**23
constexpr unsigned kRaised = 0x4b000000u;  // its bits
__device__ __forceinline__ unsigned whole_part(float x) {
  return __float_as_uint(__fadd_rd(x, kWhole)) - kRaised;
}
// Of 2**-distance, kRaised more in both pieces.
__device__ __forceinline__ Weight raised_weight_of_scaled_prob(float scaled_prob) {
  // All is exact but for the two that round down.
  const float high = __fmaf_rd(scaled_prob, 32768.0f, kWhole);
  const float rest = __fmaf_rn(scaled_prob, 32768.0f, kWhole - high);
  return {__float_as_uint(high), __float_as_uint(__fmaf_rd(rest, kWhole, kWhole))};
}
__device__ __forceinline__ Weight weight_of_scaled_prob(float scaled_prob) {
  const Weight raised = raised_weight_of_scaled_prob(scaled_prob);
  return {raised.high - kRaised, raised.low - kRaised};
}
__device__ __forceinline__ Weight weight_of(float distance) {
  return weight_of_scaled_prob(fast_exp2(-distance));
}
__device__ __forceinline__ std::uint64_t whole(Weight weight) {
  return static_cast<std::uint64_t>(weight.high) * (1u << 23) + weight.low;
}

// min_p keeps the tokens whose weight is no less than min_p of the best's.
__device__ inline Cut min_p_cut(float min_p) {
  const float farthest = -log2f(min_p);
  return {farthest > 0.0f ? __float_as_uint(farthest) : 0, 0xffffffffu};
}

// Distances of tokens, from their logits; infinite for those that are impossible.
struct Distances {
  const float best, octaves;

  __device__ __forceinline__ float operator()(float logit) const {
    return (best - logit) * octaves;
  }
};

using Four = float[kTogether];

// The tokens of this block. With kStored their distances are in shared memory, and no thread has
// more than 512 of them.
template <bool kStored>
class Tokens {
 public:
  const Row row;        // of distances with kStored, else of logits
  const unsigned base;  // the id of the first

  // stored: the block's row of logits, which its threads have left there, before a barrier, with
  // what stands for tokens past the end; distances take their place.
  __device__ Tokens(const Row& logits, float* stored, unsigned base, const Distances& distances)
      : row(kStored ? Row{stored, (logits.vocab + kTogether - 1) / kTogether * kTogether, true}
                    : logits),
        base(base),
        distances_(distances) {
    if (kStored) store_distances(stored);
  }

  __device__ __forceinline__ float distance(unsigned at) const { return of(row.logits[at]); }

  // Calls visit(distances of kTogether tokens, id of the first) for this thread's, ids ascending.
  // Past the end there may be some, infinitely far away.
  template <class Visit>
  __device__ __forceinline__ void each(Visit visit) const {
    if (kStored) {
      const unsigned warp = threadIdx.x / kWarp, end = row.last(warp);
#pragma unroll 1
      for (unsigned at = row.first(warp) + threadIdx.x % kWarp * kTogether; at < end;
           at += kStride) {
        const float4 x = *reinterpret_cast<const float4*>(row.logits + at);
        visit({x.x, x.y, x.z, x.w}, base + at);
      }
    } else {
      row.each<2>([&](unsigned at, const float4& x) {
        visit({of(x.x), of(x.y), of(x.z), of(x.w)}, base + at);
      });
    }
  }

 private:
  __device__ __forceinline__ float of(float x) const { return kStored ? x : distances_(x); }

  __device__ __forceinline__ void store_distances(float* stored) const {
    row.each<2>([&](unsigned at, const float4& x) {
      *reinterpret_cast<float4*>(stored + at) = {distances_(x.x), distances_(x.y), distances_(x.z),
                                                 distances_(x.w)};
    });
  }

  const Distances& distances_;
};
// A sum of the weights of tokens within a cut.
template <bool kStored>
class WeightSum {
 public:
  __device__ explicit WeightSum(const Cut& cut) {
    const unsigned farthest = __float_as_uint(kFarthest);
    most_ = __uint_as_float(min(cut.distance, farthest));
    last_ = cut.distance > farthest ? ~0u : cut.id;
  }
  // Has no branches but for the one past all of them.
  template <unsigned kTokens>
  __device__ __forceinline__ void add(const float (&distances)[kTokens], unsigned id) {
    bool keeps[kTokens], any = false;
#pragma unroll
    for (unsigned i = 0; i < kTokens; ++i) {
      keeps[i] = (distances[i] < most_) | ((distances[i] == most_) & (id + i <= last_));
      any |= keeps[i];
    }
    if (!any) return;
#pragma unroll
    for (unsigned i = 0; i < kTokens; ++i) {
      const Weight weight = weight_of(distances[i]);
      high_ += keeps[i] ? weight.high : 0;
      low_ += keeps[i] ? weight.low : 0;
    }
    if (!kStored) settle();  // there may be any number of them
  }
  __device__ std::uint64_t sum() {
    settle();
    return settled_;
  }

 private:
  __device__ __forceinline__ void settle() {
    settled_ += static_cast<std::uint64_t>(high_) * (1u << 23) + low_;
    high_ = low_ = 0;
  }

  std::uint64_t settled_ = 0;
  unsigned high_ = 0, low_ = 0, last_;
  float most_;
};

// A count of tokens of one distance, up to an id.
class CountOfEquals {
 public:
  __device__ explicit CountOfEquals(const Cut& last) : last_(last) {}
  template <unsigned kTokens>
  __device__ __forceinline__ void add(const float (&distances)[kTokens], unsigned id) {
#pragma unroll
    for (unsigned i = 0; i < kTokens; ++i) {
      count_ += __float_as_uint(distances[i]) == last_.distance && id + i <= last_.id;
    }
  }
  __device__ std::uint64_t sum() const { return count_; }

 private:
  Cut last_;
  unsigned count_ = 0;
};

// Instead of a token.
constexpr unsigned kNotFinite = 0xffffffffu, kElsewhere = 0xfffffffeu;
constexpr unsigned kAllRejected = 0xfffffffcu;  // all attempts

// The token at which a sum, in the order of ids, passes target_of(sum of all), which is below that
// sum: kElsewhere in blocks that do not have it. `nothing` is the sum of no tokens, copied for each
// run of them. The block that has the token finds the warp whose run of tokens holds it, then all
// its threads share that run.
template <bool kStored, class Sum, class TargetOf>
__device__ unsigned token_at(const Tokens<kStored>& tokens, Cluster& cluster, unsigned& found,
                             const Sum& nothing, TargetOf target_of) {
  Block& block = cluster.block;
  Sum own = nothing;
  tokens.each([&](const Four& distances, unsigned id) { own.add(distances, id); });
  const Block::Sums of_runs = block.sums(own.sum());
  const Cluster::Sums sums = cluster.of_blocks(0, of_runs.total);
  std::uint64_t target = target_of(sums.total);
  if (target < sums.before || target - sums.before >= of_runs.total) return kElsewhere;
  target -= sums.before;
  const Block::Holder holder = block.holder(of_runs, target);

  const auto add = [&](unsigned at) {
    const float one[] = {tokens.distance(at)};
    own.add(one, tokens.base + at);
  };
  const Row& row = tokens.row;
  const unsigned end = row.last(holder.warp);
  const unsigned each = (row.run() + blockDim.x - 1) / blockDim.x;
  const unsigned first = row.first(holder.warp) + threadIdx.x * each;
  const unsigned last = first + each < end ? first + each : end;
  own = nothing;
#pragma unroll 1
  for (unsigned at = first; at < last; ++at) add(at);
  const std::uint64_t mine = own.sum();
  const std::uint64_t before = holder.before + block.sums(mine).before;
  if (target >= before && target - before < mine) {
    own = nothing;
    unsigned at = first;
#pragma unroll 1
    for (; at + 1 < last; ++at) {
      add(at);
      if (target - before < own.sum()) break;
    }
    found = tokens.base + at;
  }
  __syncthreads();
  return found;
}

}  // namespace cuda
}  // namespace minserve
