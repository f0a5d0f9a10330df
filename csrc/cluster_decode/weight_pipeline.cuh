// The rings of chunks of weights in a block's shared memory, one for each pair of its warps:
// another warp fills them, as far ahead of the sequences as they go.
#pragma once

#include "../core/race_delays.cuh"
#include "../arch/sm90.cuh"
#include "args.h"
#include "pipeline_state.cuh"

namespace minserve {
namespace cuda {
namespace cluster {

constexpr int kThreads = (kComputingWarps + 1) * 32;
constexpr int kMostStages = 16;

struct Ring {
  std::uint64_t full[kMostStages], empty[kMostStages];
};

__device__ __forceinline__ void init(Ring& ring, int stages) {
  for (int i = 0; i < stages; ++i) {
    mbarrier_init(ring.full[i], 1);
    mbarrier_init(ring.empty[i], 2);
  }
}

// A lane's pair of warps gets all chunks of its stream, one after another.
__device__ __forceinline__ void fill(const ClusterDecodeArgs& args, Ring (&rings)[kPairs],
                                     unsigned char* memory, unsigned rank) {
  const int pair = threadIdx.x % 32, last = args.layers * ClusterShape::kRuns;
  if (pair >= kPairs) return;
  Ring& ring = rings[pair];
  memory += pair * args.stages * kChunkBytes;
  const auto* from =
      static_cast<const unsigned char*>(args.weights) + (rank * kPairs + pair) * args.stream_bytes;
  PipelineState at;
  Run run = {};
  int next = 0;  // number of the run that comes after it
  while (true) {
    while (run.tiles == 0 && next <= last) {
      run = next < last ? args.shape.run(next % ClusterShape::kRuns, pair)
                        : args.shape.head_run(pair);
      ++next;
    }
    if (run.tiles == 0) return;
    // No lane may hold the others up.
    if (at.round > 0 && !mbarrier_test_wait(ring.empty[at.slot], (at.round - 1) % 2)) {
      __nanosleep(20);
      continue;
    }
    const int tiles = min(run.tiles, run.of_chunk);
    const unsigned bytes = static_cast<unsigned>(tiles * kTileBytes);
    delay(64, 4000);
    mbarrier_arrive_expect_tx(ring.full[at.slot], bytes);
    tma_load_bytes(memory + at.slot * kChunkBytes, from, bytes, ring.full[at.slot]);
    from += bytes;
    run.tiles -= tiles;
    at.advance(args.stages);
  }
}

// A computing warp's way through its pair's chunks.
class Chunks {
 public:
  __device__ __forceinline__ Chunks(const ClusterDecodeArgs& args, Ring& ring,
                                    const unsigned char* memory)
      : ring_(ring),
        memory_(shared_address(memory) + threadIdx.x % 32 * 16),
        stages_(args.stages) {}

  // Where this lane's sixteen bytes of each tile of the next chunk are, once they are there.
  __device__ __forceinline__ std::uint32_t next() {
    mbarrier_wait(ring_.full[at_.slot], at_.round % 2);
    const std::uint32_t found = memory_ + at_.slot * kChunkBytes;
    at_.advance(stages_);
    return found;
  }
  // The warp has multiplied the chunk before those it still has: what has only been loaded may not
  // have arrived yet.
  __device__ __forceinline__ void release() {
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(ring_.empty[released_]);
    if (++released_ == stages_) released_ = 0;
  }

 private:
  Ring& ring_;
  std::uint32_t memory_;
  int stages_, released_ = 0;
  PipelineState at_;
};

}  // namespace cluster
}  // namespace cuda
}  // namespace minserve
