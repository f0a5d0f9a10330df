// A block's warps and shared memory, and which block and warp has which units of a product.
#pragma once

#include "../arch/sm90.cuh"
#include "args.h"

namespace minserve {
namespace cuda {
namespace persistent {

// Warps: two groups multiply, some run the epilogue, one copies weights.
constexpr int kGroups = 2, kOfGroup = 8, kMmaWarps = kGroups * kOfGroup;
constexpr int kEpilogueWarps = 3, kTmaWarp = kMmaWarps + kEpilogueWarps;
constexpr int kThreads = (kTmaWarp + 1) * 32;
// Rooms for sums of a unit in batch-invariant mode: so many for each epilogue warp.
constexpr int kRoomsEach = 2, kBatchInvariantRooms = kRoomsEach * kEpilogueWarps;

// A stage is what one group multiplies at once: a block of inputs for each of its warps, of two
// tiles of 8 rows.
constexpr int kWarpBytes = kBlockBytes * kUnit;
constexpr int kTileBytes = kOfGroup * kWarpBytes, kStageBytes = 2 * kTileBytes;
static_assert(kMmaWarps == kTaking, "a warp takes what it multiplies, unless order is fixed");
static_assert(kMostKeptUnits == kEpilogueWarps && kMostColumnTiles == 2,
              "each warp that finishes keeps one unit, or two eights");
static_assert(sizeof(PersistentDecodeArgs) <= 32764, "what a kernel's arguments may have");
constexpr int kMostStages = 16;
// Where the sums of a warp for a unit lie: token t, row r. Lanes that have a row of every other
// token meet all banks.
__host__ __device__ constexpr int place_of_sum(int token, int row) {
  return token * kUnit + token / 4 * 8 + row;
}

// Whether a cell's outputs are gated by a pre-activation of their own and normed before the next
// product reads them; SwiGLU comes with such cells alone.
template <class Cell>
constexpr bool kOutputGate = Cell::kPreactivations > Cell::kInputs;

template <class Cell, bool kSplit, bool kBatchInvariant, int kColumnTiles = 1>
struct Shared {
  static constexpr int kGates = Cell::kPreactivations;
  static_assert(kColumnTiles == 1 || !(kSplit || kBatchInvariant), "for a few rows");
  // Sums of a unit come from every warp, or in batch-invariant mode from one for each part of the
  // inputs.
  static constexpr int kParts = kBatchInvariant ? kMostSplitK : kMmaWarps;
  static constexpr int kRooms = kBatchInvariant ? kBatchInvariantRooms : kEpilogueWarps;
  static constexpr int kSquares = kBatchInvariant ? kMostSquares : kMmaWarps;
  static constexpr int kTokens = kSplit ? kMostSplit : kColumns;
  static constexpr int kSumsOfColumnTile = place_of_sum(kTokens, 0),
                       kSums = kColumnTiles * kSumsOfColumnTile;
  float sums[kRooms][kGates][kParts][kSums];  // of a unit; rooms for each epilogue warp
  // Two products in a row may be normed: one by squares of its inputs, one by those of a cell's
  // outputs. (In batch-invariant mode one's are not written before the other's have been read.)
  static constexpr int kNorms = kOutputGate<Cell> && !kBatchInvariant ? 2 : 1;
  float squares[kNorms][kColumnTiles][kSquares][kColumns];
  std::uint64_t full[kMostStages], empty[kMostStages];  // of the ring of weights
  std::uint64_t taken[kEpilogueWarps];                  // sums
  // In batch-invariant mode: units whose sums have been taken, by epilogue warps; the newest phase
  // whose inputs and their squares are all here; stages that copies have been asked for.
  unsigned units_taken[kEpilogueWarps], products_begun, stages_asked;
  std::uint64_t arrived[kMmaWarps];  // inputs that a warp has asked for, of several column tiles
  std::uint64_t stored;              // this block's last unit of a phase
};

// Named barriers: 0 is that of __syncthreads, then one for each room for sums: an epilogue warp
// waits, or two of two column tiles, until all have arrived that multiply, or in batch-invariant
// mode all that have had a part.
constexpr int kSummed = 1;
template <int kColumnTiles>
constexpr int kBarrierThreads = (kMmaWarps + kColumnTiles) * 32;
constexpr int kLooked = kSummed + kBatchInvariantRooms;  // all have read how many blocks have ended
constexpr int kTaken = kLooked + 1;  // in batch-invariant mode: all inputs of a product are there
static_assert(kTaken < 16, "a block has sixteen barriers");

template <int kColumnTiles = 1>
__device__ __forceinline__ void named_barrier_arrive(int barrier) {
  asm volatile("barrier.cta.arrive %0, %1;" ::"r"(barrier), "n"(kBarrierThreads<kColumnTiles>)
               : "memory");
}

template <int kColumnTiles, class Shared>
__device__ __forceinline__ void prepare(Shared& shared) {
#pragma unroll 1
  for (int i = 0; i < kMostStages; ++i) {
    mbarrier_init(shared.full[i], 1);
    mbarrier_init(shared.empty[i], kOfGroup);
  }
#pragma unroll 1
  for (int i = 0; i < kEpilogueWarps; ++i) {
    mbarrier_init(shared.taken[i], kColumnTiles);
    for (int column_tile = 0; column_tile < kColumnTiles; ++column_tile) {
      mbarrier_arrive(shared.taken[i]);  // as if there had been sums
    }
    shared.units_taken[i] = 0;
  }
#pragma unroll 1
  for (std::uint64_t& arrived : shared.arrived) mbarrier_init(arrived, 1);
  shared.products_begun = shared.stages_asked = 0;
  mbarrier_init(shared.stored, kColumnTiles);
  fence_mbarrier_init();
}

// This block's units, from the first to before the end. Tiles are a unit's rows of one gate; all
// gates of a unit follow each other.
struct Units {
  int first, end;
};
__device__ __forceinline__ Units units_of(const DecodePhase& phase) {
  const int block = static_cast<int>(blockIdx.x) - phase.shift;
  const int first = (block < 0 ? block + static_cast<int>(gridDim.x) : block) * phase.each;
  return {first, min(first + phase.each, phase.units)};
}
template <class Cell>
__device__ __forceinline__ int gates_of(const DecodePhase& phase) {
  if (kOutputGate<Cell> && phase.kind == static_cast<int>(PhaseKind::swiglu)) return 2;
  return phase.kind == static_cast<int>(PhaseKind::gates) ? Cell::kPreactivations : 1;
}
// Whether its inputs are a cell's outputs, to be divided by their norm.
template <class Cell>
__device__ __forceinline__ bool norms_outputs(const DecodePhase& phase) {
  return kOutputGate<Cell> && phase.squares != 0 &&
         phase.kind == static_cast<int>(PhaseKind::residual);
}
// A stage of the ring of weights, and how often the ring has been gone round.
struct PipelineState {
  int at = 0;
  unsigned round = 0;
  __device__ __forceinline__ void advance(int by, int slots) {
    at += by;
    if (at >= slots) at -= slots, ++round;
  }
};

}  // namespace persistent
}  // namespace cuda
}  // namespace minserve
