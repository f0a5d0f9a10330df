// A whole decode step of a few sequences in one kernel: every multiprocessor reads its share of the
// model's weights once, in one stream that does not wait for the sequences.
//
// A step of few sequences is the reading of the weights, and a product depends on the whole one
// before. One warp of each block copies that block's rows of every matrix, in the order in which
// they will be needed, into a ring that takes most of the shared memory; it runs ahead by what the
// ring holds. Sixteen warps multiply each block of inputs as soon as it has been written
// (global_exchange.cuh; eight_column_tiles.cuh of more than eight sequences), or in a fixed order each its part of all
// inputs (deterministic.cuh); three finish the sums and write what the next product reads (epilogue.cuh).
//
// Between two products latency counts: nothing is read after the inputs that could be read before,
// nobody waits who need not, and code is short, because each phase runs through all of it once.
#pragma once

#include "epilogue.cuh"
#include "deterministic.cuh"
#include "mainloop.cuh"

namespace minserve {
namespace cuda {

template <template <class> class CellOf, bool kAny, WeightType kType, bool kSplit, bool kFixed,
          bool kPieces, int kEights>
__global__ void __launch_bounds__(whole::kThreads, 1)
    whole_step_kernel(const __grid_constant__ WholeStepArgs args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr int kGates = CellOf<float>::kInputs;
  extern __shared__ __align__(1024) unsigned char ring[];
  unsigned char* inputs = ring + args.stages * whole::kStageBytes;
  auto& shared = *reinterpret_cast<whole::Shared<kGates, kSplit, kFixed, kEights>*>(
      inputs + kEights * args.input_bytes);
  if (threadIdx.x == 0) whole::prepare<kEights>(shared);
  __syncthreads();
  let_next_kernel_start();
  const int warp = static_cast<int>(threadIdx.x / 32);
  if (warp == whole::kCopier) {
    if (threadIdx.x % 32 == 0) whole::copy_weights<kGates, kType, kFixed>(args, shared, ring);
    __syncwarp();
    wait_for_previous_kernel();
    return;
  }
  wait_for_previous_kernel();
  // Blocks that have counted themselves before this one began to look are fewer than all.
  const unsigned long long turn = load_relaxed(args.ended) / gridDim.x;
  unsigned char* set = args.exchange + turn % 2 * args.set_bytes;
  if (warp < whole::kMultiplying) {
    whole::arrive_at<1>(whole::kLooked);
    whole::clear(args, args.exchange + (turn + 1) % 2 * args.set_bytes);
    if constexpr (kFixed) {
      whole::multiply_in_order<kGates, kPieces>(args, shared, ring, inputs, set);
    } else {
      whole::multiply<kGates, kType, kSplit, kPieces, kEights>(args, shared, ring, inputs, set);
    }
  } else {
    if constexpr (kAny) {
      const AnyOptions options{args.linear_candidate, args.normalize_gates};
      whole::finish<CellOf, kType, kSplit, kFixed, kEights>(args, options, shared, set);
    } else {
      whole::finish<CellOf, kType, kSplit, kFixed, kEights>(args, UsualOptions{}, shared, set);
    }
    if (warp == whole::kMultiplying) {
      // A block that has no unit in any phase waits for none of its own warps otherwise.
      barrier_sync<whole::kMeeting<1>>(whole::kLooked);
      if (threadIdx.x % 32 == 0) atomicAdd(args.ended, 1ull);
    }
  }
#endif
}

}  // namespace cuda
}  // namespace minserve
