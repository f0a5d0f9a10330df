// The states before every chunk: a block goes through a sequence with a part of a unit's states in
// the accumulators of mma.sync,
//
//     S <- kept S + (left dt x)^T B
//
// and leaves S, rounded to bf16, to the blocks that form the outputs. Three chunks' x and B are in
// shared memory or on their way there.
#pragma once

#include "chunk.cuh"

namespace minserve {
namespace cuda {

// Warps take 16 rows by 32 states; a block all rows of a unit by kColumns of its kStates states.
template <int kStatesOfHead, int kColumnsOfBlock>
struct StatesTile {
  static constexpr int kStates = kStatesOfHead, kColumns = kColumnsOfBlock;
  static constexpr int kWarpColumns = 32, kRowWarps = kUnitRows / kTile;
  static constexpr int kThreads = kRowWarps * (kColumns / kWarpColumns) * kWarpLanes;
  static constexpr int kParts = kStates / kColumns;
  static constexpr int kStages = 3;
  using X = HalfTile<kUnitRows>;
  using B = HalfTile<kColumns>;
  struct Stage {
    uint4 x[kChunk * X::kVectors];
    uint4 b[kChunk * B::kVectors];
    float left[kChunk];
    float2 last;  // `steps` of the chunk's last token
  };
  static constexpr int kSharedBytes = kStages * static_cast<int>(sizeof(Stage));
};

template <class State, class Tile>
class UnitStates {
 public:
  __device__ __forceinline__ UnitStates(const SsdArgs& args, std::int64_t begin, std::int64_t end,
                                        std::int64_t first_chunk, int unit, int part)
      : args_(args),
        begin_(begin),
        length_(static_cast<int>(end - begin)),
        chunks_((length_ + kChunk - 1) / kChunk),
        first_chunk_(first_chunk),
        unit_(unit),
        head_(unit / units_of_head(args)),
        part_(part),
        to_(chunk_workspace(args)) {}

  __device__ __forceinline__ void run(typename Tile::Stage* stages, std::int64_t slot) {
    if (length_ == 1) return;
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) start(stages[i], i);
    State* const state = static_cast<State*>(args_.state) + slot * args_.slot_stride +
                         (static_cast<std::int64_t>(unit_) * kUnitRows + row()) * Tile::kStates +
                         column();
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
#pragma unroll
      for (int below = 0; below < 2; ++below) {
        Channels<State, 2> two;
        two.load(state + below * 8 * Tile::kStates + j * 8);
        s_[j][2 * below] = two[0], s_[j][2 * below + 1] = two[1];
      }
    }
    int stage = 0;
#pragma unroll 1
    for (int chunk = 0; chunk < chunks_; ++chunk) {
      wait_for_groups_but<kStages - 2>();
      __syncthreads();  // all copies of this chunk have landed, and nobody reads the one before
      start(stages[(stage + kStages - 1) % kStages], chunk + kStages - 1);
      if (count(chunk) > 1) {  // one token is a step, which reads the state row
        leave(chunk);
        advance(stages[stage], count(chunk));
      }
      stage = stage + 1 == kStages ? 0 : stage + 1;
    }
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
#pragma unroll
      for (int below = 0; below < 2; ++below) {
        Channels<State, 2> two;
        two.set({s_[j][2 * below], s_[j][2 * below + 1]});
        two.store(state + below * 8 * Tile::kStates + j * 8);
      }
    }
  }

 private:
  static constexpr int kStages = Tile::kStages, kTiles = Tile::kWarpColumns / 8;
  using X = typename Tile::X;
  using B = typename Tile::B;
  __device__ __forceinline__ static int lane() { return threadIdx.x % kWarpLanes; }
  __device__ __forceinline__ static int row_warp() {
    return threadIdx.x / kWarpLanes % Tile::kRowWarps;
  }
  __device__ __forceinline__ static int column_warp() {
    return threadIdx.x / kWarpLanes / Tile::kRowWarps;
  }
  // Of the lane's first number.
  __device__ __forceinline__ static int row() { return row_warp() * kTile + lane() / 4; }
  __device__ __forceinline__ int column() const {
    return part_ * Tile::kColumns + column_warp() * Tile::kWarpColumns + lane() % 4 * 2;
  }
  __device__ __forceinline__ int count(int chunk) const {
    return min(length_ - chunk * kChunk, kChunk);
  }

  // A group of copies, of nothing behind the last chunk.
  __device__ __forceinline__ void start(typename Tile::Stage& stage, int chunk) const {
    if (chunk < chunks_ && count(chunk) > 1) {
      const std::int64_t first = begin_ + static_cast<std::int64_t>(chunk) * kChunk;
      const auto at = [&](const Stream& stream, std::int64_t element) {
        return static_cast<const bf16*>(stream.data) + first * stream.stride + element;
      };
      const std::int64_t group = head_ / (args_.heads / args_.groups);
      X::template start<Tile::kThreads>(stage.x,
                                        at(args_.x, static_cast<std::int64_t>(unit_) * kUnitRows),
                                        args_.x.stride, count(chunk));
      B::template start<Tile::kThreads>(stage.b,
                                        at(args_.B, group * Tile::kStates + part_ * Tile::kColumns),
                                        args_.B.stride, count(chunk));
      const std::int64_t steps = ((first_chunk_ + chunk) * args_.heads + head_) * kChunk;
      if (threadIdx.x < kChunk / 4) {
        start_copy_of_16(stage.left + threadIdx.x * 4, to_.left + steps + threadIdx.x * 4);
      }
      if (threadIdx.x == 0) start_copy<8>(&stage.last, to_.steps + steps + kChunk - 1);
    }
    end_group_of_copies();
  }

  __device__ __forceinline__ void leave(int chunk) const {
    const std::int64_t units = args_.heads * units_of_head(args_);
    uint4* const to =
        to_.states + ((first_chunk_ + chunk) * units + unit_) * kUnitWords<Tile::kStates>;
    const int run = part_ * (Tile::kColumns / Tile::kWarpColumns) + column_warp();
#pragma unroll
    for (int below = 0; below < 2; ++below) {
      const auto two = [&](int j) {
        return rounded(s_[j][2 * below], s_[j][2 * below + 1], bf16{});
      };
      to[((row_warp() * 2 + below) * (Tile::kStates / Tile::kWarpColumns) + run) * kWarpLanes +
         lane()] = {two(0), two(1), two(2), two(3)};
    }
  }

  __device__ __forceinline__ void advance(const typename Tile::Stage& stage, int count) {
    const float kept = exp2_of(stage.last.x);
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s_[j][i] *= kept;
    }
    // What is multiplied next is loaded before what is multiplied now.
    Factors next = load(stage, 0);
