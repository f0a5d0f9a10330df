// The selective scan: a block reads one sequence for a few channels, token after token.
//
// Time is serial, with the states in registers, so no bit depends on where a prompt is cut. Tiles
// of kTime tokens pass through two buffers in shared memory. While a tile is in one of its stages
// the neighbouring tiles are in the others, so that a turn has one barrier:
//
//   load     inputs on their way to registers, from rows of any alignment
//   prepare  per token and channel: softplus and gate, once for all states; B and C as floats
//   advance  per token: the states, the sums C h, the outputs
//   write    outputs to memory, side by side along the channels
//
// Where blocks are few, other warps do all stages but `advance`: a warp that advances states then
// waits for nothing else.
#pragma once

#include "../core/vector_access.cuh"
#include "recurrence.cuh"

namespace minserve {
namespace cuda {

constexpr int kScanThreads = 128;  // of a block, which advance its states

// A block's share: kStates states to a thread, kLanes threads to a channel, kTime tokens at a time,
// of which inputs and outputs are read and written kVec channels at a time. kStagers: threads for
// the other stages; 0: those that advance the states do these, too.
template <int kStatesOfThread, int kLanesOfChannel, int kTokens, int kChannelsOfAccess,
          int kStagingThreads = 0>
struct ScanTile {
  static constexpr int kStagers = kStagingThreads, kThreads = kScanThreads + kStagers;
  static constexpr int kStaging = kStagers > 0 ? kStagers : kScanThreads;
  static constexpr int kStates = kStatesOfThread, kLanes = kLanesOfChannel, kTime = kTokens;
  static constexpr int kVec = kChannelsOfAccess;
  static constexpr int kChannels = kScanThreads / kLanes;    // of a block
  static constexpr int kWarpChannels = kWarpLanes / kLanes;  // of a warp
  static constexpr int kVectors = kChannels / kVec;          // of a token's row
  static constexpr int kPairs = kStates * kLanes / 2;        // of states
  static constexpr int kSummed = kLanes < 8 ? kLanes : 8;    // tokens whose sums go together
  // Of a multiprocessor, by registers.
  static constexpr int kBlocks = kStagers > 0 ? (kTime > 32 ? 2 : 3) : kStates > 4 ? 3 : 4;
  // Rows of outputs begin in different banks.
  static constexpr int kRow = kChannels + (kWarpChannels < 4 ? 4 : kWarpChannels);
  static_assert(kTime % kSummed == 0 && kTime % 2 == 0);
  static_assert(kChannels % kVec == 0 && kPairs % 2 == 0);

  // Where a channel is in the buffers: threads that read neighbouring vectors write neighbouring
  // columns.
  static constexpr __device__ int column(int vector, int v) { return v * kVectors + vector; }
  static constexpr __device__ int channel(int column) {
    return column % kVectors * kVec + column / kVectors;
  }
  struct Buffer {
    float4 steps[kTime / 2][kChannels];     // decay and dt x, of two tokens
    float2 gates[kTime / 2][kChannels][2];  // x and gate, of two tokens
    float4 choices[kTime][kPairs];          // B, then C, of two states
    float outputs[kTime][kRow];
  };
  static constexpr int kSharedBytes = 2 * static_cast<int>(sizeof(Buffer));
};

template <class T, class Tile>
class ChannelScan {
 public:
  // The sequence's rows [begin, end), the block's channels from `first` on.
  __device__ __forceinline__ ChannelScan(const SelectiveArgs& args, std::int64_t begin,
                                         std::int64_t end, std::int64_t first)
      : args_(args),
        length_(static_cast<int>(end - begin)),
        tiles_((length_ + kTime - 1) / kTime),
        x_at_(at(args.x, begin + 2 * pair(0), first + own_vector() * kVec)),
        dt_at_(at(args.dt, begin + 2 * pair(0), first + own_vector() * kVec)),
        z_at_(at(args.z, begin + 2 * pair(0), first + own_vector() * kVec)),
        y_at_(at(args.y, begin + pair(0), first + own_vector() * kVec)),
        b_at_(at(args.B, begin + token_of_choice(0), kChosen * own_choice())),
        c_at_(at(args.C, begin + token_of_choice(0), kChosen * own_choice())),
        has_vector_(first + own_vector() * kVec < args.layout.channels),
        channel_(first + Tile::channel(column())),
        states_(channel_ < args.layout.channels ? args.states - group() * kStates : 0) {
    if (has_vector_) {
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
        bias_[v] = channel_number(args.dt_bias, first + own_vector() * kVec + v, T{});
      }
    }
  }

