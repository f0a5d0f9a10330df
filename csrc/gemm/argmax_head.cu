// The head that finds bests: its tensor maps and its launch.
#include "argmax_head.cuh"

#include <algorithm>

#include "../core/launch.cuh"
#include "launch.h"
#include "../core/tma_descriptor.cuh"

namespace minserve {
namespace cuda {

void linear_best(const BestArgs& args, const void* weight, const void* input, int device,
                 void* stream) {
  using S = BestShape;
  const DeviceGuard guard(device);
  static thread_local int asked = -1;  // every device is asked for itself
  if (device != asked) {
    check(cudaFuncSetAttribute(reinterpret_cast<const void*>(&best_kernel),
                               cudaFuncAttributeMaxDynamicSharedMemorySize, S::kShared),
          "shared memory of a head");
    asked = device;
  }
  const CUtensorMap weights = map_of(weight, args.channels, args.inputs, S::kColumns);
  const CUtensorMap inputs = map_of(input, args.tokens, args.inputs, S::kTokens);
  const std::int64_t tiles = (args.tokens + S::kTokens - 1) / S::kTokens * args.tiles;
  const std::int64_t blocks = std::min<std::int64_t>(tiles, multiprocessors(device));
  const Grid grid{dim3(static_cast<unsigned>(blocks)), S::kThreads, S::kShared};
  launch_early<&best_kernel>(grid, static_cast<cudaStream_t>(stream), "head", weights, inputs,
                             args);
}

}  // namespace cuda
}  // namespace minserve
