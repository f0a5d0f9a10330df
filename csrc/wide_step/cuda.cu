// The launch of a wide step: as few sequences for each cluster as all clusters together allow.
#include "../cluster_step/clusters.cuh"
#include "kernel.cuh"
#include "launch.h"

namespace minserve {
namespace cuda {

namespace {

template <template <class> class CellOf, int kTokens>
class Launch {
 public:
  Launch(const WideStepArgs& args, int device, cudaStream_t on)
      : args_(args),
        clusters_(wide::wide_step_kernel<CellOf, kTokens>, known(), kWideBlocks, wide::kThreads,
                  device, on) {
    args_.at = WideLayout(args.wide, kTokens);
    args_.stages = (clusters_.room() - args_.at.ring) / kRingStageBytes;
    if (args_.stages > wide::kMostStages) args_.stages = wide::kMostStages;
    clusters_.arrange(divided_up_by(args.batch, kTokens),
                      args_.at.ring + args_.stages * kRingStageBytes);
  }

  bool fits() const { return args_.stages >= wide::kFewestStages; }
  bool at_once() const { return clusters_.at_once(); }
  void go() const { clusters_.go(args_); }

 private:
  static KnownClusters& known() {
    static thread_local KnownClusters found;
    return found;
  }
  static constexpr int kRingStageBytes = kWideGroups * slabs_of_stage(kTokens) * kSlabBytes;

  WideStepArgs args_;
  Clusters<WideStepArgs> clusters_;
};

// With the first of these numbers of tokens of which all clusters run at once, else the last that
// fits. Whether one did.
template <template <class> class CellOf, int kTokens, int... kMore>
bool launch(const WideStepArgs& args, int device, cudaStream_t on) {
  const Launch<CellOf, kTokens> so(args, device, on);
  const bool at_once = so.fits() && so.at_once();  // throws where not one cluster runs
  if constexpr (sizeof...(kMore) > 0) {
    if (!at_once && launch<CellOf, kMore...>(args, device, on)) return true;
  }
  if (so.fits()) so.go();
  return so.fits();
}

template <template <class> class CellOf>
void launch_cell(const WideStepArgs& args, int device, cudaStream_t on) {
  if (!launch<CellOf, 16, 24, 40, 56, 72, 80>(args, device, on)) {
    throw std::runtime_error("minserve: too wide a model for a wide step");
  }
}

}  // namespace

void wide_step(const ClusterStepArgs& given, int device, void* stream) {
  const DeviceGuard guard(device);
  const WideStepArgs args{given, {given.shape}, {}};
  const auto on = static_cast<cudaStream_t>(stream);
  args.shape.gates == 2 ? launch_cell<MinGruCell>(args, device, on)
                        : launch_cell<MinLstmCell>(args, device, on);
}

}  // namespace cuda
}  // namespace minserve