  // Reads all tokens, from the state row and back to it.
  __device__ __forceinline__ void run(typename Tile::Buffer* buffers, std::int64_t slot) {
    if (Tile::kStagers == 0) {
      load(0);
      begin(slot);
      prepare(buffers[0], 0);
      if (tiles_ > 1) load(1);
      __syncthreads();
      for (int tile = 0; tile < tiles_; ++tile) {
        stage_around(buffers, tile);
        advance(buffers[tile % 2], tile);
        __syncthreads();
      }
      write(buffers[(tiles_ - 1) % 2], tiles_ - 1);
      end(slot);
    } else if (stages()) {
      load(0);
      prepare(buffers[0], 0);
      if (tiles_ > 1) load(1);
      __syncthreads();
      for (int tile = 0; tile < tiles_; ++tile) {
        stage_around(buffers, tile);
        __syncthreads();
      }
      write(buffers[(tiles_ - 1) % 2], tiles_ - 1);
    } else {
      begin(slot);
      __syncthreads();
      for (int tile = 0; tile < tiles_; ++tile) {
        advance(buffers[tile % 2], tile);
        __syncthreads();
      }
      end(slot);
    }
  }

  // The rows of a sequence that is padding.
  __device__ __forceinline__ void zero() {
    if (!stages()) return;
    for (int tile = 0; tile < tiles_; ++tile) {
      write_rows(tile, [](int, int) { return 0.0f; });
    }
  }

 private:
  static constexpr int kTime = Tile::kTime, kStates = Tile::kStates, kLanes = Tile::kLanes;
  static constexpr int kVec = Tile::kVec, kVectors = Tile::kVectors, kSummed = Tile::kSummed;
  using Vector = Channels<T, kVec>;

  __device__ __forceinline__ static bool stages() {
    return Tile::kStagers == 0 || threadIdx.x >= kScanThreads;
  }
  // Of the threads that read inputs and write outputs; of the others any number.
  __device__ __forceinline__ static int stager() { return threadIdx.x % Tile::kStaging; }
  // What such a thread has: a vector of channels, of pairs of tokens.
  static constexpr int kPairStep = Tile::kStaging / kVectors;
  static constexpr int kOwnPairs = (kTime / 2 + kPairStep - 1) / kPairStep;
  __device__ __forceinline__ static int own_vector() { return stager() % kVectors; }
  __device__ __forceinline__ static int pair(int i) { return stager() / kVectors + i * kPairStep; }
  // And of B and C: four states, of some tokens.
  static constexpr int kChosen = 4, kChoices = Tile::kPairs * 2 / kChosen;  // of a token
  static constexpr int kChoiceStep = Tile::kStaging / kChoices;
  static constexpr int kOwnChoices = (kTime + kChoiceStep - 1) / kChoiceStep;
  static constexpr int kChoiceVec = kVec == 1 ? 1 : kChosen;
  __device__ __forceinline__ static int own_choice() { return stager() % kChoices; }
  __device__ __forceinline__ static int token_of_choice(int i) {
    return stager() / kChoices + i * kChoiceStep;
  }
  // Where a thread has states.
  __device__ __forceinline__ static int lane() { return threadIdx.x % kWarpLanes; }
  __device__ __forceinline__ static int group() { return lane() / Tile::kWarpChannels; }
  __device__ __forceinline__ static int column() {
    return threadIdx.x / kWarpLanes * Tile::kWarpChannels + lane() % Tile::kWarpChannels;
  }

