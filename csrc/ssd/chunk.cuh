// What the kernels of Mamba-2's chunks share: where a chunk lies, what they leave to each other,
// and tiles of bf16 in shared memory.
#pragma once

#include "../arch/mma.cuh"
#include "../core/vector_access.cuh"
#include "rows.cuh"

namespace minserve {
namespace cuda {

constexpr int kChunk = static_cast<int>(kScanChunk);  // tokens
constexpr int kUnitRows = 64;                         // of a head's state, which a block takes
constexpr int kTile = 16;                             // tokens, rows and states of one mma

// A head has head_dim / kUnitRows units, which share what belongs to the head.
__host__ __device__ __forceinline__ int units_of_head(const SsdArgs& args) {
  return static_cast<int>(args.head_dim) / kUnitRows;
}

// A chunk of a sequence, or a part of the padding tail. Chunks are numbered as Layout does.
struct ChunkPlace {
  std::int64_t begin, slot;
  int count;  // tokens; none: there is no such chunk

  __device__ __forceinline__ ChunkPlace(const Layout& lay, std::int64_t chunk) {
    const std::int64_t s = lay.sequence_of_chunk(chunk);
    begin = lay.begin(s) + (chunk - lay.first_chunk(s)) * kChunk;
    const std::int64_t left = lay.end(s) - begin;
    count = left < 0 ? 0 : left > kChunk ? kChunk : static_cast<int>(left);
    slot = lay.slot(s);
  }
};

// What kernels leave to each other, of every chunk:
//   steps   [heads, kChunk]: the sum of the logarithms (base 2) of what tokens up to this one leave
//           of the state before the chunk, and dt
//   left    [heads, kChunk]: dt times what the tokens behind this one leave of it
//   states  [units, kUnitRows / 8, N / 32, 32 lanes]: the state before the chunk, as mma.sync takes
//           it: 16 bytes of a lane are states 2 q, 2 q + 1, 8 + 2 q, ... of row lane / 4, q = lane
//           % 4
struct ChunkWorkspace {
  float2* steps;
  float* left;
  uint4* states;
};
template <int kStates>
constexpr int kUnitWords = kUnitRows * kStates / 8;  // uint4 of a unit's state

inline std::int64_t chunk_workspace_bytes(const SsdArgs& args) {
  const std::int64_t of_head = kChunk * 12, of_unit = kUnitRows * args.states * 2;
  return args.layout.chunk_bound() * args.heads * (of_head + of_unit * (args.head_dim / kUnitRows));
}
__device__ __forceinline__ ChunkWorkspace chunk_workspace(const SsdArgs& args) {
  const std::int64_t heads = args.layout.chunk_bound() * args.heads;
  uint4* const states = static_cast<uint4*>(args.workspace);
  float2* const steps =
      reinterpret_cast<float2*>(states + heads * units_of_head(args) * kUnitRows * args.states / 8);
  return {steps, reinterpret_cast<float*>(steps + heads * kChunk), states};
}

// A tile of bf16 in shared memory: rows of kColumns, 16 bytes of which change places with the row,
// so that neither eight rows of one column nor a row's columns meet in a bank.
template <int kColumns>
struct HalfTile {
  static constexpr int kVectors = kColumns / 8;  // of a row
  static_assert(kVectors == 4 || kVectors % 8 == 0);

  static __device__ __forceinline__ int place(int row, int vector) {
    return row * kVectors + (vector ^ (kVectors == 4 ? row / 2 % 4 : row % 8));
  }

  // Lets kThreadsOfBlock threads copy `count` rows, and zeros behind them up to a whole tile of
  // rows. `from` and its rows are aligned to 16 bytes.
  template <int kThreadsOfBlock>
  static __device__ __forceinline__ void start(uint4* tile, const bf16* from, std::int64_t stride,
                                               int count) {
    static_assert(kThreadsOfBlock % kVectors == 0);
    const int vector = threadIdx.x % kVectors;
    const int end = (count + kTile - 1) / kTile * kTile;
    for (int row = threadIdx.x / kVectors; row < end; row += kThreadsOfBlock / kVectors) {
      uint4* const to = tile + place(row, vector);
      if (row < count) {
        start_copy_of_16(to, from + row * stride + vector * 8);
      } else {
        *to = {0, 0, 0, 0};
      }
    }
  }

