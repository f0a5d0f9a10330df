// Launching copy_words_.
#include <algorithm>

#include "../core/launch.cuh"
#include "kernel.cuh"

namespace minserve {
namespace cuda {

namespace {

std::int32_t* as_the_device_sees_it(std::int32_t* host, const char* name) {
  void* seen = nullptr;
  const cudaError_t error = cudaHostGetDevicePointer(&seen, host, 0);
  if (error == cudaErrorInvalidValue) {
    cudaGetLastError();
    throw std::runtime_error(std::string("minserve: copy_words_: ") + name +
                             " must be pinned memory or on the device");
  }
  check(error, "the device's address of the host's memory");
  return static_cast<std::int32_t*>(seen);
}

}  // namespace

void copy_words(CopyArgs args, int device, void* stream) {
  constexpr std::int64_t kMostBlocks = 1024;
  const DeviceGuard guard(device);
  if (args.to_on_host) args.to = as_the_device_sees_it(args.to, "to");
  if (args.source_on_host) args.source = as_the_device_sees_it(args.source, "source");
  const std::int64_t blocks = (args.count + kCopyThreads - 1) / kCopyThreads;
  const Grid grid = {dim3(static_cast<unsigned>(std::min(blocks, kMostBlocks))), kCopyThreads};
  launch_early<&copy_words_kernel>(grid, static_cast<cudaStream_t>(stream), "copy of words", args);
}

}  // namespace cuda
}  // namespace minserve
