// Weights into shared memory, and products of two tiles at a time.
//
// Every warp multiplies its own blocks of the inputs by all tiles of its block, and takes them
// without waiting for another warp.
#pragma once

#include "../common/channels.cuh"
#include "exchange.cuh"
#include "weights.cuh"

namespace minserve {
namespace cuda {
namespace whole {

// Stages on their way: as many as hide the memory's latency. What the blocks hand each other waits
// behind a longer queue. (Stages of 8-bit weights are seldom full.)
template <WeightType kType>
constexpr int kInFlight = kType == WeightType::bf16 ? 3 : 4;

// Blocks of 8 rows of a matrix, seen as [inputs / 64, rows, 64], to a stage; zeros past its end.
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
  const int in_flight = min(kInFlight<kType>, args.stages);
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
    const int blocks = phase.inputs / kBlock;
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
      for (int block = 0; block < blocks; block += Tiles<kType>::kBlocks * kMultiplying) {
        copy(map, first, block);
        if (second >= 0) copy(map, second, block);
      }
    }
  }
}

// This warp's blocks of all tokens, [units][tokens][8]; with a norm, times its weights, and the sum
// of a lane's squares.
template <bool kNorm>
__device__ __forceinline__ float take_values(const WholeStepArgs& args, const WholeStepPhase& phase,
                                             const unsigned char* set, unsigned char* own) {
  constexpr int kAtOnce = 2, kStep = kMultiplying * kBlockUnits;  // units to this warp's next block
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, token = lane / 4;
  const bool real = token < args.batch;
  const int first_unit = warp * kBlockUnits + lane % 4;  // and the fourth after it
  const unsigned char* from = set + phase.in + first_unit * kUnitLine + token * 16;
  const uint4* weights = static_cast<const uint4*>(phase.norm) + first_unit;
  unsigned char* to = own + (lane % 4 * args.batch + token) * 16;
  const int half = 4 * args.batch * 16, of_block = kMultiplying * 2 * half;
  float sum = 0.0f;
#pragma unroll 1
  for (int left = phase.inputs / kBlock - warp; left > 0; left -= kAtOnce * kMultiplying) {
    uint4 words[2 * kAtOnce], norm[2 * kAtOnce];
    const bool both = left > kMultiplying;
    if (kNorm) {
#pragma unroll
      for (int i = 0; i < 2 * kAtOnce; ++i) {
        if (i < 2 || both) norm[i] = __ldg(weights + i / 2 * kStep + i % 2 * 4);
      }
      weights += kAtOnce * kStep;
    }
    bool all;
    do {
      all = true;
#pragma unroll
      for (int i = 0; i < 2 * kAtOnce; ++i) {
        words[i] = uint4{};
        if (real && (i < 2 || both))
          words[i] = load_words(from + (i / 2 * kStep + i % 2 * 4) * kUnitLine);
      }
#pragma unroll
      for (int i = 0; i < 2 * kAtOnce; ++i) all = all && written(words[i]);
    } while (!__all_sync(0xffffffffu, all));
#pragma unroll
    for (int i = 0; i < 2 * kAtOnce; ++i) {
      if (i >= 2 && !both) continue;
      if (kNorm) {
        const unsigned x[4] = {words[i].x, words[i].y, words[i].z, words[i].w};
        const unsigned w[4] = {norm[i].x, norm[i].y, norm[i].z, norm[i].w};
        unsigned scaled[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const float low = number_of(x, 2 * k, bf16{}), high = number_of(x, 2 * k + 1, bf16{});
          sum = fmaf(low, low, sum), sum = fmaf(high, high, sum);
          scaled[k] = rounded(low * number_of(w, 2 * k, bf16{}),
                              high * number_of(w, 2 * k + 1, bf16{}), bf16{});
        }
        words[i] = make_uint4(scaled[0], scaled[1], scaled[2], scaled[3]);
      }
      if (real) *reinterpret_cast<uint4*>(to + i / 2 * of_block + i % 2 * half) = words[i];
    }
    from += kAtOnce * kStep * kUnitLine;
    to += kAtOnce * of_block;
  }
  __syncwarp();
  return sum;
}

template <int kGates, WeightType kType>
__device__ __forceinline__ void multiply(const WholeStepArgs& args, Shared<kGates>& shared,
                                         const unsigned char* ring, unsigned char* inputs,
                                         const unsigned char* set) {
  constexpr int kBlocks = Tiles<kType>::kBlocks;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int of_block = kMultiplying * kBlockUnits * args.batch * 16;  // to this warp's next
  unsigned char* own = inputs + warp * kBlockUnits * args.batch * 16;
  const std::uint32_t values =
      shared_address(own) + Tiles<kType>::place_of_inputs(lane, args.batch);
  const std::uint32_t weights = shared_address(ring) + Tiles<kType>::place_of_weights(warp, lane);
  float* const sums_of_lane = &shared.sums[0][0][warp][place_of_sum(lane % 4 * 2, lane / 4)];
  constexpr int kOfTile = kMultiplying * kSums, kOfFinisher = kGates * kOfTile;
  Turn stage, loading;
  unsigned handed = 0;  // a bit for each warp that finishes: whether its units so far are odd
  Tiles<kType> held;
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
    const int all_blocks = phase.inputs / kBlock;
    const int chunks = (all_blocks + kBlocks * kMultiplying - 1) / (kBlocks * kMultiplying);
    int tiles = 0;
    for (int unit = first_unit(phase); unit < units; unit += gridDim.x) tiles += gates;
    if (tiles == 0) continue;
    load_weights(tiles > 1);
    if (phase.norm) {
      float squares = take_values<true>(args, phase, set, own);
      squares += __shfl_xor_sync(0xffffffffu, squares, 1);
      squares += __shfl_xor_sync(0xffffffffu, squares, 2);
      // Nobody reads the ones before any more: a whole other product has been finished since.
      if (lane % 4 == 0) shared.squares[warp][lane / 4] = squares;
    } else {
      take_values<false>(args, phase, set, own);
    }
    int finisher = 0, gate = 0;
#pragma unroll 1
    for (; tiles > 0; tiles -= 2) {
      float sums[2][4] = {};
      std::uint32_t at = values;
      int block = all_blocks - warp;  // of this warp that are left, times kMultiplying
#pragma unroll 1
      for (int left = chunks; left > 0; --left) {
#pragma unroll
        for (int i = 0; i < kBlocks; ++i) {
          if (block > 0) held.multiply(sums, i, at, args.batch);
          block -= kMultiplying;
          at += of_block;
        }
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
        to[0] = sums[0][2 * tile] + sums[1][2 * tile];
        to[kUnit] = sums[0][2 * tile + 1] + sums[1][2 * tile + 1];
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
