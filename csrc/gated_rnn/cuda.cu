// The launches of the scans and steps of GRU and LSTM.
#include "../core/launch.cuh"
#include "decode.cuh"
#include "scan.cuh"
#include "step.cuh"

namespace minserve {
namespace cuda {
namespace {

// Bytes of shared memory that a block may ask for.
std::int64_t most_shared(int device) {
  static thread_local int known = -1, bytes = 0;
  if (device != known) {
    check(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
          "shared memory");
    known = device;
  }
  return bytes;
}

template <auto kKernel>
void allow_shared(int device) {
  static thread_local int allowed = -1;
  if (device == allowed) return;
  check(cudaFuncSetAttribute(reinterpret_cast<const void*>(kKernel),
                             cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(most_shared(device))),
        "shared memory of a GRU's or LSTM's scan");
  allowed = device;
}

template <class T, class Unit>
void launch_scan(const GatedRnnArgs& args, void* exchange, int device, cudaStream_t stream) {
  const GatedScanDevice of{multiprocessors(device), most_shared(device)};
  with_gated_scan<T, Unit::kGates>(args, of, exchange, [&](auto kind, const GatedScanGrid& grid) {
    using Kind = decltype(kind);
    constexpr auto kKernel = &gated_scan_kernel<T, Unit, Kind::kTiles, Kind::kShared>;
    allow_shared<kKernel>(device);
    check(cudaMemsetAsync(exchange, 0, static_cast<std::size_t>(grid.blocks) * kFlagBytes, stream),
          "flags of a scan");
    LaunchConfig(dim3(static_cast<unsigned>(grid.blocks)), kScanThreads,
                 static_cast<int>(grid.shared_bytes), stream)
        .cooperative()
        .launch(kKernel, "a scan of a GRU or LSTM", args, grid.plan);
  });
}

template <class T, class Unit>
void launch_decode(const GatedDecodeArgs& args, int device, cudaStream_t stream) {
  constexpr auto kKernel = &gated_decode_kernel<T, Unit>;
  const std::int64_t units = args.step.layout.channels;
  const std::int64_t shared = decode_shared_bytes<Unit::kGates>(args.width, units);
  if (shared > most_shared(device)) {
    throw std::runtime_error("minserve: a GRU's or LSTM's decode step takes narrower layers");
  }
  allow_shared<kKernel>(device);
  const Grid grid{dim3(static_cast<unsigned>(units / kOctet)), kScanThreads,
                  static_cast<int>(shared)};
  launch_early<kKernel>(grid, stream, "a decode step of a GRU or LSTM", args);
  launch_early<&move_hidden_kernel>(row_grid(args.step.layout.tokens, units), stream,
                                    "states of a GRU or LSTM", args);
}

template <class T, class Unit, int kVec>
void launch_step_of(const GatedRnnArgs& args, cudaStream_t stream) {
  launch_early<&gated_step_kernel<T, Unit, kVec>>(gated_step_grid<kVec>(args.layout), stream,
                                                  "a step of a GRU or LSTM", args);
}
template <class T, class Unit>
void launch_step(const GatedRnnArgs& args, cudaStream_t stream) {
  if (steps_in_vectors<T, 4>(args)) return launch_step_of<T, Unit, 4>(args, stream);
  launch_step_of<T, Unit, 1>(args, stream);
}

// f(number of the operator's dtype)
template <class F>
void with_dtype(Dtype dtype, F f) {
  switch (dtype) {
    case Dtype::f32:
      return f(0.0f);
    case Dtype::bf16:
      return f(bf16{});
    case Dtype::f16:
      return f(f16{});
    case Dtype::f64:
      break;
  }
}

}  // namespace

std::int64_t gated_scan_exchange_bytes(const GatedRnnArgs& args, Dtype dtype) {
  return gated_exchange_bytes(args, dtype == Dtype::f32 ? 4 : 2);
}

void gated_scan(const GatedRnnArgs& args, Dtype dtype, void* exchange, int device,
                void* stream_handle) {
  const DeviceGuard guard(device);
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_handle);
  with_dtype(dtype, [&](auto number) {
    using T = decltype(number);
    if (args.is_lstm()) return launch_scan<T, LstmUnit<float>>(args, exchange, device, stream);
    launch_scan<T, GruUnit<float>>(args, exchange, device, stream);
  });
}

void gated_step(const GatedRnnArgs& args, Dtype dtype, int device, void* stream_handle) {
  const DeviceGuard guard(device);
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_handle);
  with_dtype(dtype, [&](auto number) {
    using T = decltype(number);
    if (args.is_lstm()) return launch_step<T, LstmUnit<float>>(args, stream);
    launch_step<T, GruUnit<float>>(args, stream);
  });
}

void gated_decode(const GatedDecodeArgs& args, Dtype dtype, int device, void* stream_handle) {
  const DeviceGuard guard(device);
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_handle);
  const auto launch = [&](auto number) {
    using T = decltype(number);
    if (args.step.is_lstm()) return launch_decode<T, LstmUnit<float>>(args, device, stream);
    launch_decode<T, GruUnit<float>>(args, device, stream);
  };
  dtype == Dtype::bf16 ? launch(bf16{}) : launch(f16{});
}

}  // namespace cuda
}  // namespace minserve
