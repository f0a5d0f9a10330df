// Starting scans: which kernel, how many blocks, the words emptied first.
#pragma once

#include "../core/launch.cuh"
#include "short_sequences.cuh"
#include "step.cuh"
#include "tile_kernel.cuh"

namespace minserve {
namespace cuda {

// As many stages of inputs as the scan can use and a block may have.
template <class Scan>
int stages_for() {
  int device = 0, most = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
        "shared memory of a block");
  int stages = Scan::Memory::kMostStages;
  while (stages > 1 && Scan::Memory::shared_bytes(stages) > most) --stages;
  return stages;
}

// Where the tickets of a scan with words of so many bytes lie in its workspace.
inline Tickets::Shared* tickets_of(const ScanArgs& args, std::int64_t word_bytes) {
  char* const end = static_cast<char*>(args.workspace) + workspace_bytes(args.layout, word_bytes);
  return reinterpret_cast<Tickets::Shared*>(end - kTicketBytes);
}

// Tiles of `Scan`, at most. Throws for more than there are tickets.
template <class Scan>
std::int64_t tiles_of(const Layout& lay) {
  const std::int64_t tiles =
      lay.chunk_bound() * ((lay.channels + Scan::G::kChannels - 1) / Scan::G::kChannels);
  if (tiles > kMostTickets) {
    throw std::runtime_error("minserve: too large for one scan: " + std::to_string(tiles) +
                             " tiles");
  }
  return tiles;
}

template <template <class> class CellOf, class O, class T, bool kAligned>
void launch_tiles(const ScanArgs& args, cudaStream_t stream) {
  using Scan = TileLoop<CellOf, O, T, kAligned>;
  constexpr auto kernel = &tile_kernel<CellOf, O, T, kAligned>;
  const int stages = stages_for<Scan>();
  const int shared = Scan::Memory::shared_bytes(stages);
  const Layout& lay = args.layout;
  const std::int64_t tiles = tiles_of<Scan>(lay);
  const std::int64_t bytes = workspace_bytes(lay, sizeof(LookbackWord<typename Scan::V>));
  const std::int64_t blocks =
      resident_blocks(reinterpret_cast<const void*>(kernel), Scan::kThreads, shared);
  if (args.short_length < 0) {
    clear_lookback_kernel<<<static_cast<unsigned>(bytes / 16 / 1024 < blocks ? bytes / 16 / 1024 + 1
                                                                             : blocks),
                            256, 0, stream>>>(static_cast<uint4*>(args.workspace), bytes / 16);
    check(cudaGetLastError(), "clearing the scan's words");
  }
  const Grid grid = {dim3(static_cast<unsigned>(tiles < blocks ? tiles : blocks)), Scan::kThreads,
                     shared};
  launch_early<kernel>(grid, stream, "scan", args,
                       tickets_of(args, sizeof(LookbackWord<typename Scan::V>)), stages);
}

// Sequences of up to how many positions go without tiles. One thread's positions follow each other,
// so of few sequences a tile is done sooner with more of them; many have order and words that take
// tiles longer, and keep the GPU busy without. Few that are long on average have words to be
// emptied for which clear_lookback_kernel has more threads.
inline std::int64_t short_length(const ScanArgs& args) {
  constexpr int kMany = 32, kFewPositions = 32, kLong = 4096;
  const Layout& lay = args.layout;
  if (lay.reverse || !args.aligned_state) return -1;
  if (lay.sequences >= kMany) return kScanChunk;
  return lay.tokens <= kLong * lay.sequences ? kFewPositions : -1;
}

template <template <class> class CellOf, class O, class T>
void launch_short(const ScanArgs& args, O options, cudaStream_t stream) {
  using Scan = ShortScan<CellOf, O, T>;
  const Grid grid = {dim3(Scan::blocks(args.layout)), Scan::threads(args.layout)};
  launch_early<&short_kernel<CellOf, O, T>>(
      grid, stream, "scan", args, options,
      tickets_of(args, sizeof(LookbackWord<typename ComputeType<T>::type>)));
}

template <template <class> class CellOf, class T>
void launch_scan(ScanArgs args, cudaStream_t stream) {
  using Cell = CellOf<float>;
  using V = typename ComputeType<T>::type;
  constexpr int kVec = 16 / sizeof(T), kWide = 16 / sizeof(V);
  const Layout& lay = args.layout;
  args.aligned = lay.channels * sizeof(T) % 16 == 0 && parameters_aligned<Cell, kVec>(args);
  for (const Stream* streams : {args.inputs, args.outputs}) {
    const int count = streams == args.inputs ? Cell::kInputs : Cell::kOutputs;
    for (int n = 0; n < count; ++n) {
      // Within a chunk the kernels count elements in 32 bits.
      if (streams[n].stride > 2147483647LL / kScanChunk) {
        throw std::runtime_error("minserve: too large for one scan: rows of " +
                                 std::to_string(streams[n].stride) + " elements");
      }
      args.aligned = args.aligned && lie_aligned<T, kVec>(streams[n].data, streams[n].stride);
    }
  }
  args.aligned_state = args.aligned && lie_aligned<V, kWide>(args.initial, args.initial_stride) &&
                       lie_aligned<V, kWide>(args.last, args.last_stride);
  const bool step = Cell::kPrevious < 0 && !lay.cu_seqlens && lay.time == 1;
  with_options<Cell::kHasOptions>(args, [&](auto options) {
    if constexpr (Cell::kPrevious < 0) {
      if (step) return launch_step<CellOf, decltype(options), T>(args, options, stream);
    }
    if constexpr (sizeof(T) < 8) {  // float64 is for checking gradients
      if constexpr (Cell::kPrevious < 0) {
        args.short_length = short_length(args);
        if (args.short_length >= 0) {  // whose states are aligned, so everything is
          tiles_of<TileLoop<CellOf, decltype(options), T, true>>(lay);
          launch_short<CellOf, decltype(options), T>(args, options, stream);
        }
      }
      if (args.aligned) return launch_tiles<CellOf, decltype(options), T, true>(args, stream);
    }
    launch_tiles<CellOf, decltype(options), T, false>(args, stream);
  });
}

// One entry point over dtypes and direction for a pair of cells.
template <template <class> class Forward, template <class> class Backward>
void launch_by_dtype(const ScanArgs& args, Dtype dtype, bool backward, int device,
                     void* stream_handle) {
  const DeviceGuard guard(device);
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_handle);
  constexpr bool kDifferentiable = kIsThere<Backward<float>>;
  const auto launch = [&](auto type) {
    using T = decltype(type);
    if constexpr (kDifferentiable) {
      if (backward) return launch_scan<Backward, T>(args, stream);
    }
    launch_scan<Forward, T>(args, stream);
  };
  if (!kDifferentiable && (backward || dtype == Dtype::f64)) {
    throw std::runtime_error("minserve: a scan without gradients");
  }
  switch (dtype) {
    case Dtype::f32:
      return launch(float{});
    case Dtype::f64:
      if constexpr (kDifferentiable) launch(double{});
      return;
    case Dtype::bf16:
      return launch(bf16{});
    case Dtype::f16:
      return launch(f16{});
  }
}

}  // namespace cuda
}  // namespace minserve
