// The launches of the selective scan and step: how many of a channel's states a thread has.
#include "../core/launch.cuh"
#include "scan.cuh"
#include "selected_step.cuh"

namespace minserve {
namespace cuda {
namespace {

// The kernel's blocks may have so much shared memory, as many of them as their registers allow.
template <auto kKernel>
void allow_shared(int bytes, int device) {
  static thread_local int allowed = -1;
  if (device == allowed) return;
  const auto* const kernel = reinterpret_cast<const void*>(kKernel);
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
        "shared memory of a selective scan");
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                             cudaSharedmemCarveoutMaxShared),
        "shared memory of a selective scan");
  allowed = device;
}

template <class T, class Tile>
void launch_scan(const SelectiveArgs& args, int device, cudaStream_t stream) {
  constexpr auto kernel = &selective_scan_kernel<T, Tile>;
  const long long blocks = scan_blocks<Tile>(args.layout);
  if (blocks > 2147483647LL) throw std::runtime_error("minserve: too large for one selective scan");
  allow_shared<kernel>(Tile::kSharedBytes, device);
  const Grid grid{dim3(static_cast<unsigned>(blocks)), Tile::kThreads, Tile::kSharedBytes};
  launch_early<kernel>(grid, stream, "selective scan", args);
}

template <class T, class State>
void launch_step(const SelectiveArgs& args, cudaStream_t stream) {
  with_step_share<T, State>(args, [&](auto share) {
    using S = decltype(share);
    const StepGrid of = step_grid<S::kLanes, S::kUnits>(args.layout);
    launch_early<&selective_step_kernel<T, State, S::kStates, S::kLanes, S::kUnits, S::kWhole>>(
        of.grid, stream, "selective step", args, of.rows);
  });
}

template <class State>
void launch_selected(const SelectedArgs& args, cudaStream_t stream) {
  const Layout& lay = args.step.layout;
  with_selected_share(lay, [&](auto share) {
    using S = decltype(share);
    const Grid grid = selected_grid<S>(lay);
    if (args.normed) {
      launch_early<&selected_step_kernel<State, S::kUnits, S::kRows, true>>(grid, stream,
                                                                            "selected step", args);
    } else {
      launch_early<&selected_step_kernel<State, S::kUnits, S::kRows, false>>(grid, stream,
                                                                             "selected step", args);
    }
  });
}

template <class T>
void launch(const SelectiveArgs& args, int device, void* stream_handle) {
  if (args.states > kMostStatesOnGpu) {
    throw std::runtime_error("minserve: a selective scan on CUDA takes up to " +
                             std::to_string(kMostStatesOnGpu) + " states, got " +
                             std::to_string(args.states));
  }
  const DeviceGuard guard(device);
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_handle);
  if (!args.layout.cu_seqlens) {
    if (args.half_state) return launch_step<T, bf16>(args, stream);
    return launch_step<T, float>(args, stream);
  }
  with_scan_tile<T>(args, multiprocessors(device),
                    [&](auto tile) { launch_scan<T, decltype(tile)>(args, device, stream); });
}

}  // namespace

void selective(const SelectiveArgs& args, Dtype dtype, int device, void* stream) {
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

void selected_step(const SelectedArgs& args, int device, void* stream) {
  const DeviceGuard guard(device);
  const cudaStream_t on = static_cast<cudaStream_t>(stream);
  if (args.step.half_state) return launch_selected<bf16>(args, on);
  launch_selected<float>(args, on);
}

}  // namespace cuda
}  // namespace minserve
