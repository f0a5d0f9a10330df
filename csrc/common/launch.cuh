// Launching on torch's stream: the right device, every error said.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

namespace minserve {
namespace cuda {

inline void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
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

constexpr int kThreads = 128;

// Rows of work in x, channels in y; both come from tensor shapes alone.
inline dim3 grid_of(long long rows, long long channels) {
  const long long blocks = (channels + kThreads - 1) / kThreads;
  if (rows > 2147483647LL || blocks > 65535) {
    throw std::runtime_error("minserve: too large for one launch: " + std::to_string(rows) +
                             " rows x " + std::to_string(channels) + " channels");
  }
  return dim3(static_cast<unsigned>(rows), static_cast<unsigned>(blocks));
}

// A launch that may begin before the kernel ahead of it on the stream has ended, where the GPU can
// (compute capability 9.0 and later): the kernel waits for the other's results itself.
class OverlappedLaunch {
 public:
  OverlappedLaunch(long long blocks, int threads, int shared_bytes, cudaStream_t stream) {
    int device = 0, major = 0;
    check(cudaGetDevice(&device), "cudaGetDevice");
    check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device),
          "compute capability");
    attribute_.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute_.val.programmaticStreamSerializationAllowed = 1;
    config_.gridDim = dim3(static_cast<unsigned>(blocks));
    config_.blockDim = dim3(static_cast<unsigned>(threads));
    config_.dynamicSmemBytes = static_cast<std::size_t>(shared_bytes);
    config_.stream = stream;
    config_.attrs = &attribute_;
    config_.numAttrs = major >= 9 ? 1 : 0;
  }
  OverlappedLaunch(const OverlappedLaunch&) = delete;
  OverlappedLaunch& operator=(const OverlappedLaunch&) = delete;
  const cudaLaunchConfig_t* config() const { return &config_; }

 private:
  cudaLaunchAttribute attribute_ = {};
  cudaLaunchConfig_t config_ = {};
};

// Blocks of a kernel that the current device runs at once. Also asks for the kernel's shared
// memory.
inline long long resident_blocks(const void* kernel, int threads, int shared_bytes) {
  int device = 0, processors = 0, each = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
        "shared memory of a scan");
  check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device),
        "number of multiprocessors");
  check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, kernel, threads,
                                                      static_cast<std::size_t>(shared_bytes)),
        "occupancy of a scan");
  return static_cast<long long>(each < 1 ? 1 : each) * processors;
}

}  // namespace cuda
}  // namespace minserve
