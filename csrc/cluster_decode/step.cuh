// All layers of a step, as one block of a cluster computes its part of them.
#pragma once

#include "../core/gelu.cuh"
#include "../cells/dispatch.h"
#include "weight_stream.cuh"

namespace minserve {
namespace cuda {
namespace cluster {

template <template <class> class CellOf, int kTiles, int kWidth>
class Step : ResidualStream<kTiles, kWidth> {
  using Base = ResidualStream<kTiles, kWidth>;
  using Base::args_, Base::at_, Base::memory_, Base::rank_, Base::sequences_, Base::shape_;
  using Base::kOwn, Base::kTokens;
  static constexpr int kGates = CellOf<float>::kInputs, kGateRows = divided_up_by(kGates, 2);

 public:
  __device__ __forceinline__ Step(const ClusterDecodeArgs& args, unsigned char* memory,
                                  Ring (&rings)[kPairs], Arrivals& arrivals,
                                  const Sequences<kTiles * 8>& sequences)
      : Base(args, memory, arrivals, sequences),
        chunks_(args, rings[Share().pair],
                memory + at_.ring + Share().pair * args.stages * kChunkBytes) {}

  // One loop whose body has every product, exchange and sum once: each is short and takes its time
  // from fetching instructions, which are still there the next time.
  __device__ __forceinline__ void run() {
    this->look_up();
    const Kind first = shape_.taps > 0 ? Kind::mix : Kind::gates;
    Kind kind = first;
    int number = 0;  // of the layer
#pragma unroll 1
    while (true) {
      const ClusterLayer& layer = args_.layer[number];
      multiply(kind, layer, number);
      if (kind == Kind::head) break;
      const void* bias = layer.mix_bias;
      if (kind == Kind::mix) {
        this->sync_computing_warps();  // its sums are all written
      } else {
        const bool gates = kind == Kind::gates;
        multiply_own(gates ? at_.state : at_.hidden,
                     gates ? shape_.out_steps() : shape_.down_steps());
        bias = gates ? layer.out_bias : layer.down_bias;
      }
      const int sources = kind == Kind::mix ? 1 : kClusterBlocks;
      if (kind == Kind::mix) {
        kind = Kind::gates;
      } else if (kind == Kind::gates && shape_.hidden > 0) {
        kind = Kind::up;
      } else {
        kind = ++number < args_.layers ? first : Kind::head;
      }
      this->add(sources, bias, kind == Kind::mix ? number : -1);
    }
    if (shape_.vocabulary == 0) this->leave_hidden();
  }

 private:
  // What is made of rows that are multiplied with all channels of the stream.
  enum class Kind { mix, gates, up, head };

  __device__ __forceinline__ static int row_of_lane() { return threadIdx.x % 32 / 4; }
  // Of the cluster, among all.
  __device__ __forceinline__ static int first_token() {
    return static_cast<int>(blockIdx.x) / kClusterBlocks * kTokens;
  }
  // This lane's token of a tile.
  __device__ __forceinline__ static int token_of(int i) {
    return i * 8 + threadIdx.x % 4 * 2 + Share().half;
  }

  // Sums over this block's channels at `inputs`, for all blocks.
  __device__ __forceinline__ void multiply_own(int inputs, int steps) {
    multiply_split_k<kTiles, kWidth>(
        chunks_, steps, this->address(inputs),
        [&] { this->sync_computing_warps(); },  // they are all written
        [&](int first, const float (&sums)[kTiles][4]) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int row = first + row_of_lane() + half * 8;
            float* to = this->sums_of(row);
#pragma unroll
            for (int i = 0; i < kTiles; ++i) {
              *reinterpret_cast<float2*>(to + this->column(row, i * 8 + threadIdx.x % 4 * 2)) = {
                  sums[i][2 * half], sums[i][2 * half + 1]};
            }
          }
        });
    this->send_sums();
  }

