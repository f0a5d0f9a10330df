// GEMMs of many tokens: the launches of the persistent kernel.
#include "persistent_kernel.cuh"

#include <algorithm>

#include "launch.h"
#include "../core/tma_descriptor.cuh"
#include "heuristics_persistent.h"

namespace minserve {
namespace cuda {

namespace {

struct Call {
  const GemmArgs& args;
  const void *weight, *input;
  int device;
  cudaStream_t stream;

  template <class S>
  void launch() const {
    const CUtensorMap weights =
        tensor_map_of(weight, S::kGates * args.channels, args.inputs, S::kUnitChannels);
    const CUtensorMap inputs = tensor_map_of(input, args.tokens, args.inputs, S::kTokens);
    CUtensorMap side = inputs;
    if (S::kGates == 1 && args.epilogue != Epilogue::logits) {
      side = tensor_map_of(args.epilogue == Epilogue::residual ? args.x : args.out, args.tokens,
                           args.channels, S::kPieceTokens);
    }
    static thread_local int asked = -1;  // every device is asked for itself
    if (device != asked) {
      check(cudaFuncSetAttribute(reinterpret_cast<const void*>(&persistent_kernel<S>),
                                 cudaFuncAttributeMaxDynamicSharedMemorySize, S::kShared),
            "shared memory of a persistent GEMM");
      asked = device;
    }
    const std::int64_t tiles = (args.channels + S::kChannels - 1) / S::kChannels *
                               ((args.tokens + S::kTokens - 1) / S::kTokens);
    const std::int64_t most = S::kIsSplit ? tiles : multiprocessors(device);
    const auto parts = static_cast<unsigned>(S::kSplitK);
    LaunchConfig config(dim3(static_cast<unsigned>(std::min(tiles, most)), 1, parts), S::kThreads,
                        S::kShared, stream);
    if (S::kIsSplit) config.cluster(dim3(1, 1, parts));
    config.early().launch(&persistent_kernel<S>, "persistent GEMM", weights, inputs, side, args);
  }

  // Serial split-K: BatchInvariantHeuristic has chosen one of these.
  template <class Step>
  void launch_serial_split_k(TileConfig tile, int parts) const {
    if constexpr (Step::kGates == 1) {
      if (parts == 4) return launch<PersistentShape<Step, 1, 1, 64, 4, true>>();  // each has two
      if (parts == 2) return launch<PersistentShape<Step, 1, 1, 64, 2, true>>();
      if (tile == TileConfig::persistent_192_128)
        return launch<PersistentShape<Step, 3, 1, 128, 1, true>>();
    }
    if constexpr (Step::kGates < 3) {
      if (tile == TileConfig::persistent_64_32)
        return launch<PersistentShape<Step, 1, 1, 32, 1, true>>();
      if (tile == TileConfig::persistent_64_64)
        return launch<PersistentShape<Step, 1, 1, 64, 1, true>>();
      if (tile == TileConfig::persistent_128_64)
        return launch<PersistentShape<Step, 2, 1, 64, 1, true>>();
      if (tile == TileConfig::persistent_128_128)
        return launch<PersistentShape<Step, 2, 1, 128, 1, true>>();
    }
    if (tile == TileConfig::persistent_192_96)
      return launch<PersistentShape<Step, 3, 1, 96, 1, true>>();
    launch<PersistentShape<Step, 3, 1, 64, 1, true>>();
  }
  template <class Step>
  void launch_tile(const GemmConfig& config) const {
    if (config.serial_split_k > 1) return launch_serial_split_k<Step>(config.tile, config.split_k);
    if (config.tile == TileConfig::persistent_192_64)
      return launch_split_k<Step, 3, 64>(config.split_k);
    if (config.tile == TileConfig::persistent_192_96)
      return launch<PersistentShape<Step, 3, 1, 96>>();
    if constexpr (Step::kGates < 3) {
      switch (config.tile) {
        case TileConfig::persistent_64_32:
          return launch<PersistentShape<Step, 1, 1, 32>>();
        case TileConfig::persistent_64_64:
          return launch_split_k<Step, 1, 64>(config.split_k);
        case TileConfig::persistent_128_64:
          return launch_split_k<Step, 2, 64>(config.split_k);
        case TileConfig::persistent_128_128:
          return launch_split_k<Step, 2, 128>(config.split_k);
        case TileConfig::persistent_256_128:
          return launch<PersistentShape<Step, 2, 2, 128>>();
        default:
          break;
      }
    }
    launch<PersistentShape<Step, 3, 1, 128>>();
  }
  template <class Step, int kGroups, int kTokens>
  void launch_split_k(int parts) const {
    if constexpr (Step::kGates == 1) {
      if (parts == 2) return launch<PersistentShape<Step, kGroups, 1, kTokens, 2>>();
      if constexpr (kGroups == 1) {
        if (parts == 4) return launch<PersistentShape<Step, 1, 1, kTokens, 4>>();
      }
    }
    launch<PersistentShape<Step, kGroups, 1, kTokens>>();
  }
};

}  // namespace

void gemm_persistent(const GemmConfig& config, const GemmArgs& args, const void* weight,
                     const void* input, std::optional<CellKind> cell, int device, void* stream) {
  const Call call{args, weight, input, device, static_cast<cudaStream_t>(stream)};
  with_step(args.epilogue, cell, [&](auto step) { call.launch_tile<decltype(step)>(config); });
}

}  // namespace cuda
}  // namespace minserve
