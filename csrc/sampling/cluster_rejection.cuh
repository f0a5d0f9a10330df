// Tries (rejection.h) of a row that a team of blocks has: who draws them, and which of them the filters
// keep, from exact sums of what ranks before.
#pragma once

#include "section_sums.cuh"
#include "weights.cuh"

namespace minserve {
namespace cuda {

constexpr int kTriesAtOnce = 4;  // that are looked at in one pass over the tokens
static_assert(kTries == 2 * kTriesAtOnce, "two passes, each of which has room for what it says");

// What a block has to say of tries.
struct TriedShared {
  std::uint64_t found[kTries];  // logit bits << 32 | id
  // Weights of each block's tokens that rank before some of these, and of all its tokens.
  std::uint64_t better[2][Team::kMostBlocks][kTriesAtOnce + 1];
};
// The tries of a row, which all blocks of a team draw together.
class Tries {
 public:
  // base: of the block's piece, whose sections are weighed; best: the row's.
  __device__ Tries(const RowParameters& given, std::int64_t position, const Row& piece,
                   unsigned base, float best, const Sections& sections, Team& team)
      : given_(given),
        position_(position),
        team_(team),
        own_(piece, base, best, octaves_of(given.temperature), sections),
        weights_(team.of_blocks(0, own_.weight())) {}

  // The token of the first; kElsewhere in blocks that do not have it.
  __device__ unsigned first() const {
    SectionDraw::Found found;
    return find(0, found) ? found.id : kElsewhere;
  }
  // Tells all blocks of all of them. Each is a warp's of the block that has it.
  __device__ void tell(TriedShared& shared) const {
    const auto warps = static_cast<int>(team_.block.warps());
#pragma unroll 1
    for (int t = static_cast<int>(team_.block.warp()); t < kTries; t += warps) {
      SectionDraw::Found found;
      if (find(t, found) && team_.block.lane() == 0) {
        const std::uint64_t bits = __float_as_uint(found.logit);
        team_.tell(shared.found[t], bits << 32 | found.id);
      }
    }
    team_.meet();
  }

 private:
  // A warp calls this. False where another block has it.
  __device__ __forceinline__ bool find(int t, SectionDraw::Found& found) const {
    const double number = uniform_number(given_.stream, position_, t);
    return own_.find(number, weights_.before, weights_.total, found);
  }

  const RowParameters& given_;
  const std::int64_t position_;
  Team& team_;
  const SectionDraw own_;
  const Team::Sums weights_;
};

using TriedKeys = std::uint64_t[kTriesAtOnce];  // distance bits << 32 | id
template <class Visit>
__device__ __forceinline__ void each_tried(Visit visit) {
#pragma unroll
  for (int t = 0; t < kTriesAtOnce; ++t) visit(t);
}

// The weights of tokens that rank before each key. Returns that of all. said: by each block.
template <bool kStored>
__device__ __forceinline__ std::uint64_t sum_better(
    const Tokens<kStored>& tokens, const TriedKeys& keys, Team& team,
    std::uint64_t (&said)[Team::kMostBlocks][kTriesAtOnce + 1], TriedKeys& better) {
  TriedKeys mine = {};
  std::uint64_t all = 0;
  tokens.each([&](const Four& distances, unsigned id) {
#pragma unroll
    for (unsigned i = 0; i < kTogether; ++i) {
      const std::uint64_t weight = whole(weight_of(distances[i]));
      const std::uint64_t key = Cut{__float_as_uint(distances[i]), id + i}.key();
      each_tried([&](int t) { mine[t] += key < keys[t] ? weight : 0; });
      all += weight;
    }
  });
  const auto tell = [&](int t, std::uint64_t of_thread) {
    Block::Totals totals[1];
    team.block.totals({of_thread}, totals);
    if (threadIdx.x == static_cast<unsigned>(t)) {
      team.tell(said[team.rank()][t], totals[0].total);
    }
  };
  each_tried([&](int t) { tell(t, mine[t]); });
  tell(kTriesAtOnce, all);
  team.meet();
  all = 0;
  each_tried([&](int t) { better[t] = 0; });
  for (unsigned b = 0; b < team.blocks(); ++b) {
    each_tried([&](int t) { better[t] += said[b][t]; });
    all += said[b][kTriesAtOnce];
  }
  return all;
}

// The first of the told tries that is kept, or kRefused; in all blocks.
template <bool kStored>
__device__ unsigned kept_try(const Tokens<kStored>& tokens, const Distances& distances,
                             const RowParameters& given, Team& team, TriedShared& shared) {
  const std::uint64_t least = (given.min_p > 0.0f ? min_p_cut(given.min_p) : Cut()).key();
#pragma unroll 1
  for (int first = 0; first < kTries; first += kTriesAtOnce) {
    TriedKeys keys, better = {};
    each_tried([&](int t) {
      const std::uint64_t found = shared.found[first + t];
      const float distance = distances(__uint_as_float(static_cast<unsigned>(found >> 32)));
      keys[t] = Cut{__float_as_uint(distance), static_cast<unsigned>(found)}.key();
    });
    std::uint64_t limit = 1;
    if (given.top_p < 1.0) {
      auto& said = shared.better[first / kTriesAtOnce];
      limit = nucleus_limit(given.top_p, sum_better(tokens, keys, team, said, better));
    }
    unsigned kept = kRefused;
    each_tried([&](int t) {
      const bool keeps = keys[t] <= least && better[t] < limit;
      if (kept == kRefused && keeps) kept = static_cast<unsigned>(keys[t]);
    });
    if (kept != kRefused) return kept;
  }
  return kRefused;
}

}  // namespace cuda
}  // namespace minserve
