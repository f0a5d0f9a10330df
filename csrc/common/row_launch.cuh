// Starting kernels whose blocks take groups of rows, side by side along the channels; and early,
// where the GPU can.
#pragma once

#include <cstdint>

#include "launch.cuh"

namespace minserve {
namespace cuda {

// Blocks enough that every multiprocessor of a large GPU has some.
constexpr long long kEnoughBlocks = 264;

struct RowGrid {
  dim3 blocks;
  unsigned threads;
};

// For `groups` of rows, each of which takes `per_group` threads: a group's are dealt evenly to as
// few blocks of up to kThreads as hold them, or to more and smaller ones where all groups' would be
// fewer than kEnoughBlocks. From shapes alone, so that a launch can be captured; what a thread
// computes does not depend on it. Threads and groups are rounded up, so some have nothing to do.
inline RowGrid row_grid(long long groups, long long per_group) {
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

// Whether a kernel's code on the current device holds the wait. Code made from PTX for older GPUs
// does not, whatever GPU it runs on.
template <auto kKernel>
bool waits_for_previous() {
  static thread_local int asked = -1;
  static thread_local bool waits = false;
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  if (device != asked) {
    cudaFuncAttributes attributes;
    check(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kKernel)),
          "attributes of a kernel");
    waits = attributes.ptxVersion >= 90;
    asked = device;
  }
  return waits;
}

// The kernel may begin before the one ahead of it on the stream has ended. So every thread of it
// calls wait_for_previous_kernel() before it reads or writes global memory, and before it returns:
// then whoever waits for this kernel has waited for all before it.
template <auto kKernel, class... Arguments>
void launch_early(const RowGrid& grid, cudaStream_t stream, const char* what,
                  const Arguments&... arguments) {
  cudaLaunchAttribute early = {};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid.blocks;
  config.blockDim = dim3(grid.threads);
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = waits_for_previous<kKernel>() ? 1 : 0;
  check(cudaLaunchKernelEx(&config, kKernel, arguments...), what);
}

}  // namespace cuda
}  // namespace minserve
