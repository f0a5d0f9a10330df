// Jobs of warps that each multiply a part of a product, in any order: the ring's stages by number,
// and rooms for the sums.
#pragma once

#include "../core/race_delays.cuh"
#include "smem_layout.cuh"

namespace minserve {
namespace cuda {
namespace persistent {

__device__ __forceinline__ void mbarrier_arrive_times(std::uint64_t& barrier, unsigned times) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0], %1;" ::"r"(shared_address(&barrier)), "r"(times)
               : "memory");
}
__device__ __forceinline__ void named_barrier_arrive(int barrier, int threads) {
  asm volatile("barrier.cta.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
// Of `threads`, whole warps, whose lanes may have diverged.
__device__ __forceinline__ void named_barrier_sync_unaligned(int barrier, int threads) {
  asm volatile("barrier.cta.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
// Counters in shared memory, each written by one thread. A release would be a fence, which waits
// for the copies of weights. What stands for it is that a multiprocessor carries out the accesses
// of a warp to its shared memory in their order: what a warp, or those that it has met at a
// barrier, did before it set a counter is seen by whoever reads the counter first. The compiler is
// kept to that order by `volatile`, "memory" and __syncwarp().
__device__ __forceinline__ unsigned count_at(std::uint32_t address) {
  unsigned count;
  asm volatile("ld.relaxed.cta.shared.u32 %0, [%1];" : "=r"(count) : "r"(address) : "memory");
  return count;
}
__device__ __forceinline__ void set_count(unsigned& counter, unsigned count) {
  asm volatile("st.relaxed.cta.shared.u32 [%0], %1;" ::"r"(shared_address(&counter)), "r"(count)
               : "memory");
}

// The ring's stages by how many have been before them since the step began.
template <class Shared>
class Stages {
 public:
  __device__ __forceinline__ Stages(Shared& shared, unsigned slots)
      : shared_(shared),
        asked_(shared_address(&shared.stages_asked)),
        slots_(slots),
        inverse_(0xffffffffu / slots + 1) {}

  // Until stage n, of which the caller has a part, has landed; returns its slot. A barrier tells
  // the newest copy from the one before alone. Once this one has been asked for, the one before has
  // landed; and none comes after it before the caller has given its part back.
  __device__ __forceinline__ unsigned wait(unsigned n) {
    while (static_cast<int>(count_at(asked_) - n) <= 0) {
    }
    const unsigned at = slot(n);
    mbarrier_wait(shared_.full[at], round(n) % 2);
    return at;
  }
  // By a whole warp: so many of the blocks in a slot, of which it waits for no more.
  __device__ __forceinline__ void give_back(unsigned slot, unsigned blocks) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive_times(shared_.empty[slot], blocks);
  }

 private:
  __device__ __forceinline__ unsigned round(unsigned n) const { return __umulhi(n, inverse_); }
  __device__ __forceinline__ unsigned slot(unsigned n) const { return n - round(n) * slots_; }

  Shared& shared_;
  std::uint32_t asked_;       // the counter's address
  unsigned slots_, inverse_;  // 2^32 / slots, rounded up: exact for n below 2^32 / slots
};

// Threads that meet at the barrier of a unit's room. The tiles of three gates lie in two pairs.
__device__ __forceinline__ int threads_of_unit(int gates, int parts) {
  return ((gates == 3 ? 2 : 1) * parts + 1) * 32;
}

// Where the sums of one part of a unit's tile go, as a lane has them, and when.
struct Room {
  std::uint32_t sums, taken;  // addresses: of the sums, of how many units have been taken
  int barrier;
  unsigned turn;  // of the unit's epilogue warp

  __device__ __forceinline__ void wait() const {
    while (static_cast<int>(count_at(taken) - turn) < 1 - kRoomsEach) {
    }
  }
};

// Each epilogue warp has some, which its units take in turn.
template <class Cell>
class Rooms {
 public:
  using OfBlock = Shared<Cell, false, true>;
  // `offset`: where a lane's sums lie among those of a part.
  __device__ __forceinline__ Rooms(OfBlock& shared, int offset)
      : sums_(shared_address(&shared.sums[0][0][0][offset])),
        taken_(shared_address(shared.units_taken)) {}

  __device__ __forceinline__ Room of(int unit, int gate, int part) const {
    const unsigned epilogue_warp = unit % kEpilogueWarps;
    const unsigned had = epilogue_warp == 0 ? had_[0] : epilogue_warp == 1 ? had_[1] : had_[2];
    const unsigned turn = had + unit / kEpilogueWarps;
    const unsigned room = epilogue_warp + turn % kRoomsEach * kEpilogueWarps;
    const unsigned at = ((room * OfBlock::kGates + gate) * OfBlock::kParts + part) * OfBlock::kSums;
    return {sums_ + at * 4, taken_ + epilogue_warp * 4, static_cast<int>(kSummed + room), turn};
  }
  // Until all sums of the products before this one have been taken: their jobs are done.
  __device__ __forceinline__ void wait_until_taken() const {
#pragma unroll
    for (int epilogue_warp = 0; epilogue_warp < kEpilogueWarps; ++epilogue_warp) {
      while (static_cast<int>(count_at(taken_ + epilogue_warp * 4) - had_[epilogue_warp]) < 0) {
      }
    }
  }
  // A product is done, in which this block had so many.
  __device__ __forceinline__ void count(int units) {
#pragma unroll
    for (int epilogue_warp = 0; epilogue_warp < kEpilogueWarps; ++epilogue_warp) {
      had_[epilogue_warp] += (units + kEpilogueWarps - 1 - epilogue_warp) / kEpilogueWarps;
    }
  }

 private:
  static_assert(kEpilogueWarps == 3, "each has a count");
  std::uint32_t sums_, taken_;
  unsigned had_[kEpilogueWarps] = {};  // units of each epilogue warp, before this product
};

}  // namespace persistent
}  // namespace cuda
}  // namespace minserve
