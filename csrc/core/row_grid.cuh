// The grids of kernels whose blocks take groups of rows, side by side along the channels. Needs no
// CUDA runtime.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace minserve {
namespace cuda {

constexpr int kThreads = 128;

struct Grid {
  dim3 blocks;
  unsigned threads;
  int shared_bytes = 0;
  unsigned cluster = 1;  // neighbours along x that reach each other's shared memory
};

// Blocks enough that every multiprocessor of a large GPU has some.
constexpr long long kEnoughBlocks = 264;

// For `groups` of rows, each of which takes `per_group` threads: a group's are spread evenly over
// as few blocks of up to kThreads as hold them, or to more and smaller ones where all groups' would
// be fewer than kEnoughBlocks. From shapes alone, so that a launch can be captured; what a thread
// computes does not depend on it. Threads and groups are rounded up, so some have nothing to do.
inline Grid row_grid(long long groups, long long per_group) {
  const long long fewest = (per_group + kThreads - 1) / kThreads, most = (per_group + 31) / 32;
  const long long wanted = (kEnoughBlocks + groups - 1) / groups;
  const long long blocks = wanted < fewest ? fewest : wanted > most ? most : wanted;
  const long long high = (groups + 65534) / 65535;  // the grid's y and z end there
  if (high > 65535 || blocks > 2147483647LL) {
    throw std::runtime_error("minserve: too large for one launch: " + std::to_string(groups) +
                             " groups of rows x " + std::to_string(per_group) + " threads");
  }
  const long long threads = ((per_group + blocks - 1) / blocks + 31) / 32 * 32;
  return {dim3(static_cast<unsigned>(blocks), static_cast<unsigned>((groups + high - 1) / high),
               static_cast<unsigned>(high)),
          static_cast<unsigned>(threads)};
}
__device__ __forceinline__ std::int64_t row_group() {
  return static_cast<std::int64_t>(blockIdx.z) * gridDim.y + blockIdx.y;
}
__device__ __forceinline__ std::int64_t thread_of_group() {
  return static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}

}  // namespace cuda
}  // namespace minserve