  __device__ __forceinline__ static T* at(const Stream& stream, std::int64_t row,
                                          std::int64_t element) {
    return static_cast<T*>(stream.data) + row * stream.stride + element;
  }
  __device__ __forceinline__ int tokens(int tile) const {
    return min(length_ - tile * kTime, kTime);
  }

  // All that is done for other tiles while `tile` advances.
  __device__ __forceinline__ void stage_around(typename Tile::Buffer* buffers, int tile) {
    typename Tile::Buffer& other = buffers[(tile + 1) % 2];
    if (tile > 0) write(other, tile - 1);
    if (tile + 1 < tiles_) {
      prepare(other, tile + 1);
      if (tile + 2 < tiles_) load(tile + 2);
    }
  }

  // Tile after tile.
  __device__ __forceinline__ void load(int tile) {
    const int count = tokens(tile);
#pragma unroll
    for (int i = 0; i < kOwnPairs; ++i) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        x_[i][e] = dt_[i][e] = z_[i][e] = Vector{};
        if (2 * pair(i) + e >= count || !has_vector_) continue;
        const int row = 2 * i * kPairStep + e;
        x_[i][e].load(x_at_ + row * args_.x.stride);
        dt_[i][e].load(dt_at_ + row * args_.dt.stride);
        if (args_.z.data) z_[i][e].load(z_at_ + row * args_.z.stride);
      }
    }
#pragma unroll
    for (int i = 0; i < kOwnChoices; ++i) {
#pragma unroll
      for (int n = 0; n < kChosen / kChoiceVec; ++n) {
        b_[i][n] = c_[i][n] = {};
        if (token_of_choice(i) >= count) continue;
        if (kChosen * own_choice() + n * kChoiceVec >= args_.states) continue;
        b_[i][n].load(b_at_ + i * kChoiceStep * args_.B.stride + n * kChoiceVec);
        c_[i][n].load(c_at_ + i * kChoiceStep * args_.C.stride + n * kChoiceVec);
      }
    }
    x_at_ += kTime * args_.x.stride;
    dt_at_ += kTime * args_.dt.stride;
    z_at_ += kTime * args_.z.stride;
    b_at_ += kTime * args_.B.stride;
    c_at_ += kTime * args_.C.stride;
  }

  __device__ __forceinline__ void prepare(typename Tile::Buffer& to, int tile) const {
    const int count = tokens(tile);
#pragma unroll
    for (int i = 0; i < kOwnPairs; ++i) {
      if (2 * pair(i) >= (count + kSummed - 1) / kSummed * kSummed) continue;
      float gate[kVec][2];
#pragma unroll
      for (int v = 0; v < kVec; ++v) gate[v][0] = gate[v][1] = 1.0f;
      if (args_.z.data) {
#pragma unroll
        for (int v = 0; v < kVec; ++v) {
          gate[v][0] = silu(z_[i][0][v]);
          gate[v][1] = silu(z_[i][1][v]);
        }
      }
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
        float decay[2], write[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          // Tokens behind the last leave the states as they are, to the sign of a zero.
          const bool real = 2 * pair(i) + e < count;
          const float delta = softplus(dt_[i][e][v] + bias_[v]);
          decay[e] = real ? decay_of(delta) : 0.0f;
          write[e] = real ? delta * x_[i][e][v] : -0.0f;
        }
        const int column = Tile::column(own_vector(), v);
        to.steps[pair(i)][column] = {decay[0], write[0], decay[1], write[1]};
        *reinterpret_cast<float4*>(to.gates[pair(i)][column]) = {x_[i][0][v], gate[v][0],
                                                                 x_[i][1][v], gate[v][1]};
      }
    }
