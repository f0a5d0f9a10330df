// Launching fetch_.
#include <algorithm>

#include "../common/kernels.h"
#include "../common/launch.cuh"
#include "kernel.cuh"

namespace minserve {
namespace cuda {

void fetch(FetchArgs args, int device, void* stream) {
  constexpr std::int64_t kMostBlocks = 1024;
  const DeviceGuard guard(device);
  void* seen = nullptr;
  if (cudaHostGetDevicePointer(&seen, args.host, 0) != cudaSuccess) {
    cudaGetLastError();
    throw std::runtime_error("minserve: fetch_: host must be pinned memory");
  }
  args.host = static_cast<std::int32_t*>(seen);
  const std::int64_t blocks = (args.count + kFetchThreads - 1) / kFetchThreads;
  const Grid grid = {dim3(static_cast<unsigned>(std::min(blocks, kMostBlocks))), kFetchThreads};
  launch_early<&fetch_kernel>(grid, static_cast<cudaStream_t>(stream), "fetch", args);
}

}  // namespace cuda
}  // namespace minserve
