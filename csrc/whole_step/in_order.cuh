// Products whose sums are those of linear/ in a fixed order, bit for bit: a part of the inputs is
// summed from zero, sixteen inputs after another, and parts are added up in their order
// (linear/fixed_choice.h says how many there are). mma.sync and wgmma round sixteen products and a
// sum alike, as tests/models/test_hopper.py sees.
//
// So a warp has a part of two tiles, a job, instead of some inputs of all tiles. Its products wait
// for each other, 25 cycles a step; what makes up for that is that jobs run side by side, and that
// nobody waits for a job that is not his. A job finds its stages by their numbers.
#pragma once

#include "inputs.cuh"
#include "multiply.cuh"
#include "weights.cuh"

namespace minserve {
namespace cuda {
namespace whole {

// Where stages are, by how many were before them since the step began.
class Places {
 public:
  __device__ __forceinline__ explicit Places(unsigned places)
      : places_(places), inverse_(0xffffffffu / places + 1) {}
  __device__ __forceinline__ unsigned round(unsigned n) const { return __umulhi(n, inverse_); }
  __device__ __forceinline__ unsigned at(unsigned n) const { return n - round(n) * places_; }

 private:
  unsigned places_, inverse_;  // 2^32 / places, rounded up: exact for n below 2^32 / places
};

__device__ __forceinline__ void arrive_times(std::uint64_t& barrier, unsigned count) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0], %1;" ::"r"(shared_address(&barrier)), "r"(count)
               : "memory");
}
__device__ __forceinline__ void arrive_at(int barrier, int threads) {
  asm volatile("barrier.cta.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ unsigned load_acquire(const unsigned& x) {
  unsigned value;
  asm volatile("ld.acquire.cta.shared.u32 %0, [%1];"
               : "=r"(value)
               : "r"(shared_address(&x))
               : "memory");
  return value;
}
__device__ __forceinline__ void store_release(unsigned& x, unsigned value) {
  asm volatile("st.release.cta.shared.u32 [%0], %1;" ::"r"(shared_address(&x)), "r"(value)
               : "memory");
}

// Threads that meet at the barrier of a unit's room. The tiles of three gates lie in two pairs.
__device__ __forceinline__ int threads_of_unit(int gates, int parts) {
  return ((gates == 3 ? 2 : 1) * parts + 1) * 32;
}

// The ring for jobs: waits for stages by their numbers, and gives them back.
template <class Shared>
class Stages {
 public:
  __device__ __forceinline__ Stages(Shared& shared, int places)
      : shared_(shared), places_(places), reach_(places - kInFlight<WeightType::bf16>) {}

  // All stages before `n` have landed.
  __device__ __forceinline__ void begin(int n) { landed_ = n - 1; }
  // Until stage n has; returns where it is. Of a barrier only the newest copy can be asked for, and
  // the one before. One that has landed tells that all have but for the last ones ahead of it, so
  // that those of less than a round later can be waited for.
  __device__ __forceinline__ unsigned wait(int n) {
    while (n > landed_ + reach_) wait_for(landed_ += reach_);
    wait_for(n);
    landed_ = max(landed_, n);
    return places_.at(n);
  }
  // By all threads of a warp: so many of the blocks that are in this place.
  __device__ __forceinline__ void give_back(unsigned place, unsigned blocks) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive_times(shared_.empty[place], blocks);
  }

 private:
  __device__ __forceinline__ void wait_for(int n) {
    wait_barrier(shared_.full[places_.at(n)], places_.round(n) % 2);
  }

  Shared& shared_;
  Places places_;
  int reach_, landed_ = -1;
};

// What a warp multiplies at once: a block of inputs of two tiles.
struct Fragments {
  uint4 w[4], x, y;
  __device__ __forceinline__ void load(std::uint32_t weights, std::uint32_t inputs,
                                       std::uint32_t half) {
#pragma unroll
    for (int i = 0; i < 4; ++i) w[i] = load_matrices(weights ^ (i << 5));
    x = load_matrices(inputs), y = load_matrices(inputs + half);
  }
  __device__ __forceinline__ void multiply(float (&sums)[4]) const {
    multiply_step(sums, w[0], x.x, x.y);
    multiply_step(sums, w[1], x.z, x.w);
    multiply_step(sums, w[2], y.x, y.y);
    multiply_step(sums, w[3], y.z, y.w);
  }
};

