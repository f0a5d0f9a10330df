// The head that finds bests: its tensor maps and its launch.
#include "best.cuh"

#include <algorithm>

#include "../common/launch.cuh"
#include "launch.h"
#include "tensor_map.cuh"

namespace minserve {
namespace cuda {

namespace {

template <class T>
void launch(const BestArgs& args, const void* weight, const void* input, Dtype dtype, int device,
            cudaStream_t stream) {
  using S = BestShape;
  static thread_local int asked = -1;  // every device is asked for itself
  if (device != asked) {
    check(cudaFuncSetAttribute(reinterpret_cast<const void*>(&best_kernel<T>),
                               cudaFuncAttributeMaxDynamicSharedMemorySize, S::kShared),
          "shared memory of a head");
    asked = device;
  }
  const CUtensorMap weights = map_of(weight, args.channels, args.inputs, S::kColumns, dtype);
  const CUtensorMap inputs = map_of(input, args.tokens, args.inputs, S::kTokens, dtype);
  const std::int64_t tiles = (args.tokens + S::kTokens - 1) / S::kTokens * args.tiles;
  const std::int64_t blocks = std::min<std::int64_t>(tiles, multiprocessors(device));
  const Grid grid{dim3(static_cast<unsigned>(blocks)), S::kThreads, S::kShared};
  launch_early<&best_kernel<T>>(grid, stream, "head", weights, inputs, args);
}

}  // namespace

void linear_best(const BestArgs& args, const void* weight, const void* input, Dtype dtype,
                 int device, void* stream) {
  const DeviceGuard guard(device);
  const auto on = static_cast<cudaStream_t>(stream);
  if (dtype == Dtype::bf16) return launch<bf16>(args, weight, input, dtype, device, on);
  launch<f16>(args, weight, input, dtype, device, on);
}

}  // namespace cuda
}  // namespace minserve