  __device__ __forceinline__ int units_of(Kind kind) const {
    switch (kind) {
      case Kind::mix:
        return shape_.mix_units();
      case Kind::gates:
        return shape_.gate_units();
      case Kind::up:
        return shape_.up_units();
      default:
        return shape_.head_units();
    }
  }

  // What a lane has of a unit: sums of a tile's rows r and r + 8 for its token, scaled.
  struct Own {
    float of[kGateRows][kTiles][2];
  };

  // The units of rows that this warp has, times all inputs, and what is made of them.
  __device__ __forceinline__ void multiply(Kind kind, const ClusterLayer& layer, int number) {
    const Share share;
    const bool gates = kind == Kind::gates;
    const int units = units_of(kind), rows = gates ? kGateRows : 1;
    const std::uint32_t inputs =
        this->address(kind == Kind::mix ? at_.convolved : at_.stream) + threadIdx.x % 32 * 4;
    int unit = share.pair;
    Beside next = beside(kind, layer, number, unit, units);
    bool awaited = false;
    const auto ready = [&] {
      if (!awaited) this->await_stream(kind == Kind::mix);
      awaited = true;
    };
#pragma unroll 1
    for (; unit < units; unit += kPairs) {
      const Beside here = next;
      Sums<kTiles> sums[kGateRows], squares;
      multiply_rows<kTiles, kWidth, kGateRows>(chunks_, rows, inputs, ready, sums, squares);
      next = beside(kind, layer, number, unit + kPairs, units);
      delay(16, 3000);
      if (unit != share.pair) sync_pair();  // what was told before has been heard
      const Own own = share_out(sums, squares, kind != Kind::mix);
      if (gates) {
        step(unit, here, own);
      } else {
        epilogue(kind, unit, here, own);
      }
    }
    ready();
  }
  __device__ __forceinline__ static void sync_pair() { named_barrier_sync(2 + Share().pair, 64); }

