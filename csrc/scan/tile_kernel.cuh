// The kernel of a scan by tiles. Its shared memory has room for `stages` of inputs.
#pragma once

#include "tile_loop.cuh"

namespace minserve {
namespace cuda {

template <template <class> class CellOf, class O, class T, bool kAligned>
__global__ void __launch_bounds__((TileLoop<CellOf, O, T, kAligned>::kThreads),
                                  (TileLoop<CellOf, O, T, kAligned>::kMinBlocks))
    tile_kernel(const __grid_constant__ ScanArgs args, Tickets::Shared* tickets, int stages) {
  using Loop = TileLoop<CellOf, O, T, kAligned>;
  extern __shared__ uint4 memory[];
  Loop::run(args, tickets, *reinterpret_cast<typename Loop::Shared*>(memory), stages);
}

}  // namespace cuda
}  // namespace minserve
