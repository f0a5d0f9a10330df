// What warps need that multiply a part of a product each, in whatever order they come to it: the
// ring's stages by their numbers, and rooms for what they have summed.
#pragma once

#include "shared.cuh"

namespace minserve {
namespace cuda {
namespace whole {

__device__ __forceinline__ void arrive_times(std::uint64_t& barrier, unsigned times) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0], %1;" ::"r"(shared_address(&barrier)), "r"(times)
               : "memory");
}
__device__ __forceinline__ void arrive_at(int barrier, int threads) {
  asm volatile("barrier.cta.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
// Counters in shared memory. A warp's accesses to it happen in their order, and __syncwarp() keeps
// the compiler to that; a release would be a fence, which waits for the copies of weights.
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
  // Copies are asked for in order, and no more than `in_flight` are on their way.
  __device__ __forceinline__ Stages(Shared& shared, unsigned places, int in_flight)
      : shared_(shared),
        places_(places),
        inverse_(0xffffffffu / places + 1),
        reach_(places - in_flight) {}

  // All stages before `n` have landed.
  __device__ __forceinline__ void begin(int n) { landed_ = n - 1; }
  // Until stage n has; returns its place. A barrier can be asked for the newest copy and the one
  // before alone. One that has landed tells that all have but for the last ones ahead of it, so
  // that those of less than a round later can be waited for.
  __device__ __forceinline__ unsigned wait(int n) {
    while (n > landed_ + reach_) wait_for(landed_ += reach_);
    wait_for(n);
    landed_ = max(landed_, n);
    return place(n);
  }
  // By a whole warp: so many of the blocks in a place, of which it waits for no more.
  __device__ __forceinline__ void give_back(unsigned place, unsigned blocks) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive_times(shared_.empty[place], blocks);
  }

 private:
  __device__ __forceinline__ unsigned round(unsigned n) const { return __umulhi(n, inverse_); }
  __device__ __forceinline__ unsigned place(unsigned n) const { return n - round(n) * places_; }
  __device__ __forceinline__ void wait_for(unsigned n) {
    wait_barrier(shared_.full[place(n)], round(n) % 2);
  }

  Shared& shared_;
  unsigned places_, inverse_;  // 2^32 / places, rounded up: exact for n below 2^32 / places
  int reach_, landed_ = -1;
};

// Threads that meet at the barrier of a unit's room. The tiles of three gates lie in two pairs.
__device__ __forceinline__ int threads_of_unit(int gates, int parts) {
  return ((gates == 3 ? 2 : 1) * parts + 1) * 32;
}

// Where the sums of one part of a unit's tile go, as a lane has them, and when.
struct Room {
  std::uint32_t sums, taken;  // addresses: of the sums, of how many units have been taken
  int barrier;
  unsigned turn;  // of the warp that finishes the unit

  __device__ __forceinline__ void wait() const {
    while (static_cast<int>(count_at(taken) - turn) < 1 - kRoomsEach) {
    }
  }
};

// Each warp that finishes has some, which its units take in turn.
template <int kGates>
class Rooms {
 public:
  using Sums = Shared<kGates, false, true>;
  // `place`: where a lane's sums lie among those of a part.
  __device__ __forceinline__ Rooms(Sums& shared, int place)
      : sums_(shared_address(&shared.sums[0][0][0][place])),
        taken_(shared_address(shared.units_taken)) {}

  __device__ __forceinline__ Room of(int unit, int gate, int part) const {
    const unsigned finisher = unit % kFinishing;
    const unsigned had = finisher == 0 ? had_[0] : finisher == 1 ? had_[1] : had_[2];
    const unsigned turn = had + unit / kFinishing;
    const unsigned room = finisher + turn % kRoomsEach * kFinishing;
    const unsigned at = ((room * kGates + gate) * Sums::kParts + part) * Sums::kSums;
    return {sums_ + at * 4, taken_ + finisher * 4, static_cast<int>(kSummed + room), turn};
  }
  // A product is done, in which this block had so many.
  __device__ __forceinline__ void count(int units) {
#pragma unroll
    for (int finisher = 0; finisher < kFinishing; ++finisher) {
      had_[finisher] += (units + kFinishing - 1 - finisher) / kFinishing;
    }
  }

 private:
  static_assert(kFinishing == 3, "each has a count");
  std::uint32_t sums_, taken_;
  unsigned had_[kFinishing] = {};  // units of each warp that finishes, before this product
};

}  // namespace whole
}  // namespace cuda
}  // namespace minserve
