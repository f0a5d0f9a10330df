// A block's channels of the residual stream: looked up, added to, and passed on, or through the
// convolution that a layer begins with.
#pragma once

#include "exchange.cuh"

namespace minserve {
namespace cuda {
namespace wide {

// The sequences of a cluster, -1 for none: their rows of the state, the place of these in a
// layer's, and tokens.
template <int kTokens>
struct Sequences {
  long long rows[kTokens];
  int slots[kTokens], ids[kTokens];
};

template <int kTokens>
class Stream : protected Exchange<kTokens> {
 protected:
  using Base = Exchange<kTokens>;
  using Base::args_, Base::at_, Base::memory_, Base::rank_, Base::shape_, Base::kEights,
      Base::kWarps;
  using Base::lane, Base::warp;

  __device__ __forceinline__ Stream(const WideStepArgs& args, unsigned char* memory,
                                    Arrivals& arrivals, const Sequences<kTokens>& sequences)
      : Base(args, memory, arrivals), sequences_(sequences) {}

  __device__ __forceinline__ void look_up() {
    const auto* table = static_cast<const bf16*>(args_.table) + rank_ * shape_.own();
    // All are asked for at once.
    constexpr int kMost = divided_up_by(kMostClusterWidth / kWideBlocks / 16 * kEights, kWarps);
    unsigned pairs[kMost][2];
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      const int n = warp() + i * kWarps;
      if (n >= items()) break;
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const int id = sequences_.ids[token_of(n) + k];
        pairs[i][k] =
            id < 0 ? 0
                   : *reinterpret_cast<const unsigned*>(
                         table + static_cast<std::int64_t>(id) * shape_.of.width + channel_of(n));
      }
    }
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      const int n = warp() + i * kWarps;
      if (n < items()) keep(channel_of(n), token_of(n), pairs[i], shape_.of.taps == 0);
    }
  }

  // Adds all blocks' sums and the bias to this block's channels; last: which a convolution does not
  // add to before they are sent.
  __device__ __forceinline__ void add(const void* bias, bool last) {
    this->await_sums();
    each_own([&](int channel, int token) {
      float2 shift = {0.0f, 0.0f}, sums[2];
      if (bias) shift = whole::load_pair(bias, rank_ * shape_.own() + channel);
      this->sum_up(channel / 16, token / 8, sums);
      unsigned pairs[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float2 before = whole::numbers(*pair_at(at_.stream, channel, token + i));
        pairs[i] = rounded(sums[i].x + shift.x + before.x, sums[i].y + shift.y + before.y, bf16{});
      }
      keep(channel, token, pairs, last);
    });
  }

  // The convolution of a layer, of this block's channels.
  __device__ __forceinline__ void convolve(int layer) {
    const ClusterLayer& of = args_.layer[layer];
    this->meet_all();  // another group may still have been multiplying what lies there
    each_own([&](int channel, int token) {
      const int of_all = rank_ * shape_.own() + channel;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int slot = sequences_.slots[token + i];
        float* row = args_.conv + layer * args_.conv_layer_stride +
                     max(slot, 0) * args_.conv_slot_stride + of_all;
        whole::Convolution<kMostClusterTaps> convolution;
        convolution.load(of.taps, of.taps_bias, shape_.of.taps, of_all, row, args_.conv_tap_stride);
        const float2 x = whole::numbers(*pair_at(at_.stream, channel, token + i));
        const float2 y = convolution.step(x, slot >= 0);
        *pair_at(at_.made, channel, token + i) = rounded(y.x, y.y, bf16{});
      }
    });
    // What fills the steps up.
    constexpr int kStepSixteens = 2 * kTokens;
    uint4* behind =
        reinterpret_cast<uint4*>(memory_ + at_.made) + shape_.own_steps() * kStepSixteens;
    const int more = (shape_.mix_steps() - shape_.own_steps()) * kStepSixteens;
    for (int i = threadIdx.x; i < more; i += kComputingThreads) behind[i] = {};
    fence_for_copies();
    this->meet_all();
    this->say_sums_are_read();
  }

  // The last norm's results, of this block's channels; `scales`: of tokens, of which the cluster's
  // first is this one of all.
  __device__ __forceinline__ void leave_hidden(const float* scales, int first_token) {
    each_own([&](int channel, int token) {
      const int of_all = rank_ * shape_.own() + channel;
      const float2 norm = whole::load_pair(args_.norm, of_all);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (first_token + token + i >= args_.batch) return;
        const float scale = scales[token + i];
        const float2 x = whole::numbers(*pair_at(at_.stream, channel, token + i));
        bf16* row = static_cast<bf16*>(args_.hidden_states) +
                    static_cast<std::int64_t>(first_token + token + i) * shape_.of.width;
        *reinterpret_cast<unsigned*>(row + of_all) =
            rounded(x.x * scale * norm.x, x.y * scale * norm.y, bf16{});
      }
    });
  }

  const Sequences<kTokens>& sequences_;

 private:
  // What a thread has: two neighbouring channels of this block and two neighbouring tokens, as sums
  // lie in messages, some times.
  __device__ __forceinline__ int items() const { return shape_.own_steps() * kEights; }
  __device__ __forceinline__ static int channel_of(int item) {
    return item / kEights * 16 + lane() / 4 * 2;
  }
  __device__ __forceinline__ static int token_of(int item) {
    return item % kEights * 8 + lane() % 4 * 2;
  }
  template <class F>
  __device__ __forceinline__ void each_own(F f) {
#pragma unroll 1
    for (int n = warp(); n < items(); n += kWarps) {
      delay(16, 2000);
      f(channel_of(n), token_of(n));
    }
  }
  __device__ __forceinline__ unsigned* pair_at(int region, int channel, int token) const {
    return reinterpret_cast<unsigned*>(memory_ + region + place_of<kTokens>(channel, token));
  }
  // Two tokens' channels; the last time before they are sent, the sums of their squares go to all
  // blocks.
  __device__ __forceinline__ void keep(int channel, int token, const unsigned (&pairs)[2],
                                       bool last) {
#pragma unroll
    for (int i = 0; i < 2; ++i) *pair_at(at_.stream, channel, token + i) = pairs[i];
    if (!last) return;
    float squares[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float2 x = whole::numbers(pairs[i]);
      squares[i] = x.x * x.x + x.y * x.y;
#pragma unroll
      for (int other = 4; other < 32; other *= 2) {
        squares[i] += __shfl_xor_sync(0xffffffffu, squares[i], other);
      }
    }
    this->send_squares(channel / 16, token, {squares[0], squares[1]});
  }
};

}  // namespace wide
}  // namespace cuda
}  // namespace minserve
