// Inputs of two eights of sequences, for weights in bfloat16, by the copy engine: a warp asks it
// for a block of an eight at a time, which lies together, and looks for missing words where they
// have come to. Loads of as many would take more registers than there are, and a multiprocessor can
// ask for a limited number of lines.
//
// What other blocks store is not ordered before what the copy engine reads: each word says by
// itself whether it is there, and says nothing of others.
#pragma once

#include "../core/race_delays.cuh"
#include "activation_tiles.cuh"

namespace minserve {
namespace cuda {
namespace whole {

// As take_whole (activation_tiles.cuh), not in a fixed order. `arrived` counts the bytes that have come, for
// the `turn`th time.
template <bool kNorm>
__device__ __forceinline__ void take_eights(const WholeStepArgs& args, const WholeStepPhase& phase,
                                            int first, const unsigned char* set, unsigned char* own,
                                            float* squares, std::uint64_t& arrived,
                                            unsigned& turn) {
  constexpr int kEights = 2, kBlock = inputs_of_block(WeightType::bf16), kUnits = kBlock / kUnit;
  constexpr int kBytes = kUnits * kUnitLine;  // of a block of an eight
  constexpr int kMostBlocks = kMostInputBytes / (kEights * kBytes) / kMultiplying;
  constexpr int kMost = kEights * kMostBlocks;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, token = lane % kEight;
  const int blocks = min(phase.inputs / kBlock - first, phase.at_once);
  const int count = blocks > warp ? (blocks - warp + kMultiplying - 1) / kMultiplying : 0;
  const int first_unit = (first + warp) * kUnits;
  // Of block i / 2, eight i % 2.
  const auto place = [&](int i) {
    return own + i / kEights * (kMultiplying * kBytes) + i % kEights * args.input_bytes;
  };
  const auto source = [&](int i) {
    return set + i % kEights * args.eight_bytes + phase.in +
           (first_unit + i / kEights * (kMultiplying * kUnits)) * kUnitLine;
  };
  float sums[kMost] = {};  // of squares: blocks come in any order, and are added up in one
  uint4 norm[kNorm ? kMostBlocks : 1][2];
  if (kNorm) {
#pragma unroll
    for (int i = 0; i < kMostBlocks; ++i) {
      const uint4* from = static_cast<const uint4*>(phase.norm) + first_unit +
                          i * (kMultiplying * kUnits) + lane / kEight;
      if (i < count) norm[i][0] = __ldg(from), norm[i][1] = __ldg(from + kUnits / 2);
    }
  }
  unsigned left = (1u << kEights * count) - 1;
  // What this warp has written there, or read, comes before what is copied.
  fence_for_copies();
  __syncwarp();
#pragma unroll 1
  while (left) {
    if (lane == 0) {
      arrive_expecting(arrived, __popc(left) * kBytes);
#pragma unroll
      for (int i = 0; i < kMost; ++i) {
        if (left >> i & 1) copy_bytes(place(i), source(i), kBytes, arrived);
      }
    }
    wait_barrier(arrived, turn++ % 2);
    delay(16, 3000);
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      if (!(left >> i & 1)) continue;
      uint4* const at = reinterpret_cast<uint4*>(place(i)) + lane;
      uint4 low = at[0], high = at[32];
      const bool real = i % kEights * kEight + token < args.batch;
      if (!__all_sync(0xffffffffu, !real || (written(low) && written(high)))) continue;
      left &= ~(1u << i);
      if (kNorm) {
        if (!real) low = high = uint4{};
        add_squares(sums[i], low);
        add_squares(sums[i], high);
        at[0] = product(low, norm[i / kEights][0]);
        at[32] = product(high, norm[i / kEights][1]);
      }
    }
  }
  if (kNorm) {
#pragma unroll
    for (int eight = 0; eight < kEights; ++eight) {
      float sum = sums[eight];
#pragma unroll
      for (int i = eight + kEights; i < kMost; i += kEights) sum += sums[i];
      sum += __shfl_xor_sync(0xffffffffu, sum, 8);
      sum += __shfl_xor_sync(0xffffffffu, sum, 16);
      if (lane < kEight) squares[eight * kMultiplying * kEight + token] = sum;
    }
  }
  __syncwarp();
}

}  // namespace whole
}  // namespace cuda
}  // namespace minserve
