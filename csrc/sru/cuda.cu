// The launches of the simple recurrent unit: scans, by sequences or by chunks; steps; gradients.
#include "../core/launch.cuh"
#include "backward.cuh"
#include "scan.cuh"

namespace minserve {
namespace cuda {
namespace {

// f with the highway and the activation as types.
struct Yes {
  static constexpr bool value = true;
};
struct No {
  static constexpr bool value = false;
};
template <class F>
void with_form(const SruArgs& args, const F& f) {
  if (args.highway.data) {
    if (args.tanh) return f(Yes{}, Yes{});
    return f(Yes{}, No{});
  }
  if (args.tanh) return f(No{}, Yes{});
  f(No{}, No{});
}

template <class T, bool kHighway, bool kTanh>
void launch_chunks(const SruArgs& args, cudaStream_t stream) {
  const Layout& lay = args.layout;
  const Grid chunks = row_grid(lay.chunk_bound(), lay.channels);
  launch_early<&sru_sums_kernel<T>>(chunks, stream, "sums of chunks", args);
  launch_early<&sru_carries_kernel>(row_grid(lay.sequences, lay.channels), stream,
                                    "carries of chunks", args);
  launch_early<&sru_chunks_kernel<T, kHighway, kTanh>>(chunks, stream, "scan of chunks", args);
}

template <class T, bool kHighway, bool kTanh, bool kAffine>
void launch_form(const SruArgs& args, cudaStream_t stream) {
  const Layout& lay = args.layout;
  if (!lay.cu_seqlens) {
    return launch_early<&sru_step_kernel<T, kHighway, kTanh, kAffine>>(
        row_grid(lay.tokens, lay.channels), stream, "SRU step", args);
  }
  if (kAffine && sru_reads_chunks(args)) return launch_chunks<T, kHighway, kTanh>(args, stream);
  launch_early<&sru_scan_kernel<T, kHighway, kTanh, kAffine>>(
      row_grid(lay.sequences + 1, lay.channels), stream, "SRU scan", args);
}

template <class T>
void launch(const SruArgs& args, int device, void* stream_handle) {
  const DeviceGuard guard(device);
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_handle);
  with_form(args, [&](auto highway, auto tanh) {
    constexpr bool kHighway = decltype(highway)::value, kTanh = decltype(tanh)::value;
    // A training scan keeps c, which chunks do not.
    if (args.weight_c || args.c) return launch_form<T, kHighway, kTanh, false>(args, stream);
    launch_form<T, kHighway, kTanh, true>(args, stream);
  });
}

template <class T>
void launch_backward(const SruArgs& args, const SruGradients& grads, int device, void* stream) {
  const DeviceGuard guard(device);
  with_form(args, [&](auto highway, auto tanh) {
    launch_early<&sru_backward_kernel<T, decltype(highway)::value, decltype(tanh)::value>>(
        row_grid(args.layout.sequences + 1, args.layout.channels),
        static_cast<cudaStream_t>(stream), "gradients of an SRU scan", args, grads);
  });
}

}  // namespace

void sru(const SruArgs& args, Dtype dtype, int device, void* stream) {
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

void sru_backward(const SruArgs& args, const SruGradients& gradients, Dtype dtype, int device,
                  void* stream) {
  switch (dtype) {
    case Dtype::f32:
      return launch_backward<float>(args, gradients, device, stream);
    case Dtype::bf16:
      return launch_backward<bf16>(args, gradients, device, stream);
    case Dtype::f16:
      return launch_backward<f16>(args, gradients, device, stream);
    case Dtype::f64:
      break;
  }
}

}  // namespace cuda
}  // namespace minserve
