// Launching a kernel whose blocks take a multiprocessor each, in clusters: how much memory a block
// has, whether all clusters run at once.
#pragma once

#include "../core/launch.cuh"

namespace minserve {
namespace cuda {

// What a thread has found out about a kernel on a device.
struct KnownClusters {
  int device = -1, room = 0;
  std::size_t shared = 0;  // with so many bytes a block,
  int at_once = -1;        // so many clusters
};

template <class Args>
class Clusters {
 public:
  // Of so many blocks; more than eight are not what every GPU with clusters must have room for.
  // `known`: of this kernel alone.
  Clusters(void (*kernel)(Args), KnownClusters& known, int blocks, int threads, int device,
           cudaStream_t on)
      : kernel_(kernel), known_(known), blocks_(blocks) {
    if (known.device != device) {
      int room = 0;
      check(cudaDeviceGetAttribute(&room, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
            "shared memory");
      if (blocks > 8) {
        check(cudaFuncSetAttribute(address(), cudaFuncAttributeNonPortableClusterSizeAllowed, 1),
              "clusters of blocks");
      }
      cudaFuncAttributes attributes;
      check(cudaFuncGetAttributes(&attributes, address()), "attributes of a kernel");
      room -= static_cast<int>(attributes.sharedSizeBytes);
      check(cudaFuncSetAttribute(address(), cudaFuncAttributeMaxDynamicSharedMemorySize, room),
            "shared memory of clusters of blocks");
      known = {device, room, 0, -1};
    }
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
  int room() const { return known_.room; }
  void arrange(int clusters, int shared_bytes) {
    config_.gridDim = dim3(static_cast<unsigned>(clusters * blocks_));
    config_.dynamicSmemBytes = static_cast<std::size_t>(shared_bytes);
  }
  // Throws where the GPU has no room for one.
  bool at_once() const {
    if (known_.at_once < 0 || known_.shared != config_.dynamicSmemBytes) {
      check(cudaOccupancyMaxActiveClusters(&known_.at_once, address(), &config_),
            "clusters at once");
      known_.shared = config_.dynamicSmemBytes;
    }
    if (known_.at_once == 0) {
      throw std::runtime_error("minserve: this GPU has no room for a cluster of " +
                               std::to_string(blocks_) + " blocks");
    }
    return static_cast<int>(config_.gridDim.x) <= known_.at_once * blocks_;
  }
  void go(const Args& args) const {
    check(cudaLaunchKernelEx(&config_, kernel_, args), "clusters of blocks");
  }

 private:
  const void* address() const { return reinterpret_cast<const void*>(kernel_); }

  void (*const kernel_)(Args);
  KnownClusters& known_;
  const int blocks_;
  cudaLaunchAttribute attributes_[2] = {};
  cudaLaunchConfig_t config_ = {};
};

}  // namespace cuda
}  // namespace minserve
