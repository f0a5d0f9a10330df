// What the blocks of a cluster tell each other, and where it lies.
//
// Nothing is overwritten before it has been read. A block's sums for another lie where that block's
// channels come to: they come when it has had the sums. Sums come to a block after it has sent its
// channels, for which it has read the sums before; where a convolution has both after one another,
// blocks say that they have read.
#pragma once

#include "../whole_step/pairs.cuh"
#include "products.cuh"

namespace minserve {
namespace cuda {
namespace wide {

// Of what the other blocks send: barriers that count its bytes, of channels for some blocks at a
// time, and of sums also the pieces that are this block's own; or (read) the blocks.
struct Arrivals {
  std::uint64_t streamed[kWideBlocks], squared, summed, read;
};

// Barriers at which computing warps meet a block's sender.
constexpr int kWritten = 2, kScaled = 3;

// Where a block's channels are in another's memory, and which barrier counts them: its own first,
// then those of the next ones, round about. They come in this order.
__device__ __forceinline__ int turn_of(int block, int in) {
  return (block - in) & (kWideBlocks - 1);
}

// A block's view of it, in a computing thread.
template <int kTokens>
class Exchange {
 public:
  // Few channels go to all blocks at once, each by a warp, for a copy takes a thread some time;
  // many one after the other.
  static constexpr bool kAtOnce = kTokens <= 24;
  // To the block that has them in this turn.
  __device__ __forceinline__ static void send_to(int turn, const WideStepArgs& args,
                                                 unsigned char* memory, Arrivals& arrivals) {
    const int bytes = args.at.channel_bytes;
    copy_to_block(static_cast<unsigned>(turn_of(static_cast<int>(rank_in_cluster()), turn)),
                  memory + args.at.stream + turn * bytes, memory + args.at.stream,
                  static_cast<unsigned>(bytes), arrivals.streamed[barrier_of(turn)]);
  }
  // They are waited for by so many blocks at a time.
  static constexpr int kBlocksAtOnce = kAtOnce ? 4 : 2;
  // Of a turn but the first, which is this block's own.
  __device__ __forceinline__ static int barrier_of(int turn) { return (turn - 1) / kBlocksAtOnce; }
  static constexpr int kBarriers = (kWideBlocks - 2) / kBlocksAtOnce + 1;

 protected:
  static constexpr int kEights = kTokens / 8, kWarps = kComputingThreads / 32;
  // What a warp sends at once: sums of sixteen channels. A lane has eight bytes of each eight
  // tokens: two neighbouring channels of two tokens.
  static constexpr int kPieceBytes = 16 * kTokens * 2;

  __device__ __forceinline__ Exchange(const WideStepArgs& args, unsigned char* memory,
                                      Arrivals& arrivals)
      : args_(args),
        shape_(args.wide),
        at_(args.at),
        memory_(memory),
        rank_(static_cast<int>(rank_in_cluster())),
        arrivals_(arrivals) {}

  __device__ __forceinline__ static void meet_all() { meet(1, kComputingThreads); }
  __device__ __forceinline__ static int warp() { return threadIdx.x / 32; }
  __device__ __forceinline__ static int lane() { return threadIdx.x % 32; }

  // Waits for the first so many steps' channels of the stream. This block's own are there.
  class StreamAwait {
   public:
    __device__ __forceinline__ StreamAwait(std::uint32_t barriers, unsigned parity, int steps)
        : next_(barriers), parity_(parity), of_block_(steps), ready_(steps) {}
    __device__ __forceinline__ void operator()(int steps) {
      while (ready_ < steps) {
        wait_barrier(next_, parity_);
        ready_ += of_block_ * kBlocksAtOnce;
        next_ += 8;
      }
    }

