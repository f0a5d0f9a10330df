// A block finds the best tokens of a row in order.
//
// Each thread knows the best of its own tokens. If `count` tokens are wanted, they are tokens of
// the `count` threads whose bests are the best, and the last of these bests is a bound: so many
// tokens are no worse. Those threads' tokens are read once more, by a warp for each, and what is
// within the bound is listed, seldom many more than are wanted, and ranked by counting. Where the
// list is too short, each reading of the row finds the best after the last one found.
#pragma once

#include "../../core/reduce/argmax_key.cuh"
#include "../../core/reduce/row_reader.cuh"
#include "logprobs.h"

namespace minserve {
namespace cuda {

template <int kMostThreads>
struct TopLogprobsShared {
  static constexpr unsigned kListed = 256;
  std::uint64_t bests[kMostThreads];  // of each warp's threads, falling
  std::uint64_t list[kListed];
  std::uint64_t bound;
  unsigned listed, owners;
  unsigned owner[kMostTop];  // a token of each of those threads
};

// The warp's numbers in falling order, by lane (bitonic sort).
__device__ inline std::uint64_t sorted_by_warp(std::uint64_t mine) {
  const unsigned lane = threadIdx.x % kWarp;
#pragma unroll
  for (unsigned size = 2; size <= kWarp; size *= 2) {
#pragma unroll
    for (unsigned distance = size / 2; distance > 0; distance /= 2) {
      const std::uint64_t other = __shfl_sync(kAll, mine, static_cast<int>(lane ^ distance));
      const bool wants_greater = (lane & size) == 0 == ((lane & distance) == 0);
      if ((other > mine) == wants_greater) mine = other;
    }
  }
  return mine;
}

// How many of a warp's falling numbers are greater.
__device__ inline unsigned count_greater(const std::uint64_t (&falling)[kWarp],
                                         std::uint64_t than) {
  unsigned count = 0;
#pragma unroll
  for (unsigned step = kWarp / 2; step > 0; step /= 2) {
    if (falling[count + step - 1] > than) count += step;
  }
  return count + (falling[count] > than);
}

// Calls found(rank, key) for the `count` best of the row, each by one thread; fewer where it has no
// more. `mine`: the best of this thread's tokens as ArgmaxKey, 0 where it has none.
template <int kMostThreads, class Found>
__device__ void find_top_logprobs(const Row& row, std::uint64_t mine, std::int32_t count,
                                  Block& block, TopLogprobsShared<kMostThreads>& shared,
                                  Found found) {
  const unsigned thread = threadIdx.x, threads = blockDim.x, wanted = static_cast<unsigned>(count);
  const std::uint64_t own = mine;
  mine = sorted_by_warp(mine);
  shared.bests[thread] = mine;
  if (thread == 0) shared.bound = 1, shared.listed = shared.owners = 0;
  __syncthreads();
  unsigned better = block.lane();
  for (unsigned warp = 0; warp < block.warps(); ++warp) {
    if (warp == block.warp()) continue;
    better += count_greater(
        *reinterpret_cast<const std::uint64_t (*)[kWarp]>(shared.bests + warp * kWarp), mine);
  }
  if (mine && better < wanted) {
    shared.owner[atomicAdd(&shared.owners, 1u)] = ArgmaxKey{mine}.id();
    if (better == wanted - 1) shared.bound = mine;
  }
  __syncthreads();
  const std::uint64_t bound = shared.bound;
  const unsigned owners = shared.owners;
  const auto each_key = [&](unsigned id, const float4& four, auto visit) {
    const float x[kTogether] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (unsigned k = 0; k < kTogether; ++k) {
      if (id + k < row.vocab) visit(ArgmaxKey::of(x[k] + 0.0f, id + k).key);
    }
  };
  const auto list = [&](unsigned id, const float4& four) {
    each_key(id, four, [&](std::uint64_t key) {
      if (key < bound) return;
      const unsigned at = atomicAdd(&shared.listed, 1u);
      if (at < shared.kListed) shared.list[at] = key;
    });
  };
  if (row.run() <= kStride) {  // a thread has four tokens at most
    if (own >= bound) row.each<1>(list);
  } else {
    for (unsigned owner = block.warp(); owner < owners; owner += block.warps()) {
      const unsigned token = shared.owner[owner], warp = token / row.run();
      const unsigned fours = (token - row.first(warp)) % kStride / kTogether;
      for (unsigned id = row.first(warp) + fours * kTogether + block.lane() * kStride;
           id < row.last(warp); id += kWarp * kStride) {
        list(id, row.four(id));
      }
    }
  }
  __syncthreads();
  const unsigned listed = shared.listed;
  if (listed <= shared.kListed) {
    for (unsigned at = thread; at < listed; at += threads) {
      const std::uint64_t key = shared.list[at];
      std::int32_t rank = 0;
      for (unsigned other = 0; other < listed; ++other) rank += shared.list[other] > key;
      if (rank < count) found(rank, key);
    }
    return;
  }
  std::uint64_t last = ~std::uint64_t{0};
  for (std::int32_t rank = 0; rank < count; ++rank) {
    std::uint64_t best = 0;
    row.each<4>([&](unsigned id, const float4& four) {
      each_key(id, four, [&](std::uint64_t key) {
        if (key < last) best = greater(best, key);
      });
    });
    last = block.all(best, std::uint64_t{0}, greater);
    if (thread == 0) found(rank, last);
  }
}

}  // namespace cuda
}  // namespace minserve
