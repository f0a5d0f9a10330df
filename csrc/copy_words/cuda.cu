// Launching copy_words_.
#include <algorithm>

#include "../common/kernels.h"
#include "../common/launch.cuh"
#include "kernel.cuh"

namespace minserve {
namespace cuda {

namespace {

std::int32_t* as_the_device_sees_it(std::int32_t* host, const char* name) {
  void* seen = nullptr;
  if (cudaHostGetDevicePointer(&seen, host, 0) != cudaSuccess) {
    cudaGetLastError();
    throw std::runtime_error(std::string("minserve: copy_words_: ") + name +
                             " must be pinned memory or on the device");
  }
  return static_cast<std::int32_t*>(seen);
}

}  // namespace

void copy_words(CopyArgs args, int device, void* stream) {
  constexpr std::int64_t kMostBlocks = 1024;
  const DeviceGuard guard(device);
  if (args.to_host) args.to = as_the_device_sees_it(args.to, "to");
  if (args.from_host) args.from = as_the_device_sees_it(args.from, "source");
  const std::int64_t blocks = (args.count + kCopyThreads - 1) / kCopyThreads;
  const Grid grid = {dim3(static_cast<unsigned>(std::min(blocks, kMostBlocks))), kCopyThreads};
  launch_early<&copy_words_kernel>(grid, static_cast<cudaStream_t>(stream), "copy of words", args);
}

}  // namespace cuda
}  // namespace minserve
