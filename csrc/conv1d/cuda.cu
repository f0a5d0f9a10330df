// Causal depthwise convolution on CUDA: several channels per thread for the usual numbers of taps
// and aligned tensors, one otherwise. The sums are formed alike, so the bits are the same.
#include "launch.cuh"

namespace minserve {
namespace cuda {
namespace {

template <class T, int kTaps, bool kSilu>
void launch_with(const ConvArgs& args, cudaStream_t stream) {
  if (args.layout.cu_seqlens) return launch_conv_scan<T, kTaps, kSilu>(args, stream);
  launch_conv_step<T, kTaps, kSilu>(args, stream);
}

template <class T, int kTaps>
void launch_taps(const ConvArgs& args, cudaStream_t stream) {
  if (!in_vectors<T, kTaps>(args)) return launch_any<T>(args, stream);
  if (args.silu) return launch_with<T, kTaps, true>(args, stream);
  launch_with<T, kTaps, false>(args, stream);
}

template <class T>
void launch(const ConvArgs& args, int device, void* stream_handle) {
  const DeviceGuard guard(device);
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_handle);
  switch (args.taps) {
    case 2:
      return launch_taps<T, 2>(args, stream);
    case 3:
      return launch_taps<T, 3>(args, stream);
    case 4:
      return launch_taps<T, 4>(args, stream);
    default:
      return launch_any<T>(args, stream);
  }
}

}  // namespace

void conv(const ConvArgs& args, Dtype dtype, int device, void* stream) {
  switch (dtype) {
    case Dtype::f32:
      return launch<float>(args, device, stream);
    case Dtype::bf16:
      return launch<bf16>(args, device, stream);
    case Dtype::f16:
      return launch<f16>(args, device, stream);
    case Dtype::f64:
      break;
  }
}

}  // namespace cuda
}  // namespace minserve
