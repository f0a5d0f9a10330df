// A block's channels of the residual stream: looked up, added to, and passed on, through a
// convolution where a layer begins with one.
#pragma once

#include "../core/channel_pair.cuh"
#include "dsmem_exchange.cuh"

namespace minserve {
namespace cuda {
namespace cluster {

// The sequences of a cluster, -1 for none: their rows of the state and tokens.
template <int kTokens>
struct Sequences {
  int slots[kTokens], ids[kTokens];
};

template <int kTiles, int kWidth>
class ResidualStream : protected DsmemExchange<kTiles, kWidth> {
 protected:
  using Base = DsmemExchange<kTiles, kWidth>;
  using Base::at_, Base::memory_, Base::rank_, Base::shape_, Base::kTokens, Base::kOwn;

  __device__ __forceinline__ ResidualStream(const ClusterDecodeArgs& args, unsigned char* memory,
                                            Arrivals& arrivals,
                                            const Sequences<kTiles * 8>& sequences)
      : Base(args, memory, arrivals), args_(args), sequences_(sequences) {}

  // Calls f(number, channel, token) for the pairs of this thread. Four neighbouring threads have
  // eight neighbouring channels of one token, and whole warps have some or none.
  template <class F>
  __device__ __forceinline__ void each_own_pair(F f) const {
#pragma unroll 1
    for (int i = threadIdx.x; i < kOwn / 2 * kTokens; i += kComputingThreads) {
      delay(16, 2000);
      f(i, i / 4 / kTokens * 8 + i % 4 * 2, i / 4 % kTokens);
    }
  }
  __device__ __forceinline__ unsigned& own_pair(int number) const {
    return reinterpret_cast<unsigned*>(memory_ + at_.own)[number];
  }

  // The convolution of a layer, for a pair of this block's channels.
  using Convolved = Convolution<kMostClusterTaps>;
  __device__ __forceinline__ Convolved convolution_of(int layer, int channel, int token) const {
    const int of_all = rank_ * kOwn + channel;
    float* row = args_.conv + layer * args_.conv_layer_stride +
                 max(sequences_.slots[token], 0) * args_.conv_slot_stride + of_all;
    Convolved found;
    found.load(args_.layer[layer].taps, args_.layer[layer].taps_bias, shape_.taps, of_all, row,
               args_.conv_tap_stride);
    return found;
  }
  // A pair of this block's channels, to be sent.
  __device__ __forceinline__ void put(bool convolved, int channel, int token, float2 x) {
    *reinterpret_cast<unsigned*>(this->own_of(convolved) + place_of_pair<kTiles>(channel, token)) =
        rounded(x.x, x.y, bf16{});
  }

  __device__ __forceinline__ void look_up() {
    const auto* table = static_cast<const bf16*>(args_.table);
    const auto row_of = [&](int token) {
      return table + static_cast<std::int64_t>(sequences_.ids[token]) * kWidth;
    };
    const bool convolved = shape_.taps > 0;
    each_own_pair([&](int number, int channel, int token) {
      unsigned pair = 0;
      if (sequences_.ids[token] >= 0) {
        pair = *reinterpret_cast<const unsigned*>(row_of(token) + rank_ * kOwn + channel);
      }
      own_pair(number) = pair;
      if (convolved) {
        Convolved convolution = convolution_of(0, channel, token);
        put(true, channel, token,
            convolution.step(unpack_bf16x2(pair), sequences_.slots[token] >= 0));
      }
    });
    if (convolved) return this->send_channels(true);
#pragma unroll 4
    for (int i = threadIdx.x; i < kWidth / 8 * kTokens; i += kComputingThreads) {
      const int channel = i / kTokens * 8, token = i % kTokens;
      uint4 eight = {};
      if (sequences_.ids[token] >= 0)
        eight = *reinterpret_cast<const uint4*>(row_of(token) + channel);
      *reinterpret_cast<uint4*>(memory_ + at_.stream + place_of_pair<kTiles>(channel, token)) =
          eight;
    }
    this->sync_computing_warps();
  }

