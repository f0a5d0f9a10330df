// The kernel of a scan by tiles: which way its tiles go. `stages` of inputs find room in its shared
// memory.
#pragma once

#include <type_traits>

#include "schedule_same_tile.cuh"
#include "schedule_next_tile.cuh"

namespace minserve {
namespace cuda {

template <template <class> class CellOf, class O, class T, bool kAligned>
using TileWay =
    std::conditional_t<TileMemory<CellOf, O, T, kAligned>::kLag,
                       LaggingScan<CellOf, O, T, kAligned>, ImmediateScan<CellOf, O, T, kAligned>>;

template <template <class> class CellOf, class O, class T, bool kAligned>
__global__ void __launch_bounds__((TileWay<CellOf, O, T, kAligned>::kThreads),
                                  (TileWay<CellOf, O, T, kAligned>::kMinBlocks))
    tile_kernel(const __grid_constant__ ScanArgs args, Tickets::Shared* tickets, int stages) {
  using Scan = TileWay<CellOf, O, T, kAligned>;
  extern __shared__ uint4 memory[];
  Scan::run(args, tickets, *reinterpret_cast<typename Scan::Shared*>(memory), stages);
}

}  // namespace cuda
}  // namespace minserve