template <int kGates>
__device__ __forceinline__ void multiply_in_order(const WholeStepArgs& args,
                                                  Shared<kGates, false, true>& shared,
                                                  const unsigned char* ring, unsigned char* inputs,
                                                  const unsigned char* set) {
  constexpr WeightType kType = WeightType::bf16;
  using Tiles = Tiles<kType, false>;
  using Shared = Shared<kGates, false, true>;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const std::uint32_t of_block = bytes_of_block(kType, false, args.batch);
  const typename Tiles::Inputs first_block(shared_address(inputs), lane, args.batch);
  // Lanes 8 to 15 and 24 to 31 have rows of the second tile.
  const std::uint32_t weights =
      shared_address(ring) + Tiles::place(lane) + lane / 8 % 2 * kTileBytes;
  float* const sums_of_lane =
      &shared.sums[0][0][0][place_of_sum(WholeSums::first_token(lane), lane / 4)];
  Stages<Shared> stages(shared, args.stages);
  int first_stage = 0;            // of this phase
  unsigned had[kFinishing] = {};  // units that each warp that finishes had before this phase
  unsigned stored = 0;

#pragma unroll 1
  for (int p = 1; p < args.phases; ++p) {
    const WholeStepPhase& phase = args.phase[p];
    const WholeStepPhase& before = args.phase[p - 1];
    const int gates = gates_of<kGates>(phase), parts = phase.parts, log = 31 - __clz(parts);
    const int blocks = phase.inputs / inputs_of_block(kType);
    const int of_pair = stages_of<kType>(phase.inputs);
    const Units units = units_of(phase);
    const int tiles = max(units.end - units.first, 0) * gates, pairs = (tiles + 1) / 2;
    const int part = warp & (parts - 1), begin = part * blocks >> log;
    const int end = (part + 1) * blocks >> log;
    const int threads = threads_of_unit(gates, parts);
    // Of the last stage that this warp has a part of, also what lies behind the blocks.
    const int beyond = end == blocks ? of_pair * kOfGroup - blocks : 0;
    const std::uint32_t first_inputs = first_block.at + begin * of_block;
    // Once all sums of the product before have been stored, its stages have landed and nobody reads
    // its inputs any more.
    if (units_of(before).first < before.units) wait_barrier(shared.stored, stored++ % 2);
    if (tiles == 0) continue;
    stages.begin(first_stage);

    // All that can be known of a job before its inputs are there.
    int pair = warp >> log;
    int stage;
    unsigned place;
    std::uint32_t from, at;
    struct Home {
      float* sums;
      int room;
      unsigned finisher, turn;
    } home, other;
    bool two, ends;
    Fragments next;
    const auto home_of = [&](int unit, int gate) {
      const unsigned finisher = unit % kFinishing;
      const unsigned turn = (finisher == 0   ? had[0]
                             : finisher == 1 ? had[1]
                                             : had[2]) +
                            unit / kFinishing;
      const int room = finisher + turn % 2 * kFinishing;
      return Home{sums_of_lane + ((room * kGates + gate) * Shared::kParts + part) * Shared::kSums,
                  kSummed + room, finisher, turn};
    };
    const auto plan = [&] {
      stage = first_stage + pair * of_pair + begin / kOfGroup;
      const int tile = 2 * pair, unit = gates == 1 ? tile : tile / kGates;
      const int gate = gates == 1 ? 0 : tile % kGates;
      two = tile + 1 < tiles, ends = gate + 1 == gates;
      home = home_of(unit, gate);
      other = home_of(ends ? unit + 1 : unit, ends ? 0 : gate + 1);
    };
    if (pair < pairs) plan();
    // Later stages have to wait until places of this very product are free.
    const bool early = pair < pairs && (pair + 1) * of_pair <= args.stages;
    if (early) place = stages.wait(stage);
    unsigned char* own = inputs + warp * of_block;
    if (phase.norm) {
      take_whole<kType, true, true>(args, phase, set, own, &shared.squares[0][0]);
      barrier_sync<kAllMeeting>(kNormed);
    } else {
      take_whole<kType, false, true>(args, phase, set, own, nullptr);
      barrier_sync<kMultiplying * 32>(kTaken);
    }
    if (!early && pair < pairs) place = stages.wait(stage);

#pragma unroll 1
    while (pair < pairs) {
      from = weights + place * kStageBytes + begin % kOfGroup * kWarpBytes, at = first_inputs;
      next.load(from, at, first_block.step);
      float sums[4] = {};
      int left = end - begin, run = min(left, kOfGroup - begin % kOfGroup);
#pragma unroll 1
      for (;;) {
#pragma unroll 2
        for (int i = 1; i < run; ++i) {
          const Fragments now = next;
          from += kWarpBytes, at += of_block;
          next.load(from, at, first_block.step);
          now.multiply(sums);
        }
        left -= run;
        if (left == 0) break;
        const Fragments now = next;
        const unsigned leaving = place;
        place = stages.wait(++stage);
        from = weights + place * kStageBytes, at += of_block;
        next.load(from, at, first_block.step);
        now.multiply(sums);
        asm volatile("" ::"f"(sums[0]));  // multiplied, so loaded
        stages.give_back(leaving, run);
        run = min(left, kOfGroup);
      }
      next.multiply(sums);
      asm volatile("" ::"f"(sums[0]));
      // Both tiles may be of one unit, or of two.
      const auto wait_for_room = [&](const Home& of) {
        while (static_cast<int>(load_acquire(shared.units_taken[of.finisher]) - of.turn) < -1) {
        }
      };
      wait_for_room(home);
      home.sums[0] = sums[0], home.sums[kUnit] = sums[1];
      if (ends) arrive_at(home.room, threads);
      if (two) {
        if (ends) wait_for_room(other);
        other.sums[0] = sums[2], other.sums[kUnit] = sums[3];
        arrive_at(other.room, threads);
      }
      stages.give_back(place, run + beyond);
      pair += kMultiplying >> log;
      if (pair < pairs) {
        plan();
        place = stages.wait(stage);
      }
    }
    first_stage += pairs * of_pair;
#pragma unroll
    for (int f = 0; f < kFinishing; ++f) {
      had[f] += (units.end - units.first + kFinishing - 1 - f) / kFinishing;
    }
  }
}

}  // namespace whole
}  // namespace cuda
}  // namespace minserve
