// Rejection sampling (rejection.h) of a row that a cluster of blocks has: the attempts, and which
// of them the filters keep, from exact sums of what ranks before.
#pragma once

#include "section_sums.cuh"
#include "weights.cuh"

namespace minserve {
namespace cuda {

constexpr int kAttemptsAtOnce = 4;  // that are looked at in one pass over the tokens
static_assert(kAttempts == 2 * kAttemptsAtOnce,
              "two passes, each of which has room for what it says");

// What a block tells the others of its attempts.
struct RejectionShared {
  std::uint64_t found[kAttempts];  // logit bits << 32 | id
  // Weights of each block's tokens that rank before some of these, and of all its tokens.
  std::uint64_t better[2][Cluster::kMostBlocks][kAttemptsAtOnce + 1];
};
// The attempts of a row, which all blocks of a cluster sample together.
class Attempts {
 public:
  // base: of the block's piece, whose sections are weighed; best: the row's.
  __device__ Attempts(const RowParameters& given, std::int64_t position, const Row& piece,
                      unsigned base, float best, const Sections& sections, Cluster& cluster)
      : given_(given),
        position_(position),
        cluster_(cluster),
        own_(piece, base, best, octaves_of(given.temperature), sections),
        weights_(cluster.of_blocks(0, own_.weight())) {}

  // The token of the first; kElsewhere in blocks that do not have it.
  __device__ unsigned first() const {
    SectionSampler::Found found;
    return find(0, found) ? found.id : kElsewhere;
  }
  // Tells all blocks of all of them. Each is a warp's of the block that has it.
  __device__ void tell(RejectionShared& shared) const {
    const auto warps = static_cast<int>(cluster_.block.warps());
#pragma unroll 1
    for (int t = static_cast<int>(cluster_.block.warp()); t < kAttempts; t += warps) {
      SectionSampler::Found found;
      if (find(t, found) && cluster_.block.lane() == 0) {
        const std::uint64_t bits = __float_as_uint(found.logit);
        cluster_.tell(shared.found[t], bits << 32 | found.id);
      }
    }
    cluster_.meet();
  }

 private:
  // A warp calls this. False where another block has it.
  __device__ __forceinline__ bool find(int t, SectionSampler::Found& found) const {
    const double number = uniform_number(given_.stream, position_, t);
    return own_.find(number, weights_.before, weights_.total, found);
  }

  const RowParameters& given_;
  const std::int64_t position_;
  Cluster& cluster_;
  const SectionSampler own_;
  const Cluster::Sums weights_;
};

using AttemptKeys = std::uint64_t[kAttemptsAtOnce];  // distance bits << 32 | id
template <class Visit>
__device__ __forceinline__ void each_attempt(Visit visit) {
#pragma unroll
  for (int t = 0; t < kAttemptsAtOnce; ++t) visit(t);
}

// The weights of tokens that rank before each key. Returns that of all. said: by each block.
template <bool kStored>
__device__ __forceinline__ std::uint64_t sum_better(
    const Tokens<kStored>& tokens, const AttemptKeys& keys, Cluster& cluster,
    std::uint64_t (&said)[Cluster::kMostBlocks][kAttemptsAtOnce + 1], AttemptKeys& better) {
  AttemptKeys mine = {};
  std::uint64_t all = 0;
  tokens.each([&](const Four& distances, unsigned id) {
#pragma unroll
    for (unsigned i = 0; i < kTogether; ++i) {
      const std::uint64_t weight = whole(weight_of(distances[i]));
      const std::uint64_t key = Cut{__float_as_uint(distances[i]), id + i}.key();
      each_attempt([&](int t) { mine[t] += key < keys[t] ? weight : 0; });
      all += weight;
    }
  });
  const auto tell = [&](int t, std::uint64_t of_thread) {
    Block::Totals totals[1];
    cluster.block.totals({of_thread}, totals);
    if (threadIdx.x == static_cast<unsigned>(t)) {
      cluster.tell(said[cluster.rank()][t], totals[0].total);
    }
  };
  each_attempt([&](int t) { tell(t, mine[t]); });
  tell(kAttemptsAtOnce, all);
  cluster.meet();
  all = 0;
  each_attempt([&](int t) { better[t] = 0; });
  for (unsigned b = 0; b < cluster.blocks(); ++b) {
    each_attempt([&](int t) { better[t] += said[b][t]; });
    all += said[b][kAttemptsAtOnce];
  }
  return all;
}

// The first attempt that is kept, or kAllRejected; in all blocks.
template <bool kStored>
__device__ unsigned accepted_attempt(const Tokens<kStored>& tokens, const Distances& distances,
                                     const RowParameters& given, Cluster& cluster,
                                     RejectionShared& shared) {
  const std::uint64_t least = (given.min_p > 0.0f ? min_p_cut(given.min_p) : Cut()).key();
#pragma unroll 1
  for (int first = 0; first < kAttempts; first += kAttemptsAtOnce) {
    AttemptKeys keys, better = {};
    each_attempt([&](int t) {
      const std::uint64_t found = shared.found[first + t];
      const float distance = distances(__uint_as_float(static_cast<unsigned>(found >> 32)));
      keys[t] = Cut{__float_as_uint(distance), static_cast<unsigned>(found)}.key();
    });
    std::uint64_t limit = 1;
    if (given.top_p < 1.0) {
      auto& said = shared.better[first / kAttemptsAtOnce];
      limit = nucleus_limit(given.top_p, sum_better(tokens, keys, cluster, said, better));
    }
    unsigned kept = kAllRejected;
    each_attempt([&](int t) {
      const bool keeps = keys[t] <= least && better[t] < limit;
      if (kept == kAllRejected && keeps) kept = static_cast<unsigned>(keys[t]);
    });
    if (kept != kAllRejected) return kept;
  }
  return kAllRejected;
}

}  // namespace cuda
}  // namespace minserve
