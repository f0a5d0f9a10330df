// A block finds the best tokens of a row in order.
//
// Each thread knows the best of its own tokens. The best token of the thread that is k-th by these
// is a bound: at least k tokens are no worse. Those, which are seldom many more, are listed in a
// second reading of the row and ranked by counting. Where the list is too short for them, e.g.
// where the best are all one thread's, each reading finds the best after the last one found.
#pragma once

#include "../common/best.cuh"
#include "../common/row.cuh"

namespace minserve {
namespace cuda {

template <int kMostThreads>
struct RanksShared {
  static constexpr unsigned kListed = 256;
  std::uint64_t bests[kMostThreads];
  std::uint64_t list[kListed];
  std::uint64_t bound;
  unsigned listed;
};

// Calls found(rank, key) for the `count` best of the row, each by one thread; fewer where it has no
// more. `mine`: the best of this thread's tokens as BestKey, 0 where it has none.
template <int kMostThreads, class Found>
__device__ void rank_best(const Row& row, std::uint64_t mine, std::int32_t count, Block& block,
                          RanksShared<kMostThreads>& shared, Found found) {
  const unsigned thread = threadIdx.x, threads = blockDim.x;
  shared.bests[thread] = mine;
  if (thread == 0) shared.bound = 1, shared.listed = 0;
  __syncthreads();
  if (mine) {
    std::int32_t better = 0;
    for (unsigned other = 0; other < threads; ++other) better += shared.bests[other] > mine;
    if (better == count - 1) shared.bound = mine;
  }
  __syncthreads();
  const std::uint64_t bound = shared.bound;
  const auto each_key = [&](auto visit) {
    row.each<4>([&](unsigned id, const float4& four) {
      const float x[kTogether] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (unsigned k = 0; k < kTogether; ++k) {
        if (id + k < row.vocab) visit(BestKey::of(x[k] + 0.0f, id + k).key);
      }
    });
  };
  each_key([&](std::uint64_t key) {
    if (key < bound) return;
    const unsigned at = atomicAdd(&shared.listed, 1u);
    if (at < shared.kListed) shared.list[at] = key;
  });
  __syncthreads();
  const unsigned listed = shared.listed;
  if (listed <= shared.kListed) {
    for (unsigned at = thread; at < listed; at += threads) {
      const std::uint64_t key = shared.list[at];
      std::int32_t better = 0;
      for (unsigned other = 0; other < listed; ++other) better += shared.list[other] > key;
      if (better < count) found(better, key);
    }
    return;
  }
  std::uint64_t last = ~std::uint64_t{0};
  for (std::int32_t rank = 0; rank < count; ++rank) {
    std::uint64_t best = 0;
    each_key([&](std::uint64_t key) {
      if (key < last) best = greater(best, key);
    });
    last = block.all(best, std::uint64_t{0}, greater);
    if (thread == 0) found(rank, last);
  }
}

}  // namespace cuda
}  // namespace minserve
