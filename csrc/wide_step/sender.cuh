// The warp that finds what the norm of all channels divides by, and sends a block's to the others
// where they are many (Exchange::kAtOnce).
#pragma once

#include "exchange.cuh"

namespace minserve {
namespace cuda {
namespace wide {

template <int kTokens>
class Sender {
  using Channels = Exchange<kTokens>;

 public:
  // `scales`: for each token of the cluster.
  __device__ __forceinline__ Sender(const WideStepArgs& args, unsigned char* memory,
                                    Arrivals& arrivals, float* scales)
      : args_(args), memory_(memory), arrivals_(arrivals), scales_(scales) {}

  __device__ __forceinline__ void run() const {
    const int messages = args_.layers * (args_.shape.hidden > 0 ? 2 : 1) + 1;
#pragma unroll 1
    for (int n = 0; n < messages; ++n) {
      meet(kWritten, kComputingThreads + 32);
      delay(4, 3000);
      send(n + 1 < messages || args_.shape.vocabulary > 0);
      delay(4, 3000);
      find_scales(n % 2);
      __syncwarp();
      meet(kScaled, kComputingThreads + 32);
    }
  }

 private:
  __device__ __forceinline__ static int lane() { return threadIdx.x % 32; }

  // This block's channels to all others, unless its warps send them at once; theirs are expected,
  // and all squares. Without a head nobody reads the last ones (`needed`).
  __device__ __forceinline__ void send(bool needed) const {
    if (!Channels::kAtOnce && needed && lane() == 0) {
#pragma unroll 1
      for (int turn = 1; turn < kWideBlocks; ++turn) {  // those that need them first
        Channels::send_to(turn, args_, memory_, arrivals_);
      }
    }
    __syncwarp();
    if (lane() < Channels::kBarriers && needed) {
      const int first = 1 + lane() * Channels::kBlocksAtOnce;
      const int blocks = min(Channels::kBlocksAtOnce, kWideBlocks - first);
      arrive_expecting(arrivals_.streamed[lane()],
                       static_cast<unsigned>(blocks * args_.at.channel_bytes));
    } else if (lane() == Channels::kBarriers) {
      arrive_expecting(arrivals_.squared,
                       static_cast<unsigned>(kWideBlocks * args_.at.square_bytes));
    }
    __syncwarp();
  }

  __device__ __forceinline__ void find_scales(unsigned parity) const {
    wait_barrier(arrivals_.squared, parity);
#pragma unroll 1
    for (int token = lane(); token < kTokens; token += 32) {
      const auto* from = reinterpret_cast<const float*>(memory_ + args_.at.squares) + token;
      float sum = 0.0f;
#pragma unroll 1
      for (int n = 0; n < args_.shape.width / 16; n += 8, from += 8 * kTokens) {
        float eight[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) eight[i] = from[i * kTokens];
#pragma unroll
        for (const float one : eight) sum += one;
      }
      scales_[token] = rsqrtf(sum / static_cast<float>(args_.shape.width) + args_.eps);
    }
  }

  const WideStepArgs& args_;
  unsigned char* const memory_;
  Arrivals& arrivals_;
  float* const scales_;
};

}  // namespace wide
}  // namespace cuda
}  // namespace minserve
