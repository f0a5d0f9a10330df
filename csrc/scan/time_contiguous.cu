// linear_scan on CUDA where time is contiguous: launches.
#include "../core/vector_access.cuh"
#include "../core/launch.cuh"
#include "../cells/linear_scan.h"
#include "time_contiguous.cuh"

namespace minserve {
namespace cuda {

namespace {

// Warps of a block: one where a row is a tile of a warp or less. A function of the row's length
// alone, for it decides on bits.
constexpr int kLongWarps = 4;

std::int64_t tile_length(int warps, std::int64_t size) {
  return warps * kPacks * 32 * (16 / size);
}
int warps_for(std::int64_t time, std::int64_t size) {
  return time <= tile_length(1, size) ? 1 : kLongWarps;
}

RowTiles row_tiles(const Layout& lay, std::int64_t size) {
  const std::int64_t rows = lay.sequences * lay.channels;
  const std::int64_t length = tile_length(warps_for(lay.time, size), size);
  const std::int64_t per_row = (lay.time + length - 1) / length;
  return {static_cast<unsigned>(rows), static_cast<unsigned>(per_row),
          static_cast<unsigned>(rows * per_row), nullptr};
}

template <template <class> class CellOf, class T, int kWarps>
void launch_rows(const ScanArgs& args, RowTiles tiles, cudaStream_t stream) {
  using Scan = RowScan<CellOf, T, kWarps>;
  const auto kernel = &row_kernel<CellOf, T, kWarps>;
  const int shared = static_cast<int>(sizeof(typename Scan::Shared));
  if (tiles.per_row > 1) {
    const std::int64_t bytes =
        tiles.words() * static_cast<std::int64_t>(sizeof(LookbackWord<typename Scan::V>));
    check(cudaMemsetAsync(args.workspace, 0xff, static_cast<std::size_t>(bytes + kTicketBytes),
                          stream),
          "clearing the scan's words");
    tiles.counter = reinterpret_cast<unsigned*>(static_cast<char*>(args.workspace) + bytes);
  }
  const std::int64_t blocks =
      resident_blocks(reinterpret_cast<const void*>(kernel), Scan::kThreads, shared);
  kernel<<<static_cast<unsigned>(tiles.total < blocks ? tiles.total : blocks), Scan::kThreads,
           shared, stream>>>(args, tiles);
  check(cudaGetLastError(), "scan of rows");
}

template <template <class> class CellOf, class T>
void launch_for(ScanArgs args, cudaStream_t stream) {
  using Cell = CellOf<float>;
  const std::int64_t size = sizeof(T);
  const auto aligned = [](const Stream& s) { return lie_aligned<T, 16 / sizeof(T)>(s.data); };
  args.aligned = args.layout.time * size % 16 == 0;
  for (int n = 0; n < Cell::kInputs; ++n) args.aligned = args.aligned && aligned(args.inputs[n]);
  for (int n = 0; n < Cell::kOutputs; ++n) args.aligned = args.aligned && aligned(args.outputs[n]);
  const RowTiles tiles = row_tiles(args.layout, size);
  const Layout& lay = args.layout;
  if (lay.sequences * lay.channels > kMostTickets / tiles.per_row) {
    throw std::runtime_error(
        "minserve: too large for one scan: " + std::to_string(lay.sequences * lay.channels) +
        " rows of " + std::to_string(lay.time) + " steps");
  }
  if (warps_for(args.layout.time, size) == 1) {
    launch_rows<CellOf, T, 1>(args, tiles, stream);
  } else {
    launch_rows<CellOf, T, kLongWarps>(args, tiles, stream);
  }
}

template <class T>
void launch_either(const ScanArgs& args, bool backward, cudaStream_t stream) {
  return backward ? launch_for<LinearBackwardCell, T>(args, stream)
                  : launch_for<LinearCell, T>(args, stream);
}

}  // namespace

std::int64_t row_scan_workspace_bytes(const Layout& layout, Dtype dtype) {
  const std::int64_t size = dtype == Dtype::f64 ? 8 : dtype == Dtype::f32 ? 4 : 2;
  const std::int64_t word =
      dtype == Dtype::f64 ? sizeof(LookbackWord<double>) : sizeof(LookbackWord<float>);
  return row_tiles(layout, size).words() * word + kTicketBytes;
}

void linear_scan_rows(const ScanArgs& args, Dtype dtype, bool backward, int device,
                      void* stream_handle) {
  const DeviceGuard guard(device);
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_handle);
  switch (dtype) {
    case Dtype::f32:
      return launch_either<float>(args, backward, stream);
    case Dtype::f64:
      return launch_either<double>(args, backward, stream);
    case Dtype::bf16:
      return launch_either<bf16>(args, backward, stream);
    case Dtype::f16:
      return launch_either<f16>(args, backward, stream);
  }
}

}  // namespace cuda
}  // namespace minserve
