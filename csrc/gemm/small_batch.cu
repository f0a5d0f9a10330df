// GEMMs on Hopper: the kernel that a call takes, its tensor maps, its launch.
#include "../core/launch.cuh"
#include "heuristics.h"
#include "embedding.cuh"
#include "heuristics_deterministic.h"
#include "small_batch_kernel.cuh"
#include "launch.h"
#include "../core/tma_descriptor.cuh"

namespace minserve {
namespace cuda {

namespace {

template <class S>
void launch_shape(const GemmArgs& args, const void* weight, const void* input, int parts,
                  int device, cudaStream_t stream) {
  const CUtensorMap weights =
      tensor_map_of(weight, S::kGates * args.channels, args.inputs, kBlockRows);
  const CUtensorMap inputs = tensor_map_of(input, args.tokens, args.inputs, S::kTokens);
  static thread_local int asked = -1;  // every device is asked for itself
  if (device != asked) {
    check(cudaFuncSetAttribute(reinterpret_cast<const void*>(&small_batch_kernel<S>),
                               cudaFuncAttributeMaxDynamicSharedMemorySize, S::shared_bytes(8)),
          "shared memory of a GEMM");
    asked = device;
  }
  const dim3 blocks(static_cast<unsigned>((args.tokens + S::kTokens - 1) / S::kTokens),
                    static_cast<unsigned>((args.channels + S::kChannels - 1) / S::kChannels),
                    static_cast<unsigned>(parts));
  LaunchConfig(blocks, S::kThreads, S::shared_bytes(parts), stream)
      .early()
      .cluster(dim3(1, 1, static_cast<unsigned>(parts)))
      .launch(&small_batch_kernel<S>, "GEMM", weights, inputs, args);
}

// In one of the tiles of small batches, if `config` names one.
template <class Step>
bool launch_small_batch(const GemmConfig& config, const GemmArgs& args, const void* weight,
                        const void* input, int device, cudaStream_t stream) {
  const auto launch = [&](auto shape) {
    launch_shape<decltype(shape)>(args, weight, input, config.split_k, device, stream);
    return true;
  };
  switch (config.tile) {
    case TileConfig::tokens_8:
      return launch(SmallBatchShape<Step, 8>());
    case TileConfig::tokens_16:
      return launch(SmallBatchShape<Step, 16>());
    case TileConfig::tokens_32:
      return launch(SmallBatchShape<Step, 32>());
    case TileConfig::tokens_64:
      return launch(SmallBatchShape<Step, 64, true>());
    default:
      return false;
  }
}

template <class Step>
void launch_gemm(GemmArgs args, const void* weight, const void* input, std::optional<CellKind> cell,
                 int device, cudaStream_t stream) {
  constexpr int kGates = Step::kGates;
  const GemmConfig config =
      args.batch_invariant
          ? BatchInvariantHeuristic(args.channels, args.inputs, kGates, args.tokens).choose()
          : SmallBatchHeuristic(args.channels, args.inputs, kGates, args.tokens).choose();
  if (launch_small_batch<Step>(config, args, weight, input, device, stream)) return;
  args.serial_split_k = config.serial_split_k;
  gemm_persistent(config, args, weight, input, cell, device, stream);
}

template <class Step>
void launch_small_batch_only(const GemmArgs& args, const void* weight, const void* input,
                             int device, cudaStream_t stream) {
  const SmallBatchHeuristic heuristic(args.channels, args.inputs, Step::kGates, args.tokens);
  launch_small_batch<Step>(heuristic.choose_small_batch(), args, weight, input, device, stream);
}

}  // namespace

void gemm(const GemmArgs& args, const void* weight, const void* input, std::optional<CellKind> cell,
          int device, void* stream) {
  const DeviceGuard guard(device);
  const auto on = static_cast<cudaStream_t>(stream);
  if (args.epilogue == Epilogue::wide_residual) {
    return launch_small_batch_only<WideResidual>(args, weight, input, device, on);
  }
  if (args.epilogue == Epilogue::convolve) {
    return launch_small_batch_only<Convolve>(args, weight, input, device, on);
  }
  with_step(args.epilogue, cell,
            [&](auto step) { launch_gemm<decltype(step)>(args, weight, input, cell, device, on); });
}

void embed(const EmbedArgs& args, int device, void* stream) {
  const DeviceGuard guard(device);
  const long long quads = args.channels / kQuad;
  const Grid grid{dim3(static_cast<unsigned>(args.tokens),
                       static_cast<unsigned>((quads + kThreads - 1) / kThreads)),
                  kThreads};
  launch_early<&embed_kernel>(grid, static_cast<cudaStream_t>(stream), "embedding", args);
}

}  // namespace cuda
}  // namespace minserve