#pragma unroll 2
    for (int token = 0; token < count; token += kTile) {
      const Factors now = next;
      if (token + kTile < count) next = load(stage, token + kTile);
      const auto weighed = [](unsigned pair, float2 by) {
        return rounded(low_of(pair) * by.x, high_of(pair) * by.y, bf16{});
      };
      const uint4 x = {weighed(now.x.x, now.left[0]), weighed(now.x.y, now.left[0]),
                       weighed(now.x.z, now.left[1]), weighed(now.x.w, now.left[1])};
#pragma unroll
      for (int j = 0; j < kTiles; j += 2) {
        mma_bf16(s_[j], x, now.b[j / 2].x, now.b[j / 2].y);
        mma_bf16(s_[j + 1], x, now.b[j / 2].z, now.b[j / 2].w);
      }
    }
  }

  // Of 16 tokens: x of the warp's rows, B of its states, and `left` of the lane's tokens.
  struct Factors {
    uint4 x, b[kTiles / 2];
    float2 left[2];
  };
  __device__ __forceinline__ static Factors load(const typename Tile::Stage& stage, int token) {
    Factors of;
    of.x = X::template load_transposed<false>(stage.x, token, row_warp() * kTile);
#pragma unroll
    for (int j = 0; j < kTiles / 2; ++j) {
      of.b[j] = B::template load_transposed<true>(stage.b, token,
                                                  column_warp() * Tile::kWarpColumns + j * kTile);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int own = token + 8 * half + lane() % 4 * 2;
      of.left[half] = *reinterpret_cast<const float2*>(stage.left + own);
    }
    return of;
  }

  const SsdArgs& args_;
  const std::int64_t begin_;
  const int length_, chunks_;
  const std::int64_t first_chunk_;
  const int unit_, head_, part_;
  const ChunkWorkspace to_;
  float s_[kTiles][4];
};

// Blocks are numbered by sequence, unit and part.
template <class State, class Tile>
__global__ void __launch_bounds__(Tile::kThreads)
    ssd_states_kernel(const __grid_constant__ SsdArgs args) {
  extern __shared__ uint4 memory[];
  const Layout& lay = args.layout;
  const unsigned units = static_cast<unsigned>(args.heads) * units_of_head(args);
  const int part = static_cast<int>(blockIdx.x % Tile::kParts);
  const int unit = static_cast<int>(blockIdx.x / Tile::kParts % units);
  const std::int64_t s = blockIdx.x / Tile::kParts / units;
  pdl_launch_dependents();
  wait_for_previous_kernel();
  const std::int64_t begin = lay.begin(s), end = lay.end(s), slot = lay.slot(s);
  if (begin >= end || slot < 0) return;
  UnitStates<State, Tile> states(args, begin, end, lay.first_chunk(s), unit, part);
  states.run(reinterpret_cast<typename Tile::Stage*>(memory), slot);
}

template <class Tile>
inline long long states_blocks(const SsdArgs& args) {
  return args.layout.sequences * (args.layout.channels / kUnitRows) * Tile::kParts;
}

// Calls f with the tile for these arguments; all give the same bits. Narrow ones give a GPU's
// multiprocessors enough blocks, wide ones read x less often.
template <int kStates, class F>
inline void with_states_tile(const SsdArgs& args, int multiprocessors, const F& f) {
  const long long units = args.layout.sequences * (args.layout.channels / kUnitRows);
  if (units * (kStates / 64) * 4 < multiprocessors * 3) return f(StatesTile<kStates, 32>{});
  f(StatesTile<kStates, 64>{});
}

}  // namespace cuda
}  // namespace minserve
