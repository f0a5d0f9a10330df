// What the threads of a block find together: sums, bests, sums of those before.
//
// All threads call each of these, at the same place; `all`, `sums` and `totals` have one barrier
// each and give every thread the result. Two rows of slots take turns, so that none is written
// while it is still read.
#pragma once

#include <cstdint>

#include "../../arch/ptx.cuh"

namespace minserve {
namespace cuda {

constexpr unsigned kWarp = 32;
constexpr unsigned kAll = 0xffffffffu;

template <class T, class CombineExpSums>
__device__ __forceinline__ T across_warp(T mine, CombineExpSums combine) {
  const int lane = static_cast<int>(threadIdx.x % kWarp);
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    mine = combine(mine, __shfl_sync(kAll, mine, lane ^ distance));
  }
  return mine;
}

// Of the warp's unsigned numbers, in one instruction where the GPU has it.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
__device__ __forceinline__ unsigned sum_of_warp(unsigned mine) {
  return __reduce_add_sync(kAll, mine);
}
__device__ __forceinline__ unsigned least_of_warp(unsigned mine) {
  return __reduce_min_sync(kAll, mine);
}
__device__ __forceinline__ unsigned most_of_warp(unsigned mine) {
  return __reduce_max_sync(kAll, mine);
}
#else
__device__ __forceinline__ unsigned sum_of_warp(unsigned mine) {
  return across_warp(mine, [](unsigned x, unsigned y) { return x + y; });
}
__device__ __forceinline__ unsigned least_of_warp(unsigned mine) {
  return across_warp(mine, [](unsigned x, unsigned y) { return x < y ? x : y; });
}
__device__ __forceinline__ unsigned most_of_warp(unsigned mine) {
  return across_warp(mine, [](unsigned x, unsigned y) { return x > y ? x : y; });
}
#endif

// The sum of this lane's and all lower ones'.
__device__ __forceinline__ std::uint64_t sum_so_far(std::uint64_t mine) {
  const unsigned lane = threadIdx.x % kWarp;
#pragma unroll
  for (unsigned distance = 1; distance < kWarp; distance *= 2) {
    const std::uint64_t lower = __shfl_up_sync(kAll, mine, distance);
    if (lane >= distance) mine += lower;
  }
  return mine;
}

// The warp's sum, which is below 2**59.
__device__ __forceinline__ std::uint64_t long_sum_of_warp(std::uint64_t mine) {
  constexpr unsigned kLow = 27;  // 32 numbers of so many bits sum to 32 bits
  const unsigned low = static_cast<unsigned>(mine) & ((1u << kLow) - 1);
  return (static_cast<std::uint64_t>(sum_of_warp(static_cast<unsigned>(mine >> kLow))) << kLow) +
         sum_of_warp(low);
}

// One dimension of threads, in whole warps.
class Block {
 public:
  struct Shared {
    std::uint64_t slots[2][2 * kWarp];
  };
  struct Sums {
    std::uint64_t before;  // of the threads before this one
    std::uint64_t total;
    std::uint64_t of_lane, before_lane;  // of the warp that has this lane's number, and before it
  };
  struct Totals {
    std::uint64_t total;
    std::uint64_t of_lane;  // of the warp that has this lane's number
  };
  struct Holder {
    unsigned warp;
    std::uint64_t before;  // of the warps before it
  };

  // warps: a constant, where the caller knows it, saves divisions.
  __device__ explicit Block(Shared& shared, unsigned warps = blockDim.x / kWarp)
      : shared_(shared), warps_(warps) {}

  // `nothing` combined with x is x; T has eight bytes at most.
  template <class T, class CombineExpSums>
  __device__ T all(T mine, T nothing, CombineExpSums combine) {
    static_assert(sizeof(T) <= sizeof(std::uint64_t), "a slot holds no more");
    T* const slots = reinterpret_cast<T*>(next_slots());
    mine = across_warp(mine, combine);
    if (lane() == 0) slots[warp()] = mine;
    __syncthreads();
    return across_warp(lane() < warps() ? slots[lane()] : nothing, combine);
  }

  __device__ Sums sums(std::uint64_t mine) {
    std::uint64_t* const slots = next_slots();
    const std::uint64_t so_far = sum_so_far(mine);
    if (lane() == kWarp - 1) slots[warp()] = so_far;
    __syncthreads();
    Sums sums;
    sums.of_lane = lane() < warps() ? slots[lane()] : 0;
    const std::uint64_t of_warps = sum_so_far(sums.of_lane);
    sums.before_lane = of_warps - sums.of_lane;
    sums.total = __shfl_sync(kAll, of_warps, static_cast<int>(kWarp - 1));
    sums.before = __shfl_sync(kAll, sums.before_lane, static_cast<int>(warp())) + (so_far - mine);
    return sums;
  }
  // Of up to two numbers of each thread, some of what sums() says, for less: the block's sum is
  // below 2**59.
  template <unsigned kNumbers>
  __device__ __forceinline__ void totals(const std::uint64_t (&mine)[kNumbers],
                                         Totals (&found)[kNumbers]) {
    static_assert(kNumbers <= 2, "there are no more slots");
    std::uint64_t* const slots = next_slots();
#pragma unroll
    for (unsigned i = 0; i < kNumbers; ++i) {
      const std::uint64_t of_warp = long_sum_of_warp(mine[i]);
      if (lane() == 0) slots[i * kWarp + warp()] = of_warp;
    }
    __syncthreads();
#pragma unroll
    for (unsigned i = 0; i < kNumbers; ++i) {
      found[i].of_lane = lane() < warps() ? slots[i * kWarp + lane()] : 0;
      found[i].total = long_sum_of_warp(found[i].of_lane);
    }
  }
  // Of this warp, and of the warps before it.
  __device__ __forceinline__ std::uint64_t of_warp(const Totals& totals) const {
    return __shfl_sync(kAll, totals.of_lane, static_cast<int>(warp()));
  }
  __device__ __forceinline__ std::uint64_t before_warp(const Totals& totals) const {
    return long_sum_of_warp(lane() < warp() ? totals.of_lane : 0);
  }
  // The warp in which the sum passes the target, which is below the total. Has no barrier.
  __device__ Holder holder(const Sums& sums, std::uint64_t target) const {
    const bool holds = target >= sums.before_lane && target - sums.before_lane < sums.of_lane;
    const int warp = __ffs(static_cast<int>(__ballot_sync(kAll, holds))) - 1;
    return {static_cast<unsigned>(warp), __shfl_sync(kAll, sums.before_lane, warp)};
  }

  __device__ unsigned lane() const { return threadIdx.x % kWarp; }
  __device__ unsigned warp() const { return threadIdx.x / kWarp; }
  __device__ unsigned warps() const { return warps_; }

 private:
  __device__ std::uint64_t* next_slots() {
    parity_ ^= 1;
    return shared_.slots[parity_];
  }

  Shared& shared_;
  const unsigned warps_;
  unsigned parity_ = 0;
};

}  // namespace cuda
}  // namespace minserve
