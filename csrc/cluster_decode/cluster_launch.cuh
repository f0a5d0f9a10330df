// The launch of a kernel in clusters whose blocks take a multiprocessor each: how much shared
// memory a block has, and whether all clusters run at once.
#pragma once

#include "../core/launch.cuh"

namespace minserve {
namespace cuda {

// What a thread has found out about a kernel on a device.
struct KnownClusters {
  int device = -1, room = 0;
  int shared = 0;    // with so many bytes a block,
  int at_once = -1;  // so many clusters
};

template <class Args>
class Clusters {
 public:
  // Of so many blocks; more than eight are not what every GPU with clusters must have room for.
  // `known`: of this kernel alone.
  Clusters(void (*kernel)(Args), KnownClusters& known, int blocks, int threads, int device,
           cudaStream_t stream)
      : kernel_(kernel),
        known_(known),
        blocks_(static_cast<unsigned>(blocks)),
        threads_(static_cast<unsigned>(threads)),
        stream_(stream) {
    if (known.device == device) return;
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
  Clusters(const Clusters&) = delete;
  Clusters& operator=(const Clusters&) = delete;

  // Bytes of shared memory that a block may have.
  int room() const { return known_.room; }
  void arrange(int clusters, int shared_bytes) {
    clusters_ = clusters;
    shared_bytes_ = shared_bytes;
  }
  // Throws where the GPU has no room for one.
  bool at_once() const {
    if (known_.at_once < 0 || known_.shared != shared_bytes_) {
      LaunchConfig config(grid(), threads_, shared_bytes_, stream_);
      config.early().cluster(dim3(blocks_));
      check(cudaOccupancyMaxActiveClusters(&known_.at_once, address(), config.get()),
            "clusters at once");
      known_.shared = shared_bytes_;
    }
    if (known_.at_once == 0) {
      throw std::runtime_error("minserve: this GPU has no room for a cluster of " +
                               std::to_string(blocks_) + " blocks");
    }
    return clusters_ <= known_.at_once;
  }
  void launch(const Args& args) const {
    LaunchConfig(grid(), threads_, shared_bytes_, stream_)
        .early()
        .cluster(dim3(blocks_))
        .launch(kernel_, "clusters of blocks", args);
  }

 private:
  dim3 grid() const { return dim3(static_cast<unsigned>(clusters_) * blocks_); }
  const void* address() const { return reinterpret_cast<const void*>(kernel_); }

  void (*const kernel_)(Args);
  KnownClusters& known_;
  const unsigned blocks_, threads_;
  const cudaStream_t stream_;
  int clusters_ = 0, shared_bytes_ = 0;
};

}  // namespace cuda
}  // namespace minserve
