// Launches a shape of the kernel for many tokens.
#pragma once

#include "tensor_map.cuh"
#include "wide.cuh"

namespace minserve {
namespace cuda {

inline int multiprocessors(int device) {
  static thread_local int known = -1, count = 0;
  if (device != known) {
    check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device),
          "multiprocessors");
    known = device;
  }
  return count;
}

template <class S>
void launch_wide(const LinearArgs& args, const void* weight, const void* input, Dtype dtype,
                 int device, cudaStream_t stream) {
  const CUtensorMap weights =
      map_of(weight, S::kGates * args.channels, args.inputs, S::kUnitChannels, dtype);
  const CUtensorMap inputs = map_of(input, args.tokens, args.inputs, S::kTokens / S::kShare, dtype);
  CUtensorMap side = inputs;
  if (!S::kStepping && args.epilogue != Epilogue::logits) {
    side = map_of(args.epilogue == Epilogue::residual ? args.x : args.out, args.tokens,
                  args.channels, S::kFinish, dtype);
  }
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {static_cast<unsigned>(S::kShare), 1,
                                  static_cast<unsigned>(S::kParts)};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(S::kShare), 1, static_cast<unsigned>(S::kParts));
  config.blockDim = dim3(S::kThreads);
  config.dynamicSmemBytes = static_cast<std::size_t>(S::kShared);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = S::kShare > 1 || S::kParts > 1 ? 2 : 1;
  static thread_local int asked = -1, most = 0;  // every device is asked for itself
  if (device != asked) {
    check(cudaFuncSetAttribute(reinterpret_cast<const void*>(&wide_kernel<S>),
                               cudaFuncAttributeMaxDynamicSharedMemorySize, S::kShared),
          "shared memory of a wide linear map");
    most = multiprocessors(device) * S::kResident;
    if (S::kShare > 1) {  // clusters lie in groups of multiprocessors, which they may not fill
      check(cudaOccupancyMaxActiveClusters(&most, &wide_kernel<S>, &config), "clusters");
    }
    asked = device;
  }
  constexpr int kTileRows = S::kChannels * S::kShare;
  const std::int64_t tiles =
      (args.channels + kTileRows - 1) / kTileRows * ((args.tokens + S::kTokens - 1) / S::kTokens);
  config.gridDim.x =
      static_cast<unsigned>((S::kParts > 1 || tiles < most ? tiles : most) * S::kShare);
  check(cudaLaunchKernelEx(&config, &wide_kernel<S>, weights, inputs, side, args),
        "wide linear map");
}

}  // namespace cuda
}  // namespace minserve