  // The warps of a pair tell each other their sums of the other's tokens.
  __device__ __forceinline__ Own share_out(const Sums<kTiles> (&sums)[kGateRows],
                                           const Sums<kTiles>& squares, bool normed) {
    constexpr int kEach = 2 * kGateRows + 1;  // of a tile of tokens
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const bool odd = warp % 2 != 0;
    const auto told = [&](int from) {
      return this->floats(at_.outgoing) + from * (kTiles * kEach * 32) + lane;
    };
    float* mine = told(warp);
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      mine[(i * kEach) * 32] = odd ? squares(i, 0) : squares(i, 1);
#pragma unroll
      for (int n = 0; n < 2 * kGateRows; ++n) {
        const Sums<kTiles>& row = sums[n / 2];
        mine[(i * kEach + 1 + n) * 32] = odd ? row(i, n % 2 * 2) : row(i, n % 2 * 2 + 1);
      }
    }
    sync_pair();
    const float* other = told(warp ^ 1);
    const int diagonal = (lane % 4 * 2 + odd) * 4 + lane % 4;
    Own own;
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      const float square = (odd ? squares(i, 1) : squares(i, 0)) + other[i * kEach * 32];
      const float sum = __shfl_sync(0xffffffffu, square, diagonal);
      const float scale = normed ? rsqrtf(sum / static_cast<float>(kWidth) + args_.eps) : 1.0f;
#pragma unroll
      for (int n = 0; n < 2 * kGateRows; ++n) {
        const Sums<kTiles>& row = sums[n / 2];
        const float own_sum = odd ? row(i, n % 2 * 2 + 1) : row(i, n % 2 * 2);
        own.of[n / 2][i][n % 2] = (own_sum + other[(i * kEach + 1 + n) * 32]) * scale;
      }
    }
    return own;
  }

  // What a lane needs besides a unit's sums: biases, of the gates or of two rows; states.
  struct Beside {
    bf16 shift[kGates];
    float state[kTiles];
    float* row[kTiles];  // the states', null of padding
  };
  // Not widened yet, which would wait for it.
  __device__ __forceinline__ static bf16 number_at(const void* bias, int at) {
    return static_cast<const bf16*>(bias)[at];
  }
  __device__ __forceinline__ float* state_of(int number, int channel, int token) const {
    const int slot = sequences_.slots[token];
    if (slot < 0) return nullptr;
    return args_.cell + number * args_.cell_layer_stride + slot * args_.cell_slot_stride + channel;
  }
  // Of all, the first channel of a unit that this lane has.
  __device__ __forceinline__ int channel_of(Kind kind, int unit) const {
    switch (kind) {
      case Kind::gates:
        return rank_ * (shape_.inner / kClusterBlocks) + unit * 8 + row_of_lane();
      case Kind::up:
        return rank_ * (shape_.hidden / kClusterBlocks) + unit * 16 + row_of_lane();
      default:
        return (unit * kClusterBlocks + rank_) * 16 + row_of_lane();
    }
  }
  __device__ __forceinline__ Beside beside(Kind kind, const ClusterLayer& layer, int number,
                                           int unit, int units) const {
    Beside found = {};
    if (unit >= units || kind == Kind::mix) return found;
    const int channel = channel_of(kind, unit);
    if (kind == Kind::gates) {
      if (layer.gates_bias) {
#pragma unroll
        for (int gate = 0; gate < kGates; ++gate) {
          found.shift[gate] = number_at(layer.gates_bias, gate * shape_.inner + channel);
        }
      }
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        found.row[i] = state_of(number, channel, token_of(i));
        if (found.row[i]) found.state[i] = *found.row[i];
      }
      return found;
    }
    const void* bias = kind == Kind::up ? layer.up_bias : args_.head_bias;
    const int end = kind == Kind::up ? shape_.hidden : shape_.vocabulary;
    if (bias && channel < end) found.shift[0] = number_at(bias, channel);
    if (bias && channel + 8 < end) found.shift[1] = number_at(bias, channel + 8);
    return found;
  }

  // One of a block's channels, of an MLP or the recurrence, for one token.
  __device__ __forceinline__ void keep(int at, int channel, int token, float x) {
    const int place = place_of_pair<kTiles>(channel, token) + channel % 2 * 2;
    *reinterpret_cast<unsigned short*>(memory_ + at + place) =
        static_cast<unsigned short>(rounded(x, 0.0f, bf16{}));
  }

  // The recurrence's step.
  __device__ __forceinline__ void step(int unit, const Beside& here, const Own& own) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      float in[kGates];
#pragma unroll
      for (int gate = 0; gate < kGates; ++gate) {
        const unsigned pre =
            rounded(own.of[gate / 2][i][gate % 2] + to_lane(here.shift[gate]), 0.0f, bf16{});
        in[gate] = number_of(&pre, 0, bf16{});
      }
      const float h = step_cell<CellOf>(AnyOptions{args_.linear_candidate, args_.normalize_gates},
                                        in, here.state[i]);
      float* state = here.row[i];
      if (state) *state = h;
      keep(at_.state, unit * 8 + row_of_lane(), token_of(i), state ? h : 0.0f);
    }
  }

  // Of all else: GELU of an MLP's upper half; sums for the incoming of what has come out of a
  // convolution; logits.
  __device__ __forceinline__ void epilogue(Kind kind, int unit, const Beside& here,
                                           const Own& own) {
    const int row = unit * 16 + row_of_lane(), channel = channel_of(kind, unit);
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int below = half * 8, token = token_of(i);
        const float y = own.of[0][i][half] + to_lane(here.shift[half]);
        if (kind == Kind::up) {
          keep(at_.hidden, row + below, token, gelu(y));
        } else if (kind == Kind::mix) {
          if (row + below < kOwn) {
            this->floats(at_.incoming)[(row + below) * kTokens + this->column(row + below, token)] =
                y;
          }
        } else if (channel + below < shape_.vocabulary && first_token() + token < args_.batch) {
          args_.logits[static_cast<std::int64_t>(first_token() + token) * shape_.vocabulary +
                       channel + below] = y;
        }
      }
    }
  }

  Chunks chunks_;
};

}  // namespace cluster
}  // namespace cuda
}  // namespace minserve
