// Weights into shared memory, and products of two tiles at a time.
//
// Every warp multiplies its own blocks of the inputs by all tiles of its block, and takes them
// without waiting for another warp.
#pragma once

#include "exchange.cuh"
#include "inputs.cuh"
#include "weights.cuh"

namespace minserve {
namespace cuda {
namespace whole {

// Stages on their way: as many as hide the memory's latency. What the blocks hand each other waits
// behind a longer queue.
constexpr int kInFlight = 3;

// Blocks of 8 rows of a matrix, seen as [blocks, rows, inputs of a block], to a stage; zeros past
// its end.
__device__ __forceinline__ void copy_stage(void* to, const void* map, int row, int block,
                                           std::uint64_t& barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(shared_address(to)),
      "l"(map), "r"(0), "r"(row), "r"(block), "r"(shared_address(&barrier))
      : "memory");
}

// One thread copies every tile that its block will need, as room comes free: two tiles at a time,
// chunk by chunk in turn, because they are multiplied together.
template <int kGates, WeightType kType>
__device__ __forceinline__ void copy_weights(const WholeStepArgs& args, Shared<kGates>& shared,
                                             unsigned char* ring) {
  const int in_flight = min(kInFlight, args.stages);
  Turn stage, landed;
  int on_their_way = 0;
  const auto copy = [&](const void* map, int row, int block) {
    if (stage.round > 0) wait_barrier(shared.empty[stage.at], (stage.round - 1) % 2);
    if (on_their_way == in_flight) {
      wait_barrier(shared.full[landed.at], landed.round % 2);
      landed.advance(args.stages);
      --on_their_way;
    }
    arrive_expecting(shared.full[stage.at], kStageBytes);
    copy_stage(ring + stage.at * kStageBytes, map, row, block, shared.full[stage.at]);
    stage.advance(args.stages);
    ++on_their_way;
  };
#pragma unroll 1
  for (int p = 1; p < args.phases; ++p) {
    const WholeStepPhase& phase = args.phase[p];
    const int units = phase.units, gates = gates_of<kGates>(phase);
    const int blocks = phase.inputs / inputs_of_block(kType);
    const void* map = phase.weight;
    int unit = first_unit(phase), gate = 0;
    const auto next_row = [&] {  // of the next tile; -1: there is none
      const int row = unit < units ? (gate * units + unit) * kUnit : -1;
      if (++gate == gates) gate = 0, unit += gridDim.x;
      return row;
    };
#pragma unroll 1
    for (int first = next_row(); first >= 0; first = next_row()) {
      const int second = next_row();
#pragma unroll 1
      for (int block = 0; block < blocks; block += kMultiplying) {
        copy(map, first, block);
        if (second >= 0) copy(map, second, block);
      }
    }
  }
}

template <int kGates, WeightType kType, bool kSplit>
__device__ __forceinline__ void multiply(const WholeStepArgs& args, Shared<kGates>& shared,
                                         const unsigned char* ring, unsigned char* inputs,
                                         const unsigned char* set) {
  constexpr int kBlock = inputs_of_block(kType);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  using Tiles = Tiles<kType, kSplit>;
  const int of_warp = bytes_of_block(kType, kSplit, args.batch), of_block = kMultiplying * of_warp;
  unsigned char* own = inputs + warp * of_warp;
  const typename Tiles::Inputs first_block(shared_address(own), lane, args.batch);
  const std::uint32_t weights = shared_address(ring) + warp * kWarpBytes + Tiles::place(lane);
  float* const sums_of_lane =
      &shared.sums[0][0][warp][place_of_sum(Tiles::Sums::first_token(lane), lane / 4)];
  constexpr int kOfTile = kMultiplying * kSums, kOfFinisher = kGates * kOfTile;
  Turn stage, loading;
  unsigned handed = 0;  // a bit for each warp that finishes: whether its units so far are odd
  Tiles held;
  const auto load_weights = [&](bool two) {
    const int first = loading.at;
    wait_barrier(shared.full[first], loading.round % 2);
    loading.advance(args.stages);
    int second = first;
    if (two) {
      second = loading.at;
      wait_barrier(shared.full[second], loading.round % 2);
      loading.advance(args.stages);
    }
    held.load(weights + first * kStageBytes, weights + second * kStageBytes, lane);
  };
  const auto release = [&] {
    if (lane == 0) arrive(shared.empty[stage.at]);
    stage.advance(args.stages);
  };
#pragma unroll 1
  for (int p = 1; p < args.phases; ++p) {
    const WholeStepPhase& phase = args.phase[p];
    const int units = phase.units, gates = gates_of<kGates>(phase);
    const int blocks = phase.inputs / kBlock;
    const int chunks = (blocks + kMultiplying - 1) / kMultiplying;
    int tiles = 0;
    for (int unit = first_unit(phase); unit < units; unit += gridDim.x) tiles += gates;
    if (tiles == 0) continue;
    load_weights(tiles > 1);
    if (phase.norm) {
      // Nobody reads the sums of squares before any more: a whole other product has been finished
      // since.
      take_inputs<kType, kSplit, true>(args, phase, set, own, shared.squares[warp]);
    } else {
      take_inputs<kType, kSplit, false>(args, phase, set, own, nullptr);
    }
    int finisher = 0, gate = 0;
#pragma unroll 1
    for (; tiles > 0; tiles -= 2) {
      typename Tiles::Sums sums;
      typename Tiles::Inputs at = first_block;
      int block = blocks - warp;  // of this warp that are left, times kMultiplying
#pragma unroll 1
      for (int left = chunks; left > 0; --left) {
        if (block > 0) held.multiply(sums, at);
        block -= kMultiplying;
        at.advance(of_block);
        __syncwarp();
        release();
        if (tiles > 1) release();
        if (left > 1) {
          load_weights(tiles > 1);
        } else if (tiles > 2) {
          load_weights(tiles > 3);
        }
      }
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        if (tile >= tiles) continue;
        if (gate == 0) wait_barrier(shared.taken[finisher], handed >> finisher & 1);
        float* to = sums_of_lane + finisher * kOfFinisher + gate * kOfTile;
        sums.store(to, tile);
        if (++gate == gates) {
          arrive_at(kSummed + finisher);
          gate = 0;
          handed ^= 1u << finisher;
          pass_on(finisher);
        }
      }
    }
  }
}

}  // namespace whole
}  // namespace cuda
}  // namespace minserve