   private:
    std::uint32_t next_;
    const unsigned parity_;
    const int of_block_;
    int ready_;
  };
  __device__ __forceinline__ StreamAwait stream_await() const {
    return {shared_address(arrivals_.streamed), static_cast<unsigned>(streamed_ % 2),
            shape_.own_steps()};
  }
  __device__ __forceinline__ void stream_is_read() { ++streamed_; }
  // The sums of squares over sixteen channels of two tokens, which eight lanes have, one for each
  // block.
  __device__ __forceinline__ void send_squares(int sixteen, int token, const float2& sums) {
    static_assert(32 / 4 == kWideBlocks, "one for each block");
    const int to = lane() / 4;
    auto* squares = reinterpret_cast<float*>(memory_ + at_.squares);
    store_counted(static_cast<unsigned>(to), sums,
                  squares + (rank_ * shape_.own_steps() + sixteen) * kTokens + token,
                  arrivals_.squared);
  }
  // This block's channels, which all threads have written, to the others (`needed`: who read them):
  // by a warp each, or by one that does nothing else (Sender).
  __device__ __forceinline__ void send_channels(bool needed = true) {
    fence_for_copies();
    meet(kWritten, kComputingThreads + 32);
    delay(16, 3000);
    if (kAtOnce && needed && 0 < warp() && warp() < kWideBlocks && lane() == 0) {
      send_to(warp(), args_, memory_, arrivals_);
    }
    __syncwarp();
  }
  // What the norm divides the stream's channels by is there.
  __device__ __forceinline__ static void await_scales() { meet(kScaled, kComputingThreads + 32); }

  // This warp's sums of kCount neighbouring sixteens of channels, one or two, from `first` on, to
  // the blocks that have them.
  template <int kCount>
  __device__ __forceinline__ void send_sums(int first, const float (&sums)[kCount][kTokens / 2]) {
    const int steps = shape_.own_steps();
    unsigned char *inboxes[kCount], *pieces[kCount];
    int to[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int sixteen = first + i, place = sixteen % steps;
      to[i] = sixteen / steps;
      inboxes[i] = memory_ + at_.inbox + (rank_ * steps + place) * kPieceBytes;
      pieces[i] = to[i] == rank_
                      ? inboxes[i]
                      : memory_ + at_.stream + turn_of(to[i], rank_) * at_.channel_bytes +
                            place * kPieceBytes;
#pragma unroll
      for (int j = 0; j < kEights; ++j) {
        const float* of = sums[i] + 4 * j;
        *reinterpret_cast<uint2*>(pieces[i] + j * 256 + lane() * 8) = {
            rounded(of[0], of[2], bf16{}), rounded(of[1], of[3], bf16{})};
      }
    }
    fence_for_copies();
    __syncwarp();
    delay(16, 3000);
    if (lane() == 0) {
      const bool together = kCount == 2 && to[0] == to[kCount - 1];
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (to[i] == rank_) {
          arrive(arrivals_.summed);
        } else if (i == 0 || !together) {
          copy_to_block(static_cast<unsigned>(to[i]), inboxes[i], pieces[i],
                        static_cast<unsigned>(together ? 2 * kPieceBytes : kPieceBytes),
                        arrivals_.summed);
        }
      }
    }
    __syncwarp();
  }
  __device__ __forceinline__ void await_sums() {
    if (threadIdx.x == 0) {
      arrive_expecting(arrivals_.summed,
                       static_cast<unsigned>((kWideBlocks - 1) * at_.channel_bytes));
    }
    wait_barrier(arrivals_.summed, sums_ % 2);
    ++sums_;
  }
  // All blocks' sums of eight tokens of sixteen channels that a lane has.
  __device__ __forceinline__ void sum_up(int place, int eight, float2 (&pairs)[2]) const {
    const unsigned char* from =
        memory_ + at_.inbox + place * kPieceBytes + eight * 256 + lane() * 8;
    const int stride = shape_.own_steps() * kPieceBytes;
    uint2 all[kWideBlocks];
#pragma unroll
    for (int block = 0; block < kWideBlocks; ++block) {
      all[block] = *reinterpret_cast<const uint2*>(from + block * stride);
    }
    pairs[0] = pairs[1] = {0.0f, 0.0f};
#pragma unroll
    for (const uint2& one : all) {
      const float2 first = whole::numbers(one.x), second = whole::numbers(one.y);
      pairs[0].x += first.x, pairs[0].y += first.y;
      pairs[1].x += second.x, pairs[1].y += second.y;
    }
  }

  // All threads have read the sums: where others come before the next message.
  __device__ __forceinline__ void say_sums_are_read() {
    if (threadIdx.x < kWideBlocks) arrive_in_block(threadIdx.x, arrivals_.read);
  }
  __device__ __forceinline__ void await_readers() {
    wait_barrier(arrivals_.read, reads_ % 2);
    ++reads_;
  }

  const WideStepArgs& args_;
  const WideShape& shape_;
  const WideLayout& at_;
  unsigned char* const memory_;
  const int rank_;

 private:
  Arrivals& arrivals_;
  int streamed_ = 0, sums_ = 0, reads_ = 0;
};

}  // namespace wide
}  // namespace cuda
}  // namespace minserve
