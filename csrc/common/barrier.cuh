// Named barriers: some of a block's warps meet, some only leave word that they came by.
#pragma once

#include "device.cuh"

namespace minserve {
namespace cuda {

// kThreads: how many threads, in whole warps, arrive or wait in one round. Orders shared memory as
// __syncthreads does. Number 0 is that of __syncthreads.
template <int kThreads>
struct Barrier {
  static __device__ __forceinline__ void sync(int number) { barrier_sync<kThreads>(number); }
  static __device__ __forceinline__ void arrive(int number) { barrier_arrive<kThreads>(number); }
};

}  // namespace cuda
}  // namespace minserve
