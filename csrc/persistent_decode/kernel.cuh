// A whole decode step of a few sequences in one kernel: every multiprocessor reads its share of the
// model's weights once, in one stream that does not wait for the sequences.
//
// A step of few sequences is the reading of the weights, and a product depends on the whole one
// before. One warp of each block copies that block's rows of every matrix, in the order in which
// they will be needed, into a ring that takes most of the shared memory; it runs ahead by what the
// ring holds. Sixteen warps multiply each block of inputs as soon as it has been written
// (global_exchange.cuh; eight_column_tiles.cuh of more than eight sequences), or in batch-invariant
// mode each its part of all inputs (deterministic.cuh); three run the epilogue and write what the
// next product reads (epilogue.cuh).
//
// Between two products latency counts: nothing is read after the inputs that could be read before,
// nobody waits who need not, and code is short, because each phase runs through all of it once.
#pragma once

#include "epilogue.cuh"
#include "deterministic.cuh"
#include "mainloop.cuh"

namespace minserve {
namespace cuda {

template <template <class> class CellOf, bool kAny, WeightType kType, bool kSplit,
          bool kBatchInvariant, bool kPieces, int kColumnTiles>
__global__ void __launch_bounds__(persistent::kThreads, 1)
    persistent_decode_kernel(const __grid_constant__ PersistentDecodeArgs args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Cell = CellOf<float>;
  extern __shared__ __align__(1024) unsigned char ring[];
  unsigned char* inputs = ring + args.stages * persistent::kStageBytes;
  auto& shared =
      *reinterpret_cast<persistent::Shared<Cell, kSplit, kBatchInvariant, kColumnTiles>*>(
          inputs + kColumnTiles * args.input_bytes);
  if (threadIdx.x == 0) persistent::prepare<kColumnTiles>(shared);
  __syncthreads();
  pdl_launch_dependents();
  const int warp = static_cast<int>(threadIdx.x / 32);
  if (warp == persistent::kTmaWarp) {
    if (threadIdx.x % 32 == 0)
      persistent::load_weights<Cell, kType, kBatchInvariant>(args, shared, ring);
    __syncwarp();
    wait_for_previous_kernel();
    return;
  }
  wait_for_previous_kernel();
  // Blocks that have counted themselves before this one began to look are fewer than all.
  const unsigned long long turn = load_relaxed(args.ended) / gridDim.x;
  unsigned char* set = args.exchange + turn % 2 * args.set_bytes;
  if (warp < persistent::kMmaWarps) {
    persistent::named_barrier_arrive<1>(persistent::kLooked);
    persistent::clear(args, args.exchange + (turn + 1) % 2 * args.set_bytes);
    if constexpr (kBatchInvariant) {
      persistent::multiply_batch_invariant<Cell, kPieces>(args, shared, ring, inputs, set);
    } else {
      persistent::multiply<Cell, kType, kSplit, kPieces, kColumnTiles>(args, shared, ring, inputs,
                                                                       set);
    }
  } else {
    if constexpr (kAny) {
      const AnyOptions options{args.linear_candidate, args.normalize_gates};
      persistent::epilogue<CellOf, kType, kSplit, kBatchInvariant, kColumnTiles>(args, options,
                                                                                 shared, set);
    } else {
      persistent::epilogue<CellOf, kType, kSplit, kBatchInvariant, kColumnTiles>(
          args, UsualOptions{}, shared, set);
    }
    if (warp == persistent::kMmaWarps) {
      // A block that has no unit in any phase waits for none of its own warps otherwise.
      barrier_sync<persistent::kBarrierThreads<1>>(persistent::kLooked);
      if (threadIdx.x % 32 == 0) atomicAdd(args.ended, 1ull);
    }
  }
#endif
}

}  // namespace cuda
}  // namespace minserve
