// Launching a kernel whose blocks take a multiprocessor each, in clusters: how much memory a block
// has, whether all clusters run at once.
#pragma once

#include "../common/launch.cuh"

namespace minserve {
namespace cuda {

template <auto kKernel>
class Clusters {
 public:
  // Of so many blocks; more than eight are not what every GPU with clusters must have room for.
  Clusters(int blocks, int threads, int device, cudaStream_t on)
      : blocks_(blocks), device_(device) {
    static thread_local int prepared = -1, room = 0;
    if (prepared != device) {
      check(cudaDeviceGetAttribute(&room, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
            "shared memory");
      if (blocks > 8) {
        check(cudaFuncSetAttribute(kernel(), cudaFuncAttributeNonPortableClusterSizeAllowed, 1),
              "clusters of blocks");
      }
      cudaFuncAttributes attributes;
      check(cudaFuncGetAttributes(&attributes, kernel()), "attributes of a kernel");
      room -= static_cast<int>(attributes.sharedSizeBytes);
      check(cudaFuncSetAttribute(kernel(), cudaFuncAttributeMaxDynamicSharedMemorySize, room),
            "shared memory of clusters of blocks");
      prepared = device;
    }
    room_ = room;
    attributes_[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes_[0].val.programmaticStreamSerializationAllowed = 1;
    attributes_[1].id = cudaLaunchAttributeClusterDimension;
    attributes_[1].val.clusterDim = {static_cast<unsigned>(blocks), 1, 1};
    config_.blockDim = dim3(static_cast<unsigned>(threads));
    config_.stream = on;
    config_.attrs = attributes_;
    config_.numAttrs = 2;
  }
  Clusters(const Clusters&) = delete;
  Clusters& operator=(const Clusters&) = delete;

  // Bytes of shared memory that a block may have.
  int room() const { return room_; }
  void arrange(int clusters, int shared_bytes) {
    config_.gridDim = dim3(static_cast<unsigned>(clusters * blocks_));
    config_.dynamicSmemBytes = static_cast<std::size_t>(shared_bytes);
  }
  // Throws where the GPU has no room for one.
  bool at_once() const {
    static thread_local int known_device = -1, most = 0;
    static thread_local std::size_t known_shared = 0;
    if (device_ != known_device || config_.dynamicSmemBytes != known_shared) {
      check(cudaOccupancyMaxActiveClusters(&most, kernel(), &config_), "clusters at once");
      known_device = device_, known_shared = config_.dynamicSmemBytes;
    }
    if (most == 0) {
      throw std::runtime_error("minserve: this GPU has no room for a cluster of " +
                               std::to_string(blocks_) + " blocks");
    }
    return static_cast<int>(config_.gridDim.x) <= most * blocks_;
  }
  template <class Args>
  void go(const Args& args) const {
    check(cudaLaunchKernelEx(&config_, kKernel, args), "clusters of blocks");
  }

 private:
  static const void* kernel() { return reinterpret_cast<const void*>(kKernel); }

  const int blocks_, device_;
  int room_ = 0;
  cudaLaunchAttribute attributes_[2] = {};
  cudaLaunchConfig_t config_ = {};
};

}  // namespace cuda
}  // namespace minserve
