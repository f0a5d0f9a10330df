// Inputs of two column tiles of sequences, for weights in bfloat16, by TMA: a warp asks it
// for a block of a column tile at a time, which lies together, and looks for missing words where
// they have come to. Loads of as many would take more registers than there are, and a
// multiprocessor can ask for a limited number of lines.
//
// What other blocks store is not ordered before what TMA reads: each word says by
// itself whether it is there, and says nothing of others.
#pragma once

#include "../core/race_delays.cuh"
#include "activation_tiles.cuh"

namespace minserve {
namespace cuda {
namespace persistent {

// As take_whole (activation_tiles.cuh), not in batch-invariant mode. `arrived` counts the bytes
// that have come, for the `turn`th time.
template <NormOf kNormOf, int kGates>
__device__ __forceinline__ void take_column_tiles(const PersistentDecodeArgs& args,
                                                  const DecodePhase& phase, int first,
                                                  const unsigned char* set, unsigned char* own,
                                                  float* squares, std::uint64_t& arrived,
                                                  unsigned& turn) {
  constexpr bool kNorm = kNormOf == NormOf::inputs, kOutputs = kNormOf == NormOf::outputs;
  constexpr int kColumnTiles = 2, kBlock = inputs_of_block(WeightType::bf16),
                kUnits = kBlock / kUnit;
  constexpr int kBytes = kUnits * kUnitLine;  // of a block of a column tile
  constexpr int kRoom = input_room(kGates, kMostTokens);
  constexpr int kMostBlocks = kRoom / (kColumnTiles * kBytes) / kMmaWarps;
  constexpr int kMost = kColumnTiles * kMostBlocks;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, token = lane % kColumns;
  const int blocks = min(phase.inputs / kBlock - first, phase.at_once);
  const int count = blocks > warp ? (blocks - warp + kMmaWarps - 1) / kMmaWarps : 0;
  const int first_unit = (first + warp) * kUnits;
  // Of block i / 2, eight i % 2.
  const auto address_of = [&](int i) {
    return own + i / kColumnTiles * (kMmaWarps * kBytes) + i % kColumnTiles * args.input_bytes;
  };
  const auto source = [&](int i) {
    return set + i % kColumnTiles * args.column_tile_bytes + phase.in +
           (first_unit + i / kColumnTiles * (kMmaWarps * kUnits)) * kUnitLine;
  };
  float sums[kMost] = {};  // of squares: blocks come in any order, and are added up in one
  uint4 norm[kNorm ? kMostBlocks : 1][2];
  if (kNorm) {
#pragma unroll
    for (int i = 0; i < kMostBlocks; ++i) {
      const uint4* from = static_cast<const uint4*>(phase.norm) + first_unit +
                          i * (kMmaWarps * kUnits) + lane / kColumns;
      if (i < count) norm[i][0] = __ldg(from), norm[i][1] = __ldg(from + kUnits / 2);
    }
  }
  // Sums of squares of a cell's outputs: of this lane's units of a block, the first and the second.
  float told[kOutputs ? kMost : 1][2];
  const auto look_for_sums = [&] {
    bool all = true;
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (written(told[i][half])) continue;
        load_number(told[i][half], set + i % kColumnTiles * args.column_tile_bytes + phase.squares +
                                       ((first_unit + i / kColumnTiles * (kMmaWarps * kUnits) +
                                         lane / kColumns + half * (kUnits / 2)) *
                                            kColumns +
                                        token) *
                                           4);
      }
    }
#pragma unroll
    for (int i = 0; i < kMost; ++i) all = all && written(told[i][0]) && written(told[i][1]);
    return __all_sync(0xffffffffu, all);
  };
  if constexpr (kOutputs) {
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      const bool real = i % kColumnTiles * kColumns + token < args.batch;
      told[i][0] = told[i][1] = i / kColumnTiles < count && real ? missing_number<float>() : 0.0f;
    }
  }
  unsigned left = (1u << kColumnTiles * count) - 1;
  // What this warp has written there, or read, comes before what is copied.
  fence_proxy_async();
  __syncwarp();
#pragma unroll 1
  while (left) {
    if (lane == 0) {
      mbarrier_arrive_expect_tx(arrived, __popc(left) * kBytes);
#pragma unroll
      for (int i = 0; i < kMost; ++i) {
        if (left >> i & 1) tma_load_bytes(address_of(i), source(i), kBytes, arrived);
      }
    }
    if constexpr (kOutputs) look_for_sums();
    mbarrier_wait(arrived, turn++ % 2);
    delay(16, 3000);
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      if (!(left >> i & 1)) continue;
      uint4* const at = reinterpret_cast<uint4*>(address_of(i)) + lane;
      uint4 low = at[0], high = at[32];
      const bool real = i % kColumnTiles * kColumns + token < args.batch;
      if (!__all_sync(0xffffffffu, !real || (written(low) && written(high)))) continue;
      left &= ~(1u << i);
      if (kNorm) {
        if (!real) low = high = uint4{};
        add_squares(sums[i], low);
        add_squares(sums[i], high);
        at[0] = product(low, norm[i / kColumnTiles][0]);
        at[32] = product(high, norm[i / kColumnTiles][1]);
      }
    }
  }
  if constexpr (kOutputs) {
    while (!look_for_sums()) {
    }
#pragma unroll
    for (int i = 0; i < kMost; ++i) sums[i] = told[i][0] + told[i][1];
  }
  if (kNorm || kOutputs) {
#pragma unroll
    for (int column_tile = 0; column_tile < kColumnTiles; ++column_tile) {
      float sum = sums[column_tile];
#pragma unroll
      for (int i = column_tile + kColumnTiles; i < kMost; i += kColumnTiles) sum += sums[i];
      sum += __shfl_xor_sync(0xffffffffu, sum, 8);
      sum += __shfl_xor_sync(0xffffffffu, sum, 16);
      float& of_token = squares[column_tile * kMmaWarps * kColumns + token];
      if (lane < kColumns) of_token = kOutputs && first > 0 ? of_token + sum : sum;
    }
  }
  __syncwarp();
}

}  // namespace persistent
}  // namespace cuda
}  // namespace minserve
