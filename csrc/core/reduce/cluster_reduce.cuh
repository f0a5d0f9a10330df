// What the threads of a cluster's blocks find together: bests, sums, what each block has to say.
//
// All threads of all blocks call each of these, at the same place. A block writes what it says into
// the others' shared memory, then all meet and each reads its own. Two rows of slots take turns, so
// that none is written while it is still read: whoever writes the second time has met the others
// since they read the first. Nobody writes to a block after the last meeting, so blocks may end.
#pragma once

#include <cstring>

#include "block_reduce.cuh"

namespace minserve {
namespace cuda {

class Cluster {
 public:
  static constexpr unsigned kMostBlocks = 8;
  struct alignas(16) Shared {
    uint4 slots[2][kMostBlocks];
    Block::Shared block;
  };
  struct Sums {
    std::uint64_t before;  // of the threads before this one, in this block and in those before it
    std::uint64_t total;
  };

  Block block;

  // Before any other call: all blocks have started, so that they can be written to.
  __device__ static void begin() {
    if (blocks_of_cluster() == 1) return;
    arrive_at_cluster();
    wait_for_cluster();
  }
  __device__ explicit Cluster(Shared& shared)
      : block(shared.block),
        shared_(shared),
        blocks_(blocks_of_cluster()),
        rank_(rank_in_cluster()) {}

  __device__ unsigned blocks() const { return blocks_; }
  __device__ unsigned rank() const { return rank_; }

  // What any thread wrote before, in whatever block, is seen by all.
  __device__ void meet() const {
    if (blocks_ == 1) return __syncthreads();
    publish_to_cluster();
    wait_for_cluster();
  }

  // Writes to the same place of every block; one thread calls this.
  __device__ void tell(std::uint64_t& place, std::uint64_t x) const {
    place = x;
    for (unsigned b = 0; b < blocks_; ++b) {
      if (b != rank_) store_in_block(b, &place, static_cast<unsigned long long>(x));
    }
  }

  // Calls visit(rank, what that block said) for every block, in their order; all threads of a block
  // say the same. T has sixteen bytes.
  template <class T, class Visit>
  __device__ __forceinline__ void each(const T& mine, Visit visit) {
    static_assert(sizeof(T) == sizeof(uint4), "one store");
    if (blocks_ == 1) return visit(0u, mine);
    parity_ ^= 1;
    if (threadIdx.x < blocks_) {
      uint4 words;
      std::memcpy(&words, &mine, sizeof words);
      store_in_block(threadIdx.x, &shared_.slots[parity_][rank_], words);
    }
    meet();
#pragma unroll 1
    for (unsigned b = 0; b < blocks_; ++b) {
      const uint4 words = shared_.slots[parity_][b];
      T said;
      std::memcpy(&said, &words, sizeof said);
      visit(b, said);
    }
  }

  __device__ Sums sums(std::uint64_t mine) {
    const Block::Sums own = block.sums(mine);
    return of_blocks(own.before, own.total);
  }
  // The same where the block's sums are known.
  __device__ Sums of_blocks(std::uint64_t before, std::uint64_t total) {
    Sums sums = {before, 0};
    each(Said{total, 0}, [&](unsigned b, const Said& said) {
      if (b < rank_) sums.before += said.sum;
      sums.total += said.sum;
    });
    return sums;
  }

 private:
  struct Said {
    std::uint64_t sum, unused;
  };

  Shared& shared_;
  const unsigned blocks_, rank_;
  unsigned parity_ = 0;
};

}  // namespace cuda
}  // namespace minserve
