// The exchange between the blocks of a cluster through distributed shared memory, and its layout.
//
// Nothing is overwritten before it has been read: a block's sums leave after it has all of the
// stream, and its channels after it has all sums or, where they are mixed, all that was convolved.
// What a block tells itself it writes where it belongs.
#pragma once

#include "mma.cuh"

namespace minserve {
namespace cuda {
namespace cluster {

constexpr int kComputingThreads = kComputingWarps * 32;

// Of what the other blocks send: barriers that count its bytes.
struct Arrivals {
  std::uint64_t streamed, convolved, summed;
};

// A block's view of it, in a computing thread.
template <int kTiles, int kWidth>
class DsmemExchange {
 protected:
  static constexpr int kTokens = kTiles * 8;
  static constexpr int kOwn = kWidth / kClusterBlocks;  // channels of the residual stream

  __device__ __forceinline__ DsmemExchange(const ClusterDecodeArgs& args, unsigned char* memory,
                                           Arrivals& arrivals)
      : shape_(args.shape),
        at_(args.shape, kTokens),
        memory_(memory),
        rank_(static_cast<int>(rank_in_cluster())),
        arrivals_(arrivals) {}

  __device__ __forceinline__ static void sync_computing_warps() {
    named_barrier_sync(1, kComputingThreads);
  }
  // The place of a token's sum in a row of them, so that neighbouring rows lie in different banks.
  __device__ __forceinline__ static int column(int row, int token) {
    if (kTiles == 4) return token ^ row % 4 * 8;
    if (kTiles == 2) return token ^ row / 2 % 2 * 8;
    return token;
  }
  __device__ __forceinline__ float* floats(int at) const {
    return reinterpret_cast<float*>(memory_ + at);
  }
  __device__ __forceinline__ std::uint32_t address(int at) const {
    return shared_address(memory_ + at);
  }

  // What the next product reads; the first one's, without a convolution, every block looks up.
  __device__ __forceinline__ void await_stream(bool convolved) {
    if (!convolved && streamed_ == sent_) return;
    std::uint64_t& barrier = convolved ? arrivals_.convolved : arrivals_.streamed;
    expect(barrier, (kClusterBlocks - 1) * kOwn * kTokens * 2);
    mbarrier_wait(barrier, (convolved ? convolved_ : streamed_) % 2);
    convolved ? ++convolved_ : ++streamed_;
  }
  // This block's channels of the stream, or of what comes out of a convolution.
  __device__ __forceinline__ unsigned char* own_of(bool convolved) const {
    return memory_ + (convolved ? at_.convolved : at_.stream) + rank_ * (kOwn * kTokens * 2);
  }
  // Of what all threads have written: the channels of the stream, or sums.
  __device__ __forceinline__ void send_channels(bool convolved) {
    unsigned char* own = own_of(convolved);
    send(own, own, 0, kOwn * kTokens * 2, convolved ? arrivals_.convolved : arrivals_.streamed);
    if (!convolved) ++sent_;
  }
  // Where a row's sums are written: for a block among those for the others, its own at once.
  __device__ __forceinline__ float* sums_of(int row) const {
    const bool own = static_cast<unsigned>(row - rank_ * kOwn) < static_cast<unsigned>(kOwn);
    return floats(own ? at_.incoming : at_.outgoing) + row * kTokens;
  }
  __device__ __forceinline__ void send_sums() {
    constexpr int kBytes = kOwn * kTokens * 4;
    send(memory_ + at_.incoming + rank_ * kBytes, memory_ + at_.outgoing, kBytes, kBytes,
         arrivals_.summed);
  }
  __device__ __forceinline__ void await_sums() const {
    expect(arrivals_.summed, (kClusterBlocks - 1) * kOwn * kTokens * 4);
    mbarrier_wait(arrivals_.summed, sums_ % 2);
  }
  __device__ __forceinline__ void sums_are_read() { ++sums_; }

  const ClusterShape& shape_;
  const ClusterLayout at_;
  unsigned char* const memory_;
  const int rank_;

 private:
  __device__ __forceinline__ void expect(std::uint64_t& barrier, int bytes) const {
    if (threadIdx.x == 0) mbarrier_arrive_expect_tx(barrier, static_cast<unsigned>(bytes));
  }
  // A copy to every other block of what all threads have written: so many bytes, each block's that
  // much further on.
  __device__ __forceinline__ void send(unsigned char* to, const unsigned char* from, int stride,
                                       int bytes, std::uint64_t& barrier) {
    fence_proxy_async();
    sync_computing_warps();
    if (!met_) wait_for_cluster();  // the other blocks have set their barriers up
    met_ = true;
    delay(16, 3000);
    if (threadIdx.x % 32 == 0) {  // a thread of each warp, for those of one would take turns
      for (int n = 1 + threadIdx.x / 32; n < kClusterBlocks; n += kComputingWarps) {
        const int block = (rank_ + n) % kClusterBlocks;
        tma_copy_to_block(static_cast<unsigned>(block), to, from + block * stride,
                          static_cast<unsigned>(bytes), barrier);
      }
    }
    __syncwarp();
  }

  Arrivals& arrivals_;
  int sent_ = 0, streamed_ = 0, convolved_ = 0, sums_ = 0;
  bool met_ = false;
};

}  // namespace cluster
}  // namespace cuda
}  // namespace minserve
