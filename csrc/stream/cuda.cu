// The launch of a whole step: as many blocks as multiprocessors, all at once or not at all.
#include "../common/launch.cuh"
#include "kernel.cuh"
#include "launch.h"

namespace minserve {
namespace cuda {

namespace {

template <template <class> class CellOf, bool kAny>
void launch(StreamArgs& args, int device, cudaStream_t on) {
  static thread_local int prepared = -1, processors = 0, most_shared = 0;
  const auto* kernel = reinterpret_cast<const void*>(&stream_kernel<CellOf, kAny>);
  if (prepared != device) {
    check(cudaDeviceGetAttribute(&most_shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
          "shared memory of a block");
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most_shared),
          "shared memory of a whole step");
    check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device),
          "number of multiprocessors");
    prepared = device;
  }
  const int fixed = static_cast<int>(sizeof(stream::Shared<CellOf<float>::kInputs>)) +
                    args.input_bytes;
  args.stages = (most_shared - fixed) / stream::kStageBytes;
  if (args.stages > stream::kMostStages) args.stages = stream::kMostStages;
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeCooperative;
  attributes[0].val.cooperative = 1;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(processors));
  config.blockDim = dim3(stream::kThreads);
  config.dynamicSmemBytes = static_cast<std::size_t>(fixed + args.stages * stream::kStageBytes);
  config.stream = on;
  config.attrs = attributes;
  config.numAttrs = 2;
  check(cudaLaunchKernelEx(&config, &stream_kernel<CellOf, kAny>, args), "a whole step");
}

}  // namespace

void stream_step(StreamArgs& args, int gates, int device, void* stream) {
  const DeviceGuard guard(device);
  const auto on = static_cast<cudaStream_t>(stream);
  const bool any = args.linear_candidate || !args.normalize_gates;
  if (gates == 2) {
    return any ? launch<MinGruCell, true>(args, device, on) : launch<MinGruCell, false>(args, device, on);
  }
  any ? launch<MinLstmCell, true>(args, device, on) : launch<MinLstmCell, false>(args, device, on);
}

}  // namespace cuda
}  // namespace minserve
