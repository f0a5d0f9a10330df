// Linear maps on Hopper: which shape of kernel a call takes, its tensor maps, its launch.
#include <mutex>

#include "../common/launch.cuh"
#include "embed.cuh"
#include "kernel.cuh"
#include "launch.h"

namespace minserve {
namespace cuda {

namespace {

using EncodeMap = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*,
                               const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
                               const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                               CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// The driver is not linked: the runtime knows where it is.
EncodeMap encode_map() {
  static const EncodeMap found = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult result;
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000,
                                           cudaEnableDefault, &result),
          "cuTensorMapEncodeTiled");
    if (!entry) throw std::runtime_error("minserve: the driver has no cuTensorMapEncodeTiled");
    return reinterpret_cast<EncodeMap>(entry);
  }();
  return found;
}

// A matrix [rows, columns] of two-byte numbers, read in boxes of box_rows by kStep.
CUtensorMap map_of(const void* data, std::int64_t rows, std::int64_t columns, int box_rows,
                   Dtype dtype) {
  CUtensorMap map;
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(columns) * 2};
  const cuuint32_t box[2] = {kStep, static_cast<cuuint32_t>(box_rows)}, steps[2] = {1, 1};
  const CUresult result = encode_map()(
      &map,
      dtype == Dtype::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2,
      const_cast<void*>(data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) throw std::runtime_error("minserve: a matrix has no tensor map");
  return map;
}

template <class S>
void launch_shape(LinearArgs args, const void* weight, const void* input, int gates, bool cluster,
                  Dtype dtype, cudaStream_t stream) {
  const CUtensorMap weights =
      map_of(weight, gates * args.channels, args.inputs, kBlockRows, dtype);
  const CUtensorMap inputs = map_of(input, args.tokens, args.inputs, S::kTokens, dtype);
  static std::once_flag asked;
  std::call_once(asked, [] {
    check(cudaFuncSetAttribute(reinterpret_cast<const void*>(&linear_kernel<S>),
                               cudaFuncAttributeMaxDynamicSharedMemorySize, S::kShared),
          "shared memory of a linear map");
  });
  const unsigned parts = cluster ? args.segments : 1;
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {1, 1, parts};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>((args.tokens + S::kTokens - 1) / S::kTokens),
                        static_cast<unsigned>((args.channels + S::kChannels - 1) / S::kChannels),
                        parts);
  config.blockDim = dim3(S::kThreads);
  config.dynamicSmemBytes = S::kShared;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = 2;
  check(cudaLaunchKernelEx(&config, &linear_kernel<S>, weights, inputs, args), "linear map");
}

template <class T, int kBlocks, bool kStepping>
void launch_few(const LinearArgs& args, const void* weight, const void* input, int gates,
                Dtype dtype, cudaStream_t stream) {
  const auto with = [&](auto shape) {
    launch_shape<decltype(shape)>(args, weight, input, gates, true, dtype, stream);
  };
  if (args.tokens <= 8) return with(LinearShape<T, kBlocks, 1, 8, kStepping, false>());
  if (args.tokens <= 16) return with(LinearShape<T, kBlocks, 1, 16, kStepping, false>());
  if (args.tokens <= 32) return with(LinearShape<T, kBlocks, 1, 32, kStepping, false>());
  with(LinearShape<T, kBlocks, 1, 64, kStepping, false>());
}

// Blocks that fill a large GPU twice over.
constexpr std::int64_t kManyBlocks = 264;

// From the weights' shape alone (see kernel.cuh).
int segments_of(std::int64_t tiles, std::int64_t inputs) {
  int segments = 1;
  while (segments < 8 && tiles * segments * 2 <= kManyBlocks &&
         inputs / (segments * 2) >= 2 * kStep) {
    segments *= 2;
  }
  return segments;
}

template <class T>
void launch_linear(LinearArgs args, const void* weight, const void* input, int gates, Dtype dtype,
                   cudaStream_t stream) {
  constexpr std::int64_t kFew = 64;
  const std::int64_t tiles = (args.channels + kBlockRows - 1) / kBlockRows;
  args.segments = segments_of(tiles, args.inputs);
  const auto many = [&](auto shape) {
    using S = decltype(shape);
    const std::int64_t blocks = (args.tokens + S::kTokens - 1) / S::kTokens *
                                ((args.channels + S::kChannels - 1) / S::kChannels);
    launch_shape<S>(args, weight, input, gates, blocks * 2 <= 132, dtype, stream);
  };
  if (gates == 2) {
    if (args.tokens <= kFew) return launch_few<T, 2, true>(args, weight, input, 2, dtype, stream);
    return many(LinearShape<T, 2, 2, 64, true, true>());
  }
  if (gates == 3) {
    if (args.tokens <= kFew) return launch_few<T, 3, true>(args, weight, input, 3, dtype, stream);
    return many(LinearShape<T, 3, 1, 64, true, true>());
  }
  if (args.tokens > kFew) return many(LinearShape<T, 1, 2, 128, false, true>());
  if (tiles >= kManyBlocks) {
    return launch_few<T, 2, false>(args, weight, input, 1, dtype, stream);
  }
  launch_few<T, 1, false>(args, weight, input, 1, dtype, stream);
}

}  // namespace

bool linear_supported(int device) {
  int major = 0;
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "capability");
  return major == 9;
}

void linear(const LinearArgs& args, const void* weight, const void* input, int gates, Dtype dtype,
            int device, void* stream) {
  const DeviceGuard guard(device);
  const auto on = static_cast<cudaStream_t>(stream);
  if (dtype == Dtype::bf16) return launch_linear<bf16>(args, weight, input, gates, dtype, on);
  launch_linear<f16>(args, weight, input, gates, dtype, on);
}

void embed(const EmbedArgs& args, Dtype dtype, int device, void* stream) {
  const DeviceGuard guard(device);
  const auto on = static_cast<cudaStream_t>(stream);
  const long long quads = args.channels / kQuad;
  const Grid grid{dim3(static_cast<unsigned>(args.tokens),
                       static_cast<unsigned>((quads + kThreads - 1) / kThreads)),
                  kThreads};
  if (dtype == Dtype::bf16) return launch_early<&embed_kernel<bf16>>(grid, on, "embedding", args);
  launch_early<&embed_kernel<f16>>(grid, on, "embedding", args);
}

}  // namespace cuda
}  // namespace minserve