  // Adds the incoming's sums, of so many blocks, and the bias to this block's channels, and sends
  // them to the others: through the convolution of a layer, or (-1) as they are.
  __device__ __forceinline__ void add(int sources, const void* bias, int layer) {
    const float* incoming = this->floats(at_.incoming);
    const int stride = kOwn * kTokens;
    const bool convolved = layer >= 0;
    each_own_pair([&](int number, int channel, int token) {
      // What comes from memory is on its way while sums are.
      unsigned more = 0;
      if (bias) {
        more = *reinterpret_cast<const unsigned*>(static_cast<const bf16*>(bias) + rank_ * kOwn +
                                                  channel);
      }
      Convolved convolution;
      if (convolved) convolution = convolution_of(layer, channel, token);
      if (sources > 1 && number == static_cast<int>(threadIdx.x)) this->await_sums();
      const float* low = incoming + channel * kTokens + this->column(channel, token);
      const float* high = incoming + (channel + 1) * kTokens + this->column(channel + 1, token);
      float2 sum = {low[0], high[0]};
#pragma unroll 1
      for (int source = 1; source < sources; source += 5) {
#pragma unroll
        for (int i = 0; i < 5; ++i) {
          low += stride, high += stride;
          sum.x += *low, sum.y += *high;
        }
      }
      const float2 shift = unpack_bf16x2(more);
      unsigned& pair = own_pair(number);
      const float2 before = unpack_bf16x2(pair);
      pair = rounded(sum.x + shift.x + before.x, sum.y + shift.y + before.y, bf16{});
      float2 x = unpack_bf16x2(pair);
      if (convolved) x = convolution.step(x, sequences_.slots[token] >= 0);
      put(convolved, channel, token, x);
    });
    if (sources > 1) this->sums_are_read();
    this->send_channels(convolved);
  }
  static_assert((kClusterBlocks - 1) % 5 == 0, "five sums at once");

  // The last norm's results, where there is no head: every block has the stream of all tokens, and
  // a warp one of every sixteenth.
  __device__ __forceinline__ void leave_hidden() const {
    constexpr int kUnits = kWidth / 8, kEach = divided_up_by(kUnits, 32);
    const int lane = threadIdx.x % 32;
    const int token = threadIdx.x / 32 * kClusterBlocks + rank_;
    const int row = static_cast<int>(blockIdx.x) / kClusterBlocks * kTokens + token;
    if (token >= kTokens || row >= args_.batch) return;
    uint4 units[kEach];
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int unit = i * 32 + lane;
      units[i] = {};
      if (unit < kUnits) {
        units[i] = *reinterpret_cast<const uint4*>(memory_ + at_.stream +
                                                   place_of_pair<kTiles>(unit * 8, token));
      }
      for (const unsigned pair : {units[i].x, units[i].y, units[i].z, units[i].w}) {
        const float2 x = unpack_bf16x2(pair);
        squares += x.x * x.x + x.y * x.y;
      }
    }
    for (int other = 16; other > 0; other /= 2) {
      squares += __shfl_xor_sync(0xffffffffu, squares, other);
    }
    const float scale = rsqrtf(squares / static_cast<float>(kWidth) + args_.eps);
    bf16* hidden =
        static_cast<bf16*>(args_.hidden_states) + static_cast<std::int64_t>(row) * kWidth;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int channel = (i * 32 + lane) * 8;
      if (channel >= kWidth) continue;
      const auto normed = [&](unsigned pair, int at) {
        const float2 x = unpack_bf16x2(pair), norm = load_pair(args_.norm, channel + at);
        return rounded(x.x * scale * norm.x, x.y * scale * norm.y, bf16{});
      };
      *reinterpret_cast<uint4*>(hidden + channel) = {normed(units[i].x, 0), normed(units[i].y, 2),
                                                     normed(units[i].z, 4), normed(units[i].w, 6)};
    }
  }

  const ClusterDecodeArgs& args_;
  const Sequences<kTiles * 8>& sequences_;
};

}  // namespace cluster
}  // namespace cuda
}  // namespace minserve
