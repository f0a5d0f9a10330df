// How a block is divided, and which units of a product are whose.
#pragma once

#include "../arch/sm90.cuh"
#include "args.h"

namespace minserve {
namespace cuda {
namespace whole {

// Warps: two groups multiply, some finish sums, one copies weights.
constexpr int kGroups = 2, kOfGroup = 8, kMultiplying = kGroups * kOfGroup;
constexpr int kFinishing = 3, kCopier = kMultiplying + kFinishing;
constexpr int kThreads = (kCopier + 1) * 32;
// Rooms for sums of a unit in a fixed order: so many for each warp that finishes.
constexpr int kRoomsEach = 2, kFixedRooms = kRoomsEach * kFinishing;

// A stage is what one group multiplies at once: a block of inputs for each of its warps, of two
// tiles of 8 rows.
constexpr int kWarpBytes = kBlockBytes * kUnit;
constexpr int kTileBytes = kOfGroup * kWarpBytes, kStageBytes = 2 * kTileBytes;
static_assert(kMultiplying == kTaking, "a warp takes what it multiplies, unless order is fixed");
static_assert(kMostKeptUnits == kFinishing && kMostEights == 2,
              "each warp that finishes keeps one unit, or two eights");
static_assert(sizeof(WholeStepArgs) <= 32764, "what a kernel's arguments may have");
constexpr int kMostStages = 16;
// Where the sums of a warp for a unit lie: token t, row r. Lanes that have a row of every other
// token meet all banks.
__host__ __device__ constexpr int place_of_sum(int token, int row) {
  return token * kUnit + token / 4 * 8 + row;
}

template <int kGates, bool kSplit, bool kFixed, int kEights = 1>
struct Shared {
  static_assert(kEights == 1 || !(kSplit || kFixed), "for a few rows");
  // Sums of a unit come from every warp, or in a fixed order from one for each part of the inputs.
  static constexpr int kParts = kFixed ? kMostParts : kMultiplying;
  static constexpr int kRooms = kFixed ? kFixedRooms : kFinishing;
  static constexpr int kSquares = kFixed ? kMostSquares : kMultiplying;
  static constexpr int kTokens = kSplit ? kMostSplit : kEight;
  static constexpr int kSumsOfEight = place_of_sum(kTokens, 0), kSums = kEights * kSumsOfEight;
  float sums[kRooms][kGates][kParts][kSums];  // of a unit; rooms for each warp that finishes
  float squares[kEights][kSquares][kEight];
  std::uint64_t full[kMostStages], empty[kMostStages];  // of the ring of weights
  std::uint64_t taken[kFinishing];                      // sums
  // In a fixed order: units whose sums have been taken, by warps that finish; the newest phase
  // whose inputs and their squares are all here; stages that copies have been asked for.
  unsigned units_taken[kFinishing], products_begun, stages_asked;
  std::uint64_t arrived[kMultiplying];  // inputs that a warp has asked for, of several eights
  std::uint64_t stored;                 // this block's last unit of a phase
};

// Named barriers: 0 is that of __syncthreads, then one for each room for sums: a warp that finishes
// waits, or two of two eights, until all have arrived that multiply, or in a fixed order all that
// have had a part.
constexpr int kSummed = 1;
template <int kEights>
constexpr int kMeeting = (kMultiplying + kEights) * 32;
constexpr int kLooked = kSummed + kFixedRooms;  // all have read how many blocks have ended
constexpr int kTaken = kLooked + 1;  // in a fixed order: all inputs of a product are there
static_assert(kTaken < 16, "a block has sixteen barriers");

template <int kEights = 1>
__device__ __forceinline__ void arrive_at(int barrier) {
  asm volatile("barrier.cta.arrive %0, %1;" ::"r"(barrier), "n"(kMeeting<kEights>) : "memory");
}

template <int kEights, class Shared>
__device__ __forceinline__ void prepare(Shared& shared) {
#pragma unroll 1
  for (int i = 0; i < kMostStages; ++i) {
    init_barrier(shared.full[i], 1);
    init_barrier(shared.empty[i], kOfGroup);
  }
#pragma unroll 1
  for (int i = 0; i < kFinishing; ++i) {
    init_barrier(shared.taken[i], kEights);
    for (int eight = 0; eight < kEights; ++eight) {
      arrive(shared.taken[i]);  // as if there had been sums
    }
    shared.units_taken[i] = 0;
  }
#pragma unroll 1
  for (std::uint64_t& arrived : shared.arrived) init_barrier(arrived, 1);
  shared.products_begun = shared.stages_asked = 0;
  init_barrier(shared.stored, kEights);
  fence_barriers();
}

// This block's units, from the first to before the end. Tiles are a unit's rows of one gate; all
// gates of a unit follow each other.
struct Units {
  int first, end;
};
__device__ __forceinline__ Units units_of(const WholeStepPhase& phase) {
  const int block = static_cast<int>(blockIdx.x) - phase.shift;
  const int first = (block < 0 ? block + static_cast<int>(gridDim.x) : block) * phase.each;
  return {first, min(first + phase.each, phase.units)};
}
template <int kGates>
__device__ __forceinline__ int gates_of(const WholeStepPhase& phase) {
  return phase.kind == static_cast<int>(PhaseKind::gates) ? kGates : 1;
}
// A ring's places, in the order in which all go through them.
struct Turn {
  int at = 0;
  unsigned round = 0;
  __device__ __forceinline__ void advance(int by, int places) {
    at += by;
    if (at >= places) at -= places, ++round;
  }
};

}  // namespace whole
}  // namespace cuda
}  // namespace minserve
