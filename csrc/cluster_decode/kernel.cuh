// A decode step of a small model in one kernel, on Hopper, for more sequences than
// persistent_decode takes.
//
// A cluster of sixteen blocks has up to 32 sequences and all weights of the layers, and of a small
// vocabulary's head: each block reads a sixteenth of them, whichever cluster it is in, so that
// weights come from the L2 cache as often as there are clusters, and what blocks tell each other
// never leaves the cluster. A block has a sixteenth of the channels of everything. Gates and an
// MLP's upper half need all of the residual stream: every block sends its channels to the others.
// Out projection and lower half take the channels that the block has just made: sums over them go
// to the blocks whose channels they are. Both go by bulk copies that a barrier of the receiver
// counts; nobody else waits for anybody.
#pragma once

#include "step.cuh"

namespace minserve {
namespace cuda {
namespace cluster {

template <template <class> class CellOf, int kTiles, int kWidth>
__global__ void __launch_bounds__(kThreads, 1)
    cluster_decode_kernel(const __grid_constant__ ClusterDecodeArgs args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr int kTokens = kTiles * 8;
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ Ring rings[kPairs];
  __shared__ Arrivals arrivals;
  __shared__ Sequences<kTokens> sequences;
  const int warp = threadIdx.x / 32;
  if (threadIdx.x < kPairs) init(rings[threadIdx.x], args.stages);
  if (threadIdx.x == 0) {
    mbarrier_init(arrivals.streamed, 1);
    mbarrier_init(arrivals.convolved, 1);
    mbarrier_init(arrivals.summed, 1);
  }
  fence_mbarrier_init();
  __syncthreads();
  pdl_launch_dependents();
  arrive_at_cluster();
  if (warp == kComputingWarps) {
    fill(args, rings, memory + ClusterLayout(args.shape, kTokens).ring, rank_in_cluster());
    __syncwarp();
    wait_for_cluster();
  } else {
    wait_for_previous_kernel();
    if (threadIdx.x < kTokens) {
      const int token = static_cast<int>(blockIdx.x) / kClusterBlocks * kTokens + threadIdx.x;
      const bool real = token < args.batch;
      const int slot = real ? args.slots[token] : -1, id = real ? args.tokens[token] : -1;
      sequences.slots[threadIdx.x] = slot < args.num_slots ? slot : -1;
      sequences.ids[threadIdx.x] = id < args.ids ? id : -1;
    }
    named_barrier_sync(1, kComputingThreads);
    Step<CellOf, kTiles, kWidth>(args, memory, rings, arrivals, sequences).run();
  }
  // The others' shared memory must be there while something is on its way to them, so nobody leaves
  // before all have received everything.
  arrive_at_cluster();
  wait_for_cluster();
#endif
}

}  // namespace cluster
}  // namespace cuda
}  // namespace minserve
