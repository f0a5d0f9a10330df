// Random delays where warps wait for each other, in builds with MINSERVE_DELAYS. A missing wait
// that timing hides otherwise then changes results, and tests that compare bits fail.
#pragma once

namespace minserve {
namespace cuda {

// One warp in so many (a power of two), by chance, stops for about so many nanoseconds.
__device__ __forceinline__ void delay(unsigned one_in, unsigned nanoseconds) {
#ifdef MINSERVE_DELAYS
  const unsigned active = __activemask(), block = blockIdx.x * 977u, warp = threadIdx.x / 32;
  const unsigned seed = (static_cast<unsigned>(clock64()) ^ warp * 40503u ^ block) * 2654435761u;
  const unsigned chance = __shfl_sync(active, seed, __ffs(active) - 1) >> 16;
  if (chance % one_in == 0) __nanosleep(nanoseconds);
#endif
}

}  // namespace cuda
}  // namespace minserve