#pragma unroll
    for (int i = 0; i < kOwnChoices; ++i) {
      const int t = token_of_choice(i);
      if (t >= kTime) continue;
#pragma unroll
      for (int n = 0; n < kChosen; n += 2) {
        const auto of = [&](const auto& numbers, int m) {
          return numbers[m / kChoiceVec][m % kChoiceVec];
        };
        to.choices[t][(kChosen * own_choice() + n) / 2] = {of(b_[i], n), of(b_[i], n + 1),
                                                           of(c_[i], n), of(c_[i], n + 1)};
      }
    }
  }

  // What a thread has of the state row.
  template <class Row>
  __device__ __forceinline__ void with_states(std::int64_t slot, const Row& row) const {
    const std::int64_t at = slot * args_.slot_stride + first_state();
    if (args_.half_state) {
      row(static_cast<bf16*>(args_.state) + at);
    } else {
      row(static_cast<float*>(args_.state) + at);
    }
  }
  __device__ __forceinline__ std::int64_t first_state() const {
    return channel_ * args_.states + group() * kStates;
  }
  __device__ __forceinline__ void begin(std::int64_t slot) {
    with_states(slot, [&](const auto* row) { load_states<(kVec > 1)>(row, states_, h_); });
    load_states<false>(args_.A + first_state(), states_, a_);
    if (channel_ < args_.layout.channels) skip_ = channel_number(args_.D, channel_, T{});
  }
  __device__ __forceinline__ void end(std::int64_t slot) const {
    with_states(slot, [&](auto* row) { store_states<(kVec > 1)>(row, states_, h_); });
  }

  // The sums of a group of tokens are added up among the lanes while the next group's states
  // advance: neither waits for the other.
  __device__ __forceinline__ void advance(typename Tile::Buffer& tile_of, int tile) {
    const int count = tokens(tile);
    float sums[kSummed];
    advance_group(tile_of, 0, sums);
#pragma unroll 1
    for (int t = kSummed; t < count; t += kSummed) {
      float next[kSummed];
      advance_group(tile_of, t, next);
      finish_group(tile_of, t - kSummed, sums);
#pragma unroll
      for (int k = 0; k < kSummed; ++k) sums[k] = next[k];
    }
    finish_group(tile_of, (count - 1) / kSummed * kSummed, sums);
  }
  __device__ __forceinline__ void advance_group(const typename Tile::Buffer& from, int t,
                                                float (&sums)[kSummed]) {
#pragma unroll
    for (int k = 0; k < kSummed; ++k) {
      const float4 steps = from.steps[(t + k) / 2][column()];
      const float decay = k % 2 ? steps.z : steps.x, write = k % 2 ? steps.w : steps.y;
      float c[kStates];
#pragma unroll
      for (int n = 0; n < kStates; n += 2) {
        const float4 choice = from.choices[t + k][group() * (kStates / 2) + n / 2];
        h_[n] = cuda::advance(h_[n], decay, a_[n], write, choice.x);
        h_[n + 1] = cuda::advance(h_[n + 1], decay, a_[n + 1], write, choice.y);
        c[n] = choice.z, c[n + 1] = choice.w;
      }
      sums[k] = sum_of_states(c, h_);
    }
  }
  __device__ __forceinline__ void finish_group(typename Tile::Buffer& tile_of, int t,
                                               float (&sums)[kSummed]) const {
    const float sum = sum_over_lanes<kLanes>(sums);
    if (group() >= kSummed) return;
    const int own = value_of_group<kSummed>(group());
    const float2 gate = tile_of.gates[t / 2 + own / 2][column()][own % 2];
    tile_of.outputs[t + own][column()] = fmadd(skip_, gate.x, sum) * gate.y;
  }

  // Tile after tile.
  __device__ __forceinline__ void write(const typename Tile::Buffer& from, int tile) {
    write_rows(tile, [&](int t, int column) { return from.outputs[t][column]; });
  }
  template <class Value>
  __device__ __forceinline__ void write_rows(int tile, const Value& value) {
    const int count = tokens(tile);
#pragma unroll
    for (int i = 0; i < kOwnPairs; ++i) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int t = pair(i) + e * (kTime / 2);
        if (pair(i) >= kTime / 2 || t >= count || !has_vector_) continue;
        float values[kVec];
#pragma unroll
        for (int v = 0; v < kVec; ++v) values[v] = value(t, Tile::column(own_vector(), v));
        Vector out;
        out.set(values);
        out.store(y_at_ + (i * kPairStep + e * (kTime / 2)) * args_.y.stride);
      }
    }
    y_at_ += kTime * args_.y.stride;
  }

  const SelectiveArgs& args_;
  const int length_, tiles_;
  const T *x_at_, *dt_at_, *z_at_;
  T* y_at_;
  const T *b_at_, *c_at_;
  const bool has_vector_;
  const std::int64_t channel_, states_;  // of the states, and how many there are from the first on
  Vector x_[kOwnPairs][2], dt_[kOwnPairs][2], z_[kOwnPairs][2];
  Channels<T, kChoiceVec> b_[kOwnChoices][kChosen / kChoiceVec];
  Channels<T, kChoiceVec> c_[kOwnChoices][kChosen / kChoiceVec];
  float bias_[kVec] = {}, skip_ = 0.0f;
  float h_[kStates], a_[kStates];
};

