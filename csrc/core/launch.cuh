// Launching on torch's stream: the right device, every error said.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "row_grid.cuh"

namespace minserve {
namespace cuda {

// Throws what failed and what CUDA says of it. Whether the device is lost is for the caller to ask
// the device: the status of one call does not tell that for every library (engine/NOTES.md).
inline void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // what is said here is not the next launch's error
  throw std::runtime_error(
      std::string("minserve: ") + what + ": " + cudaGetErrorString(error) +
      (error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction
           ? " (built for other GPUs: set MINSERVE_CUDA_ARCHS and build again)"
           : ""));
}

// The runtime is linked statically, so its current device is looked at rather than torch's.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) : wanted_(device) {
    check(cudaGetDevice(&before_), "cudaGetDevice");
    if (before_ != wanted_) check(cudaSetDevice(wanted_), "cudaSetDevice");
  }
  ~DeviceGuard() {
    if (before_ != wanted_) cudaSetDevice(before_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int before_ = 0;
  int wanted_ = 0;
};

inline int multiprocessors(int device) {
  static thread_local int known = -1, count = 0;
  if (device != known) {
    check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device),
          "number of multiprocessors");
    known = device;
  }
  return count;
}

// Counters of tickets have 32 bits and are passed a few times by each block.
constexpr long long kMostTickets = 4294967295LL - 1000000;

// Rows of work in x, channels in y; both come from tensor shapes alone.
inline dim3 grid_of(long long rows, long long channels) {
  const long long blocks = (channels + kThreads - 1) / kThreads;
  if (rows > 2147483647LL || blocks > 65535) {
    throw std::runtime_error("minserve: too large for one launch: " + std::to_string(rows) +
                             " rows x " + std::to_string(channels) + " channels");
  }
  return dim3(static_cast<unsigned>(rows), static_cast<unsigned>(blocks));
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

// How a kernel is launched, with the attributes that it asks for.
class LaunchConfig {
 public:
  LaunchConfig(dim3 blocks, unsigned threads, int shared_bytes, cudaStream_t stream) {
    config_.gridDim = blocks;
    config_.blockDim = dim3(threads);
    config_.dynamicSmemBytes = static_cast<std::size_t>(shared_bytes);
    config_.stream = stream;
  }
  LaunchConfig(const LaunchConfig&) = delete;
  LaunchConfig& operator=(const LaunchConfig&) = delete;

  // The kernel may begin before the one ahead of it on the stream has ended, where the GPU can
  // (programmatic dependent launch).
  LaunchConfig& early() {
    attribute(cudaLaunchAttributeProgrammaticStreamSerialization)
        .programmaticStreamSerializationAllowed = 1;
    return *this;
  }
  // Neighbours in the grid that reach each other's shared memory.
  LaunchConfig& cluster(dim3 blocks) {
    attribute(cudaLaunchAttributeClusterDimension).clusterDim = {blocks.x, blocks.y, blocks.z};
    return *this;
  }
  // All blocks run at once, or the launch fails.
  LaunchConfig& cooperative() {
    attribute(cudaLaunchAttributeCooperative).cooperative = 1;
    return *this;
  }

  template <class Kernel, class... Arguments>
  void launch(Kernel kernel, const char* what, const Arguments&... arguments) {
    check(cudaLaunchKernelEx(get(), kernel, arguments...), what);
  }
  const cudaLaunchConfig_t* get() {
    config_.attrs = attributes_;
    return &config_;
  }

 private:
  cudaLaunchAttributeValue& attribute(cudaLaunchAttributeID id) {
    cudaLaunchAttribute& next = attributes_[config_.numAttrs++];
    next.id = id;
    return next.val;
  }

  cudaLaunchConfig_t config_ = {};
  cudaLaunchAttribute attributes_[3] = {};
};

// The kernel may begin before the one ahead of it on the stream has ended, where the GPU can. So
// every thread of it calls wait_for_previous_kernel(), or meets one that has at a barrier, before
// it reads or writes global memory and before it returns: then whoever waits for this kernel has
// waited for all before it.
template <auto kKernel, class... Arguments>
void launch_early(const Grid& grid, cudaStream_t stream, const char* what,
                  const Arguments&... arguments) {
  LaunchConfig config(grid.blocks, grid.threads, grid.shared_bytes, stream);
  if (waits_for_previous<kKernel>()) {
    config.early();
    if (grid.cluster > 1) config.cluster(dim3(grid.cluster));
  }
  config.launch(kKernel, what, arguments...);
}

// Blocks of a kernel that the current device runs at once. Also asks for the kernel's shared
// memory.
inline long long resident_blocks(const void* kernel, int threads, int shared_bytes) {
  int device = 0, each = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
        "shared memory of a scan");
  check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, kernel, threads,
                                                      static_cast<std::size_t>(shared_bytes)),
        "occupancy of a scan");
  return static_cast<long long>(each < 1 ? 1 : each) * multiprocessors(device);
}

}  // namespace cuda
}  // namespace minserve
