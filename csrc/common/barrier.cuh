// Named barriers: some of a block's warps meet, some only leave word that they came by.
#pragma once

namespace minserve {
namespace cuda {

// kThreads: how many threads, in whole warps, arrive or wait in one round. Orders shared memory as
// __syncthreads does. Number 0 is that of __syncthreads.
template <int kThreads>
struct Barrier {
  static __device__ __forceinline__ void sync(int number) {
    asm volatile("barrier.cta.sync %0, %1;" ::"r"(number), "n"(kThreads) : "memory");
  }
  static __device__ __forceinline__ void arrive(int number) {
    asm volatile("barrier.cta.arrive %0, %1;" ::"r"(number), "n"(kThreads) : "memory");
  }
};

}  // namespace cuda
}  // namespace minserve
