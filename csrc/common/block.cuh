// What the threads of a block find together: sums, bests, sums of those before.
//
// All threads call each of these, at the same place; each has one barrier and gives every thread
// the result. Two rows of slots take turns, so that none is written while it is still read.
#pragma once

#include <cstdint>

#include "device.cuh"

namespace minserve {
namespace cuda {

constexpr unsigned kWarp = 32;
constexpr unsigned kAll = 0xffffffffu;

template <class T, class Combine>
__device__ __forceinline__ T across_warp(T mine, Combine combine) {
  const int lane = static_cast<int>(threadIdx.x % kWarp);
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    mine = combine(mine, __shfl_sync(kAll, mine, lane ^ distance));
  }
  return mine;
}

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

// One dimension of threads, in whole warps.
class Block {
 public:
  struct Shared {
    std::uint64_t slots[2][kWarp];
  };
  struct Sums {
    std::uint64_t before;       // of the threads before this one
    std::uint64_t before_warp;  // of the warps before this one
    std::uint64_t warp;         // of this warp
    std::uint64_t total;
  };

  __device__ explicit Block(Shared& shared) : shared_(shared) {}

  // `nothing` combined with x is x; T has eight bytes at most.
  template <class T, class Combine>
  __device__ T all(T mine, T nothing, Combine combine) {
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
    const std::uint64_t of_lane = lane() < warps() ? slots[lane()] : 0;
    const std::uint64_t of_warps = sum_so_far(of_lane);
    Sums sums;
    sums.total = __shfl_sync(kAll, of_warps, static_cast<int>(kWarp - 1));
    sums.warp = __shfl_sync(kAll, of_lane, static_cast<int>(warp()));
    sums.before_warp = __shfl_sync(kAll, of_warps, static_cast<int>(warp())) - sums.warp;
    sums.before = sums.before_warp + so_far - mine;
    return sums;
  }

  __device__ unsigned lane() const { return threadIdx.x % kWarp; }
  __device__ unsigned warp() const { return threadIdx.x / kWarp; }
  __device__ unsigned warps() const { return blockDim.x / kWarp; }

 private:
  __device__ std::uint64_t* next_slots() {
    turn_ ^= 1;
    return shared_.slots[turn_];
  }

  Shared& shared_;
  unsigned turn_ = 0;
};

}  // namespace cuda
}  // namespace minserve
