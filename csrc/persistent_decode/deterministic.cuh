// Products whose sums are those of gemm/ in batch-invariant mode, bit for bit: a part of the inputs
// is summed from zero, sixteen inputs after another, and parts are added up in their order
// (gemm/heuristics_deterministic.h says how many there are). mma.sync and wgmma round sixteen
// products and a sum alike, as tests/ops/test_whole_step_order.py sees.
//
// So a warp has a part of two tiles, a job, instead of some inputs of all tiles. Its products wait
// for each other, 25 cycles a step; what makes up for that is that jobs run side by side, and that
// nobody waits for a job that is not his. What can be known of a job is known before its inputs are
// there.
#pragma once

#include "activation_tiles.cuh"
#include "warp_jobs.cuh"
#include "mainloop.cuh"
#include "weight_tiles.cuh"

namespace minserve {
namespace cuda {
namespace persistent {

// What a warp multiplies at once: a block of inputs of two tiles.
struct Fragments {
  uint4 w[4], x, y;
  // `half`: from inputs 0 to 31 to the others.
  __device__ __forceinline__ void load(std::uint32_t weights, std::uint32_t inputs,
                                       std::uint32_t half) {
#pragma unroll
    for (int i = 0; i < 4; ++i) w[i] = ldmatrix_x4(weights ^ (i << 5));
    x = ldmatrix_x4(inputs), y = ldmatrix_x4(inputs + half);
  }
  __device__ __forceinline__ void multiply(float (&sums)[4]) const {
    mma_bf16(sums, w[0], x.x, x.y);
    mma_bf16(sums, w[1], x.z, x.w);
    mma_bf16(sums, w[2], y.x, y.y);
    mma_bf16(sums, w[3], y.z, y.w);
  }
};
// Sums of a job's part of the inputs.
template <class Shared>
class PartSums {
 public:
  // weights: where a lane's lie in the ring's first slot; of_block: bytes of a block's inputs;
  // zero: 0, which the compiler does not know.
  __device__ __forceinline__ PartSums(Stages<Shared>& stages, std::uint32_t weights,
                                      std::uint32_t of_block, unsigned zero)
      : stages_(stages), weights_(weights), of_block_(of_block), zero_(zero) {}

  // Over blocks `begin` to before `end`; those from `first` on lie at `inputs`. `stage` and `slot`
  // are the first one's, and then the last one's. Returns how many blocks of that are not given
  // back.
  __device__ __forceinline__ int add(float (&sums)[4], int begin, int end, int first,
                                     const typename Tiles<WeightType::bf16, false>::Inputs& inputs,
                                     int& stage, unsigned& slot) const {
    std::uint32_t from = weights_ + slot * kStageBytes + begin % kOfGroup * kWarpBytes;
    std::uint32_t at = inputs.at + (begin - first) * of_block_;
    Fragments next;
    next.load(from, at, inputs.step);
    int left = end - begin, run = min(left, kOfGroup - begin % kOfGroup);  // of this stage
#pragma unroll 1
    for (;;) {
#pragma unroll 2
      for (int i = 1; i < run; ++i) {
        const Fragments now = next;
        from += kWarpBytes, at += of_block_;
        next.load(from, at, inputs.step);
        now.multiply(sums);
      }
      left -= run;
      if (left == 0) break;
      const Fragments now = next;
      const unsigned leaving = slot;
      slot = stages_.wait(++stage);
      from = weights_ + slot * kStageBytes, at += of_block_;
      next.load(from, at, inputs.step);
      now.multiply(sums);
      stages_.give_back(leaving, run + zero_when_done(sums));
      run = min(left, kOfGroup);
    }
    next.multiply(sums);
    return run;
  }
  // 0, once the products are done: what they were made of has been loaded then.
  __device__ __forceinline__ unsigned zero_when_done(const float (&sums)[4]) const {
    return __float_as_uint(sums[0]) & zero_;
  }

