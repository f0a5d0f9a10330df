// How a block is divided, and which units of a product are whose.
#pragma once

#include "../linear/hopper.cuh"
#include "args.h"

namespace minserve {
namespace cuda {
namespace whole {

// Warps: some multiply, some finish sums, one copies weights.
constexpr int kMultiplying = 12, kFinishing = 3, kCopier = kMultiplying + kFinishing;
constexpr int kThreads = (kCopier + 1) * 32;

// A stage is a block of inputs for each warp that multiplies, of 8 rows.
constexpr int kWarpBytes = kBlockBytes * kUnit;
constexpr int kStageBytes = kMultiplying * kWarpBytes;
static_assert(kMostKeptUnits == kFinishing, "each warp that finishes keeps one unit");
static_assert(sizeof(WholeStepArgs) <= 32764, "what a kernel's arguments may have");
constexpr int kMostStages = 16;
// Where the sums of a warp for a unit lie: token t, row r. Lanes that have a row of every other
// token meet all banks.
constexpr int kSums = 72;
__device__ __forceinline__ int place_of_sum(int token, int row) {
  return token * kUnit + token / 4 * 8 + row;
}

template <int kGates>
struct Shared {
  float sums[kFinishing][kGates][kMultiplying][kSums];  // of one unit for each warp that finishes
  float squares[kMultiplying][kMostTokens];
  std::uint64_t full[kMostStages], empty[kMostStages];  // of the ring of weights
  std::uint64_t taken[kFinishing];                      // sums
};

// Named barriers: 0 is that of __syncthreads, then one for each warp that finishes: it waits until
// all that multiply have arrived.
constexpr int kSummed = 1, kMeeting = (kMultiplying + 1) * 32;
constexpr int kLooked = kSummed + kFinishing;  // all have read how many blocks have ended

__device__ __forceinline__ void arrive_at(int barrier) {
  asm volatile("barrier.cta.arrive %0, %1;" ::"r"(barrier), "n"(kMeeting) : "memory");
}

template <int kGates>
__device__ __forceinline__ void prepare(Shared<kGates>& shared) {
#pragma unroll 1
  for (int i = 0; i < kMostStages; ++i) {
    init_barrier(shared.full[i], 1);
    init_barrier(shared.empty[i], kMultiplying);
  }
#pragma unroll 1
  for (int i = 0; i < kFinishing; ++i) {
    init_barrier(shared.taken[i], 1);
    arrive(shared.taken[i]);  // as if there had been sums
  }
  fence_barriers();
}

// This block's units: `first`, and the next ones gridDim.x apart. Tiles are a unit's rows of one
// gate; all gates of a unit follow each other.
__device__ __forceinline__ int first_unit(const WholeStepPhase& phase) {
  const int unit = static_cast<int>(blockIdx.x) - phase.shift;
  return unit < 0 ? unit + static_cast<int>(gridDim.x) : unit;
}
template <int kGates>
__device__ __forceinline__ int gates_of(const WholeStepPhase& phase) {
  return phase.kind == static_cast<int>(PhaseKind::gates) ? kGates : 1;
}
// Which warp finishes the next unit of a phase: they take turns from the first one on, so that the
// units of the residual stream always come to the same warps.
__device__ __forceinline__ void pass_on(int& finisher) {
  if (++finisher == kFinishing) finisher = 0;
}

// A ring's places, in the order in which all go through them.
struct Turn {
  int at = 0;
  unsigned round = 0;
  __device__ __forceinline__ void advance(int places) {
    if (++at == places) at = 0, ++round;
  }
};

}  // namespace whole
}  // namespace cuda
}  // namespace minserve
