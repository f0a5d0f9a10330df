// The argmax head: its tensor maps and its launch.
#include "argmax_head.cuh"

#include <algorithm>

#include "../core/launch.cuh"
#include "launch.h"
#include "../core/tma_descriptor.cuh"

namespace minserve {
namespace cuda {

void argmax_head(const ArgmaxHeadArgs& args, const void* weight, const void* input, int device,
                 void* stream) {
  using S = ArgmaxHeadShape;
  const DeviceGuard guard(device);
  static thread_local int asked = -1;  // every device is asked for itself
  if (device != asked) {
    check(cudaFuncSetAttribute(reinterpret_cast<const void*>(&argmax_head_kernel),
                               cudaFuncAttributeMaxDynamicSharedMemorySize, S::kShared),
          "shared memory of a head");
    asked = device;
  }
  const CUtensorMap weights = tensor_map_of(weight, args.channels, args.inputs, S::kColumns);
  const CUtensorMap inputs = tensor_map_of(input, args.tokens, args.inputs, S::kTokens);
  const std::int64_t tiles = (args.tokens + S::kTokens - 1) / S::kTokens * args.tiles;
  const std::int64_t blocks = std::min<std::int64_t>(tiles, multiprocessors(device));
  const Grid grid{dim3(static_cast<unsigned>(blocks)), S::kThreads, S::kShared};
  launch_early<&argmax_head_kernel>(grid, static_cast<cudaStream_t>(stream), "head", weights,
                                    inputs, args);
}

}  // namespace cuda
}  // namespace minserve