  // Four matrices of 8 rows by 8 columns around (row, column), both multiples of 8: beside each
  // other the second and the fourth are below the first and the third (kDown) or the other way
  // round. Transposed, a lane's pairs are neighbours of a column.
  template <bool kDown>
  static __device__ __forceinline__ uint4 load(const uint4* tile, int row, int column) {
    return load_matrices(tile + lane_place<kDown>(row, column));
  }
  template <bool kDown>
  static __device__ __forceinline__ uint4 load_transposed(const uint4* tile, int row, int column) {
    return load_transposed_matrices(tile + lane_place<kDown>(row, column));
  }

  // Two neighbours.
  static __device__ __forceinline__ unsigned pair(const uint4* tile, int row, int column) {
    return reinterpret_cast<const unsigned*>(tile + place(row, column / 8))[column % 8 / 2];
  }

 private:
  template <bool kDown>
  static __device__ __forceinline__ int lane_place(int row, int column) {
    const int lane = threadIdx.x % kWarpLanes, first = lane / 8 % 2, second = lane / 16;
    return place(row + lane % 8 + 8 * (kDown ? first : second),
                 column / 8 + (kDown ? second : first));
  }
};

__device__ __forceinline__ float low_of(unsigned pair) {
  return __uint_as_float(pair << 16);
}
__device__ __forceinline__ float high_of(unsigned pair) {
  return __uint_as_float(pair & 0xffff0000u);
}

// Logarithms below leave nothing of an fp32 number; sums of more of them would lose digits of the
// others.
constexpr float kLeastLog = -160.0f;

// Of every chunk and head what its tokens leave of the state. A warp takes a head, a lane four
// neighbouring tokens; the order of every sum depends on the place in the chunk alone.
constexpr int kDecayHeads = 8;
static __global__ void __launch_bounds__(kDecayHeads* kWarpLanes)
    ssd_decays_kernel(const __grid_constant__ SsdArgs args) {
  constexpr int kTokens = kChunk / kWarpLanes;
  const Layout& lay = args.layout;
  const unsigned columns = static_cast<unsigned>(divided_up(args.heads, kDecayHeads));
  const std::int64_t chunk = blockIdx.x / columns;
  const int head = static_cast<int>(blockIdx.x % columns * kDecayHeads + threadIdx.x / kWarpLanes);
  const int lane = threadIdx.x % kWarpLanes;
  pdl_launch_dependents();
  wait_for_previous_kernel();
  const ChunkPlace place(lay, chunk);
  if (head >= args.heads || place.count < 2 || place.slot < 0) return;  // one token is a step

  const float rate = args.A[head], bias = head_number(args.dt_bias, head, bf16{});
  const bf16* const dt = static_cast<const bf16*>(args.dt.data) + head;
  float delta[kTokens], up_to[kTokens], behind[kTokens];
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
    const int token = lane * kTokens + i;
    const bool real = token < place.count;
    const float raw = real ? to_lane(dt[(place.begin + token) * args.dt.stride]) : 0.0f;
    delta[i] = real ? time_step(args, raw, bias) : 0.0f;
    up_to[i] = behind[i] = real ? maximum(decay_of(delta[i]) * rate, kLeastLog) : 0.0f;
  }
#pragma unroll
  for (int i = 1; i < kTokens; ++i) {
    up_to[i] += up_to[i - 1];
    behind[kTokens - 1 - i] += behind[kTokens - i];
  }
  float before = up_to[kTokens - 1], after = behind[0];  // with the own ones
#pragma unroll
  for (int distance = 1; distance < kWarpLanes; distance *= 2) {
    const float lower = __shfl_up_sync(kWholeWarp, before, distance);
    const float upper = __shfl_down_sync(kWholeWarp, after, distance);
    if (lane >= distance) before += lower;
    if (lane + distance < kWarpLanes) after += upper;
  }
  before = __shfl_up_sync(kWholeWarp, before, 1);
  after = __shfl_down_sync(kWholeWarp, after, 1);
  if (lane == 0) before = 0.0f;
  if (lane == kWarpLanes - 1) after = 0.0f;
  const ChunkWorkspace to = chunk_workspace(args);
  const std::int64_t at = (chunk * args.heads + head) * kChunk + lane * kTokens;
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
    to.steps[at + i] = {before + up_to[i], delta[i]};
    const float sum = i + 1 < kTokens ? behind[i + 1 < kTokens ? i + 1 : i] + after : after;
    to.left[at + i] = delta[i] * exp2_of(sum);
  }
}

}  // namespace cuda
}  // namespace minserve
