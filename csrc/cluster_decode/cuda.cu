// The launch of a cluster decode step: sequences are spread over as many clusters as run at once.
#include "cluster_launch.cuh"
#include "kernel.cuh"
#include "launch.h"

namespace minserve {
namespace cuda {

namespace {

template <template <class> class CellOf, int kTiles, int kWidth>
class Launch {
 public:
  Launch(ClusterDecodeArgs& args, int device, cudaStream_t on)
      : args_(args),
        clusters_(cluster::cluster_decode_kernel<CellOf, kTiles, kWidth>, known(), kClusterBlocks,
                  cluster::kThreads, device, on) {
    const ClusterLayout at(args.shape, kTokens);
    stages_ = (clusters_.room() - at.ring) / (kPairs * kChunkBytes);
    if (stages_ > cluster::kMostStages) stages_ = cluster::kMostStages;
    clusters_.arrange(divided_up_by(args.batch, kTokens), at.ring + stages_ * kPairs * kChunkBytes);
  }

  bool fits() const { return stages_ >= kFewestStages; }
  bool at_once() const { return clusters_.at_once(); }
  void launch() {
    args_.stages = stages_;
    clusters_.launch(args_);
  }

 private:
  static KnownClusters& known() {
    static thread_local KnownClusters found;
    return found;
  }
  static constexpr int kTokens = kTiles * 8, kFewestStages = 3;

  ClusterDecodeArgs& args_;
  Clusters<ClusterDecodeArgs> clusters_;
  int stages_ = 0;
};

template <template <class> class CellOf, int kWidth>
void launch(ClusterDecodeArgs& args, int device, cudaStream_t on) {
  Launch<CellOf, 1, kWidth> eight(args, device, on);
  Launch<CellOf, 2, kWidth> sixteen(args, device, on);
  Launch<CellOf, 4, kWidth> most(args, device, on);
  if (!eight.fits()) throw std::runtime_error("minserve: too wide a model for a clustered step");
  if (eight.at_once() || !sixteen.fits()) return eight.launch();
  if (sixteen.at_once() || !most.fits()) return sixteen.launch();
  most.launch();
}

template <template <class> class CellOf>
void launch_width(CellTag<CellOf>, ClusterDecodeArgs& args, int device, cudaStream_t on) {
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

void cluster_decode(ClusterDecodeArgs& args, int device, void* stream) {
  const DeviceGuard guard(device);
  const auto on = static_cast<cudaStream_t>(stream);
  with_cell<ClusterDecodeCells>(args.cell_kind,
                                [&](auto cell) { launch_width(cell, args, device, on); });
}

}  // namespace cuda
}  // namespace minserve
