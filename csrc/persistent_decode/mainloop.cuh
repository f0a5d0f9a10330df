// Weights into shared memory, and products of two tiles at a time.
//
// Unless sums are batch-invariant (deterministic.cuh), every warp multiplies its own blocks of
// the inputs by all tiles of its block, and takes them without waiting for another warp. Two groups
// of warps take turns at the stages of the ring, so that a stage is full whatever the number of
// inputs, and half of the warps wait at its barriers.
#pragma once

#include "eight_column_tiles.cuh"
#include "global_exchange.cuh"
#include "activation_tiles.cuh"
#include "warp_jobs.cuh"
#include "weight_tiles.cuh"

namespace minserve {
namespace cuda {
namespace persistent {

// Stages on their way: as many as hide the memory's latency. What the blocks hand each other waits
// behind a longer queue, which costs more where that is much, or products are short.
constexpr int kMostInFlight = 3;
template <WeightType kType>
int in_flight(const PersistentDecodeArgs& args) {
  const bool few = kType != WeightType::bf16 || args.batch > kColumns || args.width <= 1024;
  return few ? 2 : kMostInFlight;
}
// A group waits for its next stage, up to so many after its last one, by the parity of its slot's
// barrier, which is that of the copy before the last one too. So the last copy there, which may be
// the other group's, has to have landed by then: it is none of those that are on their way.
constexpr int kMostAhead = kGroups + 1;
constexpr int kFewestStages = kMostInFlight + kMostAhead;

// Blocks of 8 rows of a matrix, seen as [blocks, rows, inputs of a block], to a tile's place; zeros
// past its end.
__device__ __forceinline__ void tma_load_weight_tile(void* to, const void* map, int row, int block,
                                                     std::uint64_t& barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(shared_address(to)),
      "l"(map), "r"(0), "r"(row), "r"(block), "r"(shared_address(&barrier))
      : "memory");
}

// Stages that two tiles of so many inputs take; groups take turns at them, from the first one on.
template <WeightType kType>
__device__ __forceinline__ int stages_of(int inputs) {
  return (inputs / inputs_of_block(kType) + kOfGroup - 1) / kOfGroup;
}

// One thread copies every tile that its block will need, as room comes free: two tiles at a time,
// because they are multiplied together. In batch-invariant mode it tells how many stages it has
// asked for.
template <class Cell, WeightType kType, bool kBatchInvariant, class Shared>
__device__ __forceinline__ void load_weights(const PersistentDecodeArgs& args, Shared& shared,
                                             unsigned char* ring) {
  PipelineState stage, landed;
  int on_their_way = 0;
  unsigned asked = 0;
  acquire_tensor_map(args.phase[1].weight);
#pragma unroll 1
  for (int p = 1; p < args.phases; ++p) {
    const DecodePhase& phase = args.phase[p];
    const int gates = gates_of<Cell>(phase);
    const Units own = units_of(phase);
    const int blocks = stages_of<kType>(phase.inputs) * kOfGroup;
    const void* map = phase.weight;
    if (p + 1 < args.phases) {  // a phase ahead: acquired, a map has to be read anew
      const void* next = args.phase[p + 1].weight;
      acquire_tensor_map(next);
      prefetch_tensor_map(*static_cast<const CUtensorMap*>(next));
    }
    int unit = own.first, gate = 0;
    const auto next_row = [&] {  // of the next tile; -1: there is none
      const int row = unit < own.end ? (gate * phase.units + unit) * kUnit : -1;
      if (++gate == gates) gate = 0, ++unit;
      return row;
    };
#pragma unroll 1
    for (int first = next_row(); first >= 0; first = next_row()) {
      const int second = next_row();
#pragma unroll 1
      for (int block = 0; block < blocks; block += kOfGroup) {
        if (stage.round > 0) mbarrier_wait(shared.empty[stage.at], (stage.round - 1) % 2);
        if (on_their_way == args.in_flight) {
          mbarrier_wait(shared.full[landed.at], landed.round % 2);
          landed.advance(1, args.stages);
          --on_their_way;
        }
        std::uint64_t& full = shared.full[stage.at];
        unsigned char* to = ring + stage.at * kStageBytes;
        mbarrier_arrive_expect_tx(full, second >= 0 ? kStageBytes : kTileBytes);
        tma_load_weight_tile(to, map, first, block, full);
        if (second >= 0) tma_load_weight_tile(to + kTileBytes, map, second, block, full);
        stage.advance(1, args.stages);
        ++on_their_way;
        delay(64, 3000);
        if (kBatchInvariant) set_count(shared.stages_asked, ++asked);
      }
    }
  }
}

template <class Cell, WeightType kType, bool kSplit, bool kPieces, int kColumnTiles>
__device__ __forceinline__ void multiply(const PersistentDecodeArgs& args,
                                         Shared<Cell, kSplit, false, kColumnTiles>& shared,
                                         const unsigned char* ring, unsigned char* inputs,
                                         const unsigned char* set) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = warp / kOfGroup;
  using Tiles = Tiles<kType, kSplit>;
  using OfBlock = Shared<Cell, kSplit, false, kColumnTiles>;
  const int rows = kColumnTiles > 1 ? kColumns : args.batch;
  const int of_warp = bytes_of_block(kType, kSplit, rows), of_block = kMmaWarps * of_warp;
  unsigned char* own = inputs + warp * of_warp;
  typename Tiles::Inputs first_block(shared_address(own), lane, rows);
  std::uint32_t weights =
      shared_address(ring) + warp % kOfGroup * kWarpBytes + Tiles::offset_of(lane);
  made_once(first_block.at), made_once(first_block.step), made_once(weights);
  float* const sums_of_lane =
      &shared.sums[0][0][warp][place_of_sum(Tiles::Sums::first_token(lane), lane / 4)];
  constexpr int kOfTile = kMmaWarps * OfBlock::kSums;
  constexpr int kOfEpilogueWarp = OfBlock::kGates * kOfTile;
  PipelineState stage;  // this group's next one
  unsigned handed = 0;  // a bit for each epilogue warp: whether its units so far are odd
  // Whether this group had stages of the last product. Else it may be far ahead of the other one,
  // and waits for what that one has summed before it asks for its next stage (kMostAhead).
  bool had_some = true;
  unsigned arrivals = 0;  // how many times inputs have come to this warp by TMA
  Tiles held;
  stage.at = group;
  // Of a single tile, what lies beside it is multiplied too, and nobody looks at the sums.
  const auto load_weights = [&] {
    mbarrier_wait(shared.full[stage.at], stage.round % 2);
    const std::uint32_t from = weights + stage.at * kStageBytes;
    held.load(from, from + kTileBytes, lane);
  };
  // Until this block's own part of a phase is there. Who asks for the others' parts before keeps
  // the L2 cache busy with words that cannot have been written yet.
  unsigned stored = 0;
  const auto wait_for_own = [&](const DecodePhase& before) {
    if (units_of(before).first < before.units) mbarrier_wait(shared.stored, stored++ % 2);
  };
#pragma unroll 1
  for (int p = 1; p < args.phases; ++p) {
    const DecodePhase& phase = args.phase[p];
    const int gates = gates_of<Cell>(phase);
    const int blocks = phase.inputs / inputs_of_block(kType);
    const int stages = stages_of<kType>(phase.inputs);
    const Units units = units_of(phase);
    int tiles = max(units.end - units.first, 0) * gates;
    const bool any = group < stages;
    if (tiles > 0 && any && had_some) load_weights();
    wait_for_own(args.phase[p - 1]);
    if (tiles == 0) continue;
    if (any && !had_some) load_weights();
    had_some = any;
    int epilogue_warp = 0, gate = 0;
    const auto wait_for_room = [&](int next) {
      mbarrier_wait(shared.taken[next], handed >> next & 1);
    };
    const auto hand = [&](int ready) {
      named_barrier_arrive<kColumnTiles>(kSummed + ready);
      handed ^= 1u << ready;
    };
    typename Tiles::Sums sums[kColumnTiles];
    int taken = 0;                                          // blocks of the inputs
    int left = stages - group;                              // of two tiles, this group's stages
    const int missing = left * kOfGroup - (blocks - warp);  // of the last one, up to this warp's
#pragma unroll 1
    do {
      if constexpr (kColumnTiles > 1) {
        static_assert(kColumnTiles == 2 && kPieces && kType == WeightType::bf16);
        if (norms_outputs<Cell>(phase)) {
          if constexpr (kOutputGate<Cell>) {
            take_column_tiles<NormOf::outputs, OfBlock::kGates>(args, phase, taken, set, own,
                                                                shared.squares[1][0][warp],
                                                                shared.arrived[warp], arrivals);
          }
        } else if (phase.norm) {
          take_column_tiles<NormOf::inputs, OfBlock::kGates>(
              args, phase, 0, set, own, shared.squares[0][0][warp], shared.arrived[warp], arrivals);
        } else {
          take_column_tiles<NormOf::nothing, OfBlock::kGates>(args, phase, taken, set, own, nullptr,
                                                              shared.arrived[warp], arrivals);
        }
      } else if (norms_outputs<Cell>(phase)) {
        if constexpr (kOutputGate<Cell>) {
          take_inputs<kType, kSplit, NormOf::outputs, kPieces>(args, phase, taken, set, own,
                                                               shared.squares[1][0][warp]);
        }
      } else if (phase.norm) {
        // Nobody reads the sums of squares before any more: a whole other product has been finished
        // since.
        take_inputs<kType, kSplit, NormOf::inputs, false>(args, phase, 0, set, own,
                                                          shared.squares[0][0][warp]);
      } else {
        take_inputs<kType, kSplit, NormOf::nothing, kPieces>(args, phase, taken, set, own, nullptr);
      }
      if (kPieces) taken += phase.at_once;
      // Of these: to be multiplied by inputs that are not here yet.
      const int later = kPieces ? max(stages - group - taken / kOfGroup, 0) : 0;
#pragma unroll 1
      while (tiles > 0) {
        typename Tiles::Inputs at = first_block;
#pragma unroll 1
        for (; left > later; left -= kGroups) {
          if (left * kOfGroup > missing) {
#pragma unroll
            for (int column_tile = 0; column_tile < kColumnTiles; ++column_tile) {
              typename Tiles::Inputs of_column_tile = at;
              of_column_tile.advance(column_tile * args.input_bytes);
              held.multiply(sums[column_tile], of_column_tile);
            }
          }
          at.advance(of_block);
          delay(64, 3000);
          __syncwarp();
          if (lane == 0) mbarrier_arrive(shared.empty[stage.at]);
          // The next one of these tiles, or the first one of the next.
          stage.advance(left > kGroups ? kGroups : left + group, args.stages);
          if (left > kGroups || tiles > 2) load_weights();
        }
        if (kPieces && taken < blocks) break;  // there are no other tiles (kMostDividedTiles)
        if (!any) stage.advance(stages, args.stages);
        // Both tiles may be of one unit, or end one each.
        const bool two = tiles > 1, ends = gate + 1 == gates;
        const int second_gate = ends ? 0 : gate + 1;
        const int second = !ends                                 ? epilogue_warp
                           : epilogue_warp + 1 == kEpilogueWarps ? 0
                                                                 : epilogue_warp + 1;
        if (gate == 0) wait_for_room(epilogue_warp);
        if (ends && two) wait_for_room(second);
#pragma unroll
        for (int column_tile = 0; column_tile < kColumnTiles; ++column_tile) {
          float* const of_column_tile = sums_of_lane + column_tile * OfBlock::kSumsOfColumnTile;
          sums[column_tile].store(of_column_tile + epilogue_warp * kOfEpilogueWarp + gate * kOfTile,
                                  of_column_tile + second * kOfEpilogueWarp + second_gate * kOfTile,
                                  two);
          sums[column_tile] = {};
        }
        if (ends) hand(epilogue_warp);
        epilogue_warp = second, gate = second_gate;
        if (two && ++gate == gates) {
          hand(epilogue_warp);
          gate = 0;
          if (++epilogue_warp == kEpilogueWarps) epilogue_warp = 0;
        }
        tiles -= 2;
        left = stages - group;
      }
    } while (kPieces && tiles > 0);
  }
}

}  // namespace persistent
}  // namespace cuda
}  // namespace minserve
