// Launches of Mamba-2's scan and step.
#include <type_traits>

#include "../core/launch.cuh"
#include "outputs.cuh"
#include "states.cuh"

namespace minserve {
namespace cuda {
namespace {

template <auto kKernel>
void allow_shared(int bytes, int device) {
  static thread_local int allowed = -1;
  if (device == allowed) return;
  const auto* const kernel = reinterpret_cast<const void*>(kKernel);
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
        "shared memory of an SSD scan");
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                             cudaSharedmemCarveoutMaxShared),
        "shared memory of an SSD scan");
  allowed = device;
}

Grid grid_of_blocks(long long blocks, int threads, int shared_bytes) {
  if (blocks > 2147483647LL) throw std::runtime_error("minserve: too large for one SSD scan");
  return {dim3(static_cast<unsigned>(blocks)), static_cast<unsigned>(threads), shared_bytes};
}

template <class State, int kStates>
void launch_chunks(const SsdArgs& args, int device, cudaStream_t stream) {
  const int processors = multiprocessors(device);
  const long long of_decays = args.layout.chunk_bound() * divided_up(args.heads, kDecayHeads);
  launch_early<&ssd_decays_kernel>(grid_of_blocks(of_decays, kDecayHeads * kWarpLanes, 0), stream,
                                   "SSD decays", args);
  with_states_tile<kStates>(args, processors, [&](auto tile) {
    if (args.layout.sequences == 0) return;  // all is padding
    using Tile = decltype(tile);
    constexpr auto kernel = &ssd_states_kernel<State, Tile>;
    allow_shared<kernel>(Tile::kSharedBytes, device);
    launch_early<kernel>(
        grid_of_blocks(states_blocks<Tile>(args), Tile::kThreads, Tile::kSharedBytes), stream,
        "SSD states", args);
  });
  constexpr auto kernel = &ssd_outputs_kernel<State, kStates>;
  constexpr int bytes = static_cast<int>(sizeof(OutputMemory<kStates>));
  allow_shared<kernel>(bytes, device);
  const int units = units_of_block(args, processors);
  launch_early<kernel>(grid_of_blocks(outputs_blocks(args, units), kOutputThreads, bytes), stream,
                       "SSD outputs", args, units);
}

// Whether the chunk kernels run on the device; small GPUs lack the shared memory.
bool reads_in_chunks(const SsdArgs& args, int device) {
  static thread_local int known = -1, most = 0;
  if (device != known) {
    check(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
          "shared memory of a block");
    known = device;
  }
  const std::size_t bytes =
      args.states == 64 ? sizeof(OutputMemory<64>) : sizeof(OutputMemory<128>);
  return args.layout.cu_seqlens && cuda::reads_in_chunks(args) &&
         bytes <= static_cast<std::size_t>(most);
}

template <class T, class State>
void launch_rows(const SsdArgs& args, cudaStream_t stream) {
  with_row_share<T, State>(args, [&](auto share) {
    using Share = decltype(share);
    if (args.layout.cu_seqlens) {
      launch_early<&ssd_rows_kernel<T, State, Share, false>>(rows_grid<Share>(args, false), stream,
                                                             "SSD scan by tokens", args);
    } else {
      launch_early<&ssd_rows_kernel<T, State, Share, true>>(rows_grid<Share>(args, true), stream,
                                                            "SSD step", args);
    }
  });
}

template <class T, class State>
void launch(const SsdArgs& args, int device, cudaStream_t stream) {
  if constexpr (std::is_same_v<T, bf16>) {
    if (reads_in_chunks(args, device)) {
      if (args.states == 64) return launch_chunks<State, 64>(args, device, stream);
      return launch_chunks<State, 128>(args, device, stream);
    }
  }
  launch_rows<T, State>(args, stream);
}

template <class T>
void launch(const SsdArgs& args, int device, void* stream_handle) {
  const DeviceGuard guard(device);
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_handle);
  if (args.half_state) return launch<T, bf16>(args, device, stream);
  launch<T, float>(args, device, stream);
}

}  // namespace

std::int64_t ssd_workspace_bytes(const SsdArgs& args, Dtype dtype, int device) {
  if (dtype != Dtype::bf16 || !reads_in_chunks(args, device)) return 0;
  return chunk_workspace_bytes(args);
}

void ssd(const SsdArgs& args, Dtype dtype, int device, void* stream) {
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