// Blocks are numbered by sequence, of which the last is the padding tail, then by channels.
template <class T, class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks)
    selective_scan_kernel(const __grid_constant__ SelectiveArgs args) {
  extern __shared__ uint4 memory[];
  const Layout& lay = args.layout;
  const unsigned columns = static_cast<unsigned>(divided_up(lay.channels, Tile::kChannels));
  const std::int64_t s = blockIdx.x / columns;
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x % columns) * Tile::kChannels;
  pdl_launch_dependents();
  wait_for_previous_kernel();
  const std::int64_t begin = lay.begin(s), end = lay.end(s), slot = lay.slot(s);
  if (begin >= end) return;
  ChannelScan<T, Tile> scan(args, begin, end, first);
  if (slot < 0) return scan.zero();
  scan.run(reinterpret_cast<typename Tile::Buffer*>(memory), slot);
}

template <class Tile>
inline long long scan_blocks(const Layout& lay) {
  return (lay.sequences + 1) * divided_up(lay.channels, Tile::kChannels);
}

constexpr std::int64_t kMostStatesOnGpu = 256;

using UsualTile = ScanTile<4, 4, 32, 4>;
// For few channels of few sequences. Twice as many threads advance states, half as many each, with
// more to do for the same tokens, and as many threads again do the other stages.
using FewChainsTile = ScanTile<2, 8, 64, 2, 128>;
// The same with three blocks on a multiprocessor.
using ThreeBlocksTile = ScanTile<2, 8, 32, 2, 128>;
// Any strides, alignment and number of channels.
using AnyTile = ScanTile<4, 4, 32, 1>;
using States64Tile = ScanTile<4, 16, 16, 1>;
using States256Tile = ScanTile<8, 32, 8, 1>;

// Whether inputs, outputs and states lie aligned for tiles with vectors.
template <class T>
inline bool scans_in_vectors(const SelectiveArgs& args) {
  constexpr int kVec = UsualTile::kVec, kStates = UsualTile::kStates;
  const auto aligned = [](const Stream& s) { return lie_aligned<T, kVec>(s.data, s.stride); };
  return args.states % kStates == 0 && args.layout.channels % kVec == 0 && aligned(args.x) &&
         aligned(args.dt) && aligned(args.z) && aligned(args.y) && aligned(args.B) &&
         aligned(args.C) &&
         (args.half_state ? lie_aligned<bf16, kStates>(args.state, args.slot_stride)
                          : lie_aligned<float, kStates>(args.state, args.slot_stride));
}

// Calls f with the tile for these arguments; every tile gives the same bits.
template <class T, class F>
inline void with_scan_tile(const SelectiveArgs& args, int multiprocessors, const F& f) {
  if (args.states > 64) return f(States256Tile{});
  if (args.states > 16) return f(States64Tile{});
  if (!scans_in_vectors<T>(args)) return f(AnyTile{});
  const Layout& lay = args.layout;
  const std::int64_t blocks = lay.sequences * divided_up(lay.channels, FewChainsTile::kChannels);
  if (blocks <= FewChainsTile::kBlocks * multiprocessors) return f(FewChainsTile{});
  if (blocks <= ThreeBlocksTile::kBlocks * multiprocessors) return f(ThreeBlocksTile{});
  f(UsualTile{});
}

}  // namespace cuda
}  // namespace minserve
