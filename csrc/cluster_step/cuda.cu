// The launch of a clustered step: as few sequences for each cluster as all clusters together allow.
#include "../common/launch.cuh"
#include "kernel.cuh"
#include "launch.h"

namespace minserve {
namespace cuda {

namespace {

template <template <class> class CellOf, int kTiles, int kWidth>
class Launch {
 public:
  Launch(ClusterStepArgs& args, int device, cudaStream_t on) : args_(args), device_(device) {
    static thread_local int prepared = -1, most_shared = 0;
    if (prepared != device) {
      check(cudaDeviceGetAttribute(&most_shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
            "shared memory");
      check(cudaFuncSetAttribute(kernel(), cudaFuncAttributeNonPortableClusterSizeAllowed, 1),
            "clusters of a clustered step");
      cudaFuncAttributes attributes;
      check(cudaFuncGetAttributes(&attributes, kernel()), "attributes of a kernel");
      most_shared -= static_cast<int>(attributes.sharedSizeBytes);
      check(
          cudaFuncSetAttribute(kernel(), cudaFuncAttributeMaxDynamicSharedMemorySize, most_shared),
          "shared memory of a clustered step");
      prepared = device;
    }
    const ClusterLayout at(args.shape, kTokens);
    stages_ = (most_shared - at.ring) / (kPairs * kChunkBytes);
    if (stages_ > clustered::kMostStages) stages_ = clustered::kMostStages;
    const int clusters = divided_up_by(args.batch, kTokens);
    attributes_[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes_[0].val.programmaticStreamSerializationAllowed = 1;
    attributes_[1].id = cudaLaunchAttributeClusterDimension;
    attributes_[1].val.clusterDim = {kClusterBlocks, 1, 1};
    config_.gridDim = dim3(static_cast<unsigned>(clusters * kClusterBlocks));
    config_.blockDim = dim3(clustered::kThreads);
    config_.dynamicSmemBytes = static_cast<std::size_t>(at.ring + stages_ * kPairs * kChunkBytes);
    config_.stream = on;
    config_.attrs = attributes_;
    config_.numAttrs = 2;
  }

  bool fits() const { return stages_ >= kFewestStages; }
  // Whether all clusters run at once. Throws where the GPU has no room for one.
  bool at_once() const {
    static thread_local int known_device = -1, known_shared = -1, most = 0;
    const int shared = static_cast<int>(config_.dynamicSmemBytes);
    if (device_ != known_device || shared != known_shared) {
      check(cudaOccupancyMaxActiveClusters(&most, kernel(), &config_), "clusters at once");
      known_device = device_, known_shared = shared;
    }
    if (most == 0) {
      throw std::runtime_error("minserve: this GPU has no room for a cluster of " +
                               std::to_string(kClusterBlocks) + " blocks");
    }
    return static_cast<int>(config_.gridDim.x) <= most * kClusterBlocks;
  }
  void go() {
    args_.stages = stages_;
    check(cudaLaunchKernelEx(&config_, &clustered::cluster_step_kernel<CellOf, kTiles, kWidth>,
                             args_),
          "a clustered step");
  }

 private:
  static constexpr int kTokens = kTiles * 8, kFewestStages = 3;

  static const void* kernel() {
    return reinterpret_cast<const void*>(&clustered::cluster_step_kernel<CellOf, kTiles, kWidth>);
  }

  ClusterStepArgs& args_;
  const int device_;
  cudaLaunchAttribute attributes_[2] = {};
  cudaLaunchConfig_t config_ = {};
  int stages_ = 0;
};

template <template <class> class CellOf, int kWidth>
void launch(ClusterStepArgs& args, int device, cudaStream_t on) {
  Launch<CellOf, 1, kWidth> eight(args, device, on);
  Launch<CellOf, 2, kWidth> sixteen(args, device, on);
  Launch<CellOf, 4, kWidth> most(args, device, on);
  if (!eight.fits()) throw std::runtime_error("minserve: too wide a model for a clustered step");
  if (eight.at_once() || !sixteen.fits()) return eight.go();
  if (sixteen.at_once() || !most.fits()) return sixteen.go();
  most.go();
}

template <template <class> class CellOf>
void launch_width(ClusterStepArgs& args, int device, cudaStream_t on) {
  static_assert(kMostClusterWidth == 4 * kClusterWidthUnit, "a kernel for each width");
  switch (args.shape.width / kClusterWidthUnit) {
    case 1:
      return launch<CellOf, kClusterWidthUnit>(args, device, on);
    case 2:
      return launch<CellOf, 2 * kClusterWidthUnit>(args, device, on);
    case 3:
      return launch<CellOf, 3 * kClusterWidthUnit>(args, device, on);
    default:
      return launch<CellOf, 4 * kClusterWidthUnit>(args, device, on);
  }
}

}  // namespace

void cluster_step(ClusterStepArgs& args, int device, void* stream) {
  const DeviceGuard guard(device);
  const auto on = static_cast<cudaStream_t>(stream);
  args.shape.gates == 2 ? launch_width<MinGruCell>(args, device, on)
                        : launch_width<MinLstmCell>(args, device, on);
}

}  // namespace cuda
}  // namespace minserve
