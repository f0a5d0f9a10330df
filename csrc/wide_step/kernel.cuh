// A decode step of a small model in one kernel, on Hopper, for some hundred sequences.
//
// As cluster_step, but that a cluster is eight blocks, of which more run at once, and has more
// sequences: warpgroups multiply, and sums over a block's own channels go to the blocks whose
// channels they are in bfloat16, for what blocks tell each other takes as long as their products.
#pragma once

#include "sender.cuh"
#include "step.cuh"

namespace minserve {
namespace cuda {
namespace wide {

template <template <class> class CellOf, int kTokens>
__global__ void __launch_bounds__(kThreads, 1)
    wide_step_kernel(const __grid_constant__ WideStepArgs args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr int kSlabs = slabs_of_stage(kTokens);
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ Ring rings[kWideGroups];
  __shared__ Arrivals arrivals;
  __shared__ __align__(16) Sequences<kTokens> sequences;
  __shared__ __align__(8) float scales[kTokens];
  if (threadIdx.x < kWideGroups) init(rings[threadIdx.x], args.stages);
  if (threadIdx.x == 32) {
    for (std::uint64_t& barrier : arrivals.streamed) init_barrier(barrier, 1);
    init_barrier(arrivals.squared, 1);
    init_barrier(arrivals.summed, 1 + args.wide.own_steps());
    init_barrier(arrivals.read, kWideBlocks);
  }
  fence_barriers();
  __syncthreads();
  let_next_kernel_start();
  arrive_at_cluster();
  // Said so that the compiler knows it to be the same in all lanes.
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 32), 0);
  if (warp >= kComputingThreads / 32) {
    give_registers<kFewRegisters>();
    const int group = warp - kComputingThreads / 32;
    if (group < kWideGroups && threadIdx.x % 32 == 0) {
      fill<kSlabs>(args, rings[group], memory + args.at.ring, rank_in_cluster(), group);
    }
    __syncwarp();
    wait_for_cluster();
    if (group == kWideGroups) Sender<kTokens>(args, memory, arrivals, scales).run();
  } else {
    take_registers<kManyRegisters>();
    wait_for_previous_kernel();
    if (threadIdx.x < kTokens) {
      const int token = static_cast<int>(blockIdx.x) / kWideBlocks * kTokens + threadIdx.x;
      const bool real = token < args.batch;
      const int slot = real ? args.slots[token] : -1, id = real ? args.tokens[token] : -1;
      const bool live = 0 <= slot && slot < args.num_slots;
      sequences.slots[threadIdx.x] = live ? slot : -1;
      sequences.rows[threadIdx.x] = live ? slot * args.cell_slot_stride : -1;
      sequences.ids[threadIdx.x] = id < args.ids ? id : -1;
    }
    wait_for_cluster();  // all blocks have set their barriers up
    meet(1, kComputingThreads);
    Step<CellOf, kTokens, kSlabs>(args, memory, rings, arrivals, sequences, scales, warp / 4).run();
  }
  // The others' shared memory must be there while something is on its way to them, so nobody leaves
  // before all have received everything.
  arrive_at_cluster();
  wait_for_cluster();
#endif
}

}  // namespace wide
}  // namespace cuda
}  // namespace minserve
