// The rings of weights in a block's shared memory, one for each of its groups of warps: another
// warp fills them, as far ahead of the sequences as they go.
#pragma once

#include "../common/delays.cuh"
#include "../cluster_step/place.cuh"
#include "../linear/hopper.cuh"
#include "args.h"

namespace minserve {
namespace cuda {
namespace wide {

// Warps that multiply, and a group of others: three fill rings, one sends this block's channels.
constexpr int kComputingThreads = kWideGroups * 128, kThreads = kComputingThreads + 128;
constexpr int kFewRegisters = 56, kManyRegisters = 152;
constexpr int kFewestStages = 3, kMostStages = 24;

struct Ring {
  std::uint64_t full[kMostStages], empty[kMostStages];
};
static_assert(sizeof(Ring) == 2 * kMostStages * 8, "one behind the other, as Stages finds them");

__device__ __forceinline__ void init(Ring& ring, int stages) {
  for (int i = 0; i < stages; ++i) {
    init_barrier(ring.full[i], 1);
    init_barrier(ring.empty[i], 4);  // a warp each
  }
}

// A group of warps gets all slabs of its stream, a stage at a time: one thread's work, for those of
// one warp would take turns.
template <int kSlabs>
__device__ __forceinline__ void fill(const WideStepArgs& args, Ring& ring, unsigned char* memory,
                                     unsigned rank, int group) {
  const auto* from = static_cast<const unsigned char*>(args.weights) +
                     (rank * kWideGroups + group) * args.stream_bytes;
  constexpr int kStageBytes = kSlabs * kSlabBytes;
  memory += group * args.stages * kStageBytes;
  Place at;
#pragma unroll 1
  for (int number = 0; number <= args.layers * WideShape::kRuns; ++number) {
    const WideRun run = number < args.layers * WideShape::kRuns
                            ? args.wide.run(number % WideShape::kRuns)
                            : args.wide.head_run(group);
#pragma unroll 1
    for (int pass = 0; pass < run.passes; ++pass) {
#pragma unroll 1
      for (int left = run.slabs; left > 0; left -= kSlabs) {
        const auto bytes = static_cast<unsigned>(min(left, kSlabs) * kSlabBytes);
        delay(64, 4000);
        if (at.turn > 0) wait_barrier(ring.empty[at.slot], (at.turn - 1) % 2);
        arrive_expecting(ring.full[at.slot], bytes);
        copy_bytes(memory + at.slot * kStageBytes, from, bytes, ring.full[at.slot]);
        from += bytes;
        at.go_on(args.stages);
      }
    }
  }
}

// A computing warp's way through its group's ring. Addresses are kept, since to make them again
// costs instructions at every stage.
template <int kSlabs>
class Stages {
 public:
  __device__ __forceinline__ Stages(const WideStepArgs& args, Ring& ring,
                                    const unsigned char* memory)
      : barriers_(shared_address(&ring)),
        first_(shared_address(memory) >> 4),
        count_(args.stages) {}

  // The place of the next slabs, in units of sixteen bytes, once they are there.
  __device__ __forceinline__ std::uint32_t next() {
    if (!known_) wait_barrier(barriers_ + next_ * 8, parity_);
    const std::uint32_t found = first_ + next_ * (kSlabs * kSlabBytes / 16);
    if (++next_ == count_) next_ = 0, parity_ ^= 1;
    return found;
  }
  // Whether those after them are there: to ask takes time, in which products can be given to the
  // tensor cores.
  __device__ __forceinline__ void look_ahead() {
    known_ = barrier_passed(barriers_ + next_ * 8, parity_);
  }
  // The warp's products with the first slabs that it still has are done.
  __device__ __forceinline__ void release() {
    if (threadIdx.x % 32 == 0) arrive(barriers_ + kMostStages * 8 + released_ * 8);
    if (++released_ == count_) released_ = 0;
  }

 private:
  const std::uint32_t barriers_, first_;
  const int count_;
  int next_ = 0, released_ = 0;
  unsigned parity_ = 0;
  bool known_ = false;
};

}  // namespace wide
}  // namespace cuda
}  // namespace minserve