 private:
  Stages<Shared>& stages_;
  const std::uint32_t weights_, of_block_;
  const unsigned zero_;
};

template <class Cell, bool kPieces>
__device__ __forceinline__ void multiply_batch_invariant(const PersistentDecodeArgs& args,
                                                         Shared<Cell, false, true>& shared,
                                                         const unsigned char* ring,
                                                         unsigned char* inputs,
                                                         const unsigned char* set) {
  constexpr WeightType kType = WeightType::bf16;
  constexpr int kGates = Cell::kPreactivations;
  using Tiles = Tiles<kType, false>;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const std::uint32_t of_block = bytes_of_block(kType, false, args.batch);
  const typename Tiles::Inputs all_inputs(shared_address(inputs), lane, args.batch);
  // Lanes 8 to 15 and 24 to 31 have rows of the second tile.
  const std::uint32_t weights =
      shared_address(ring) + Tiles::offset_of(lane) + lane / 8 % 2 * kTileBytes;
  Stages<Shared<Cell, false, true>> stages(shared, args.stages);
  Rooms<Cell> rooms(shared, place_of_sum(AllTokenSums::first_token(lane), lane / 4));
  int first_stage = 0;  // of this phase
  unsigned stored = 0;
  const PartSums part_sums(stages, weights, of_block,
                           static_cast<unsigned>(args.batch) / (kColumns + 1));
#pragma unroll 1
  for (int p = 1; p < args.phases; ++p) {
    const DecodePhase& phase = args.phase[p];
    const DecodePhase& before = args.phase[p - 1];
    const int gates = gates_of<Cell>(phase), parts = phase.parts, log = 31 - __clz(parts);
    const int blocks = phase.inputs / inputs_of_block(kType);
    const int stages_each = stages_of<kType>(phase.inputs);
    const Units units = units_of(phase);
    const int tiles = max(units.end - units.first, 0) * gates, pairs = (tiles + 1) / 2;
    // Jobs are dealt from the last warp on, for the first ones have inputs to take.
    const int job = kMmaWarps - 1 - warp, part = job & (parts - 1);
    const int begin = part * blocks >> log, end = (part + 1) * blocks >> log;
    const int threads = threads_of_unit(gates, parts);
    // Of its last stage a warp also gives back what lies behind the last block.
    const int behind = end == blocks ? stages_each * kOfGroup - blocks : 0;
    if (units_of(before).first < before.units) mbarrier_wait(shared.stored, stored++ % 2);
    if (tiles == 0) continue;

    int pair = job >> log, stage;
    unsigned slot;
    bool two, ends;  // whether there is a second tile, whether the first is its unit's last
    Room first, second;
    const auto plan = [&] {
      stage = first_stage + pair * stages_each + begin / kOfGroup;
      const int tile = 2 * pair;
      int unit = gates == 1 ? tile : tile / kGates, gate = gates == 1 ? 0 : tile % kGates;
      if (kOutputGate<Cell> && gates == 2) unit = pair, gate = 0;
      two = tile + 1 < tiles, ends = gate + 1 == gates;
      first = rooms.of(unit, gate, part);
      second = ends ? rooms.of(unit + 1, 0, part) : rooms.of(unit, gate + 1, part);
    };
    if (pair < pairs) plan();
    // Later stages have to wait until slots of this very product are free.
    const bool early = pair < pairs && (pair + 1) * stages_each <= args.stages;
    if (early) slot = stages.wait(stage);
    rooms.wait_until_taken();  // nobody reads inputs any more that were here before
    unsigned char* own = inputs + warp * of_block;
#pragma unroll 1
    for (int taken = 0; taken < blocks;) {
      if (norms_outputs<Cell>(phase)) {
        if constexpr (kOutputGate<Cell>) {
          take_whole<kType, NormOf::outputs, true, false>(args, phase, 0, set, own,
                                                          &shared.squares[0][0][0][0]);
        }
      } else if (phase.norm) {
        take_whole<kType, NormOf::inputs, true, false>(args, phase, 0, set, own,
                                                       &shared.squares[0][0][0][0]);
      } else {
        take_whole<kType, NormOf::nothing, true, kPieces>(args, phase, taken, set, own, nullptr);
      }
      const int before = taken;
      taken += kPieces ? phase.at_once : blocks;
      barrier_sync<kMmaWarps * 32>(kTaken);
      delay(16, 8000);
      if (threadIdx.x == 0) set_count(shared.products_begun, p);
      if (!early && pair < pairs && (!kPieces || end <= taken)) slot = stages.wait(stage);

#pragma unroll 1
      while (pair < pairs && (!kPieces || end <= taken)) {
        delay(4, 6000);
        float sums[4] = {};
        const int run = part_sums.add(sums, begin, end, before, all_inputs, stage, slot);
        stages.give_back(slot, run + behind + part_sums.zero_when_done(sums));
        // Both tiles may be of one unit, or of two.
        first.wait();
        store_shared_float(first.sums, sums[0]),
            store_shared_float(first.sums + kUnit * 4, sums[1]);
        if (ends) named_barrier_arrive(first.barrier, threads);
        if (two) {
          if (ends) second.wait();
          store_shared_float(second.sums, sums[2]),
              store_shared_float(second.sums + kUnit * 4, sums[3]);
          named_barrier_arrive(second.barrier, threads);
        }
        pair += kMmaWarps >> log;
        if (pair < pairs) {
          plan();
          slot = stages.wait(stage);
        }
      }
      if (!kPieces) break;
      if (taken < blocks) barrier_sync<kMmaWarps * 32>(kTaken);  // nobody reads them any more
    }
    first_stage += pairs * stages_each;
    rooms.count(units.end - units.first);
  }
}

}  // namespace persistent
}  // namespace cuda
}  // namespace minserve
