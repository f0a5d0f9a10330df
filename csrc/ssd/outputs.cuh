// The outputs of a chunk, given the state before it:
//
//     y_t = kept_t C_t S + sum over s <= t of (C_t B_s) left_ts dt_s x_s + D x_t
//
// A block takes a chunk and some units of one group. C B^T is formed once for them and stays in
// registers; x and S of the next unit are on their way while one is computed. A warp has the tiles
// of 16 tokens with numbers w and 7 - w, so that all warps have nine tiles on or under the
// diagonal.
#pragma once

#include "chunk.cuh"

namespace minserve {
namespace cuda {

constexpr int kOutputThreads = 128, kOutputWarps = kOutputThreads / kWarpLanes;
constexpr int kTokenTiles = kChunk / kTile;
static_assert(kTokenTiles == 2 * kOutputWarps);

template <int kStates>
struct OutputMemory {
  using Choice = HalfTile<kStates>;
  using X = HalfTile<kUnitRows>;
  struct Unit {
    uint4 x[kChunk * X::kVectors];
    uint4 state[kUnitWords<kStates>];
    float2 steps[kChunk];
  };
  uint4 c[kChunk * Choice::kVectors];
  union {
    uint4 b[kChunk * Choice::kVectors];
    Unit odd;  // units take turns; the first of these comes when B has been read
  };
  Unit even;
  uint4 y[kOutputWarps][kTile * X::kVectors];  // of a warp's tile
};

template <int kStates>
class ChunkOutputs {
 public:
  using Memory = OutputMemory<kStates>;

  // chunk: its number; group: of B and C.
  __device__ __forceinline__ ChunkOutputs(const SsdArgs& args, const ChunkPlace& place,
                                          std::int64_t chunk, int group)
      : args_(args), place_(place), chunk_(chunk), group_(group), from_(chunk_workspace(args)) {}

  __device__ __forceinline__ void run(Memory& memory, int first, int last) {
    start_choice(memory.b, args_.B);
    start_choice(memory.c, args_.C);
    end_group_of_copies();
    start(memory.even, first);
    end_group_of_copies();
    wait_for_groups_but<1>();
    __syncthreads();
    multiply(memory);
    wait_for_copies();
    __syncthreads();
    for (int unit = first; unit < last; ++unit) {
      const bool odd = (unit - first) % 2;
      if (unit + 1 < last) start(odd ? memory.even : memory.odd, unit + 1);
      compute(odd ? memory.odd : memory.even, memory, unit);
      wait_for_copies();
      __syncthreads();
    }
  }

 private:
  static constexpr int kPairs = kUnitRows / kTile;  // of tiles of eight rows
  using Choice = typename Memory::Choice;
  using X = typename Memory::X;
  using Unit = typename Memory::Unit;

  __device__ __forceinline__ static int lane() { return threadIdx.x % kWarpLanes; }
  __device__ __forceinline__ static int warp() { return threadIdx.x / kWarpLanes; }
  // Of the warp's tile 0 or 1.
  __device__ __forceinline__ static int tile(int i) {
    return i == 0 ? warp() : kTokenTiles - 1 - warp();
  }
  __device__ __forceinline__ bool has(int i) const { return tile(i) * kTile < place_.count; }

  __device__ __forceinline__ void start_choice(uint4* to, const Stream& stream) const {
    Choice::template start<kOutputThreads>(
        to, static_cast<const bf16*>(stream.data) + place_.begin * stream.stride + group_ * kStates,
        stream.stride, place_.count);
  }
  __device__ __forceinline__ void start(Unit& to, int unit) const {
    X::template start<kOutputThreads>(to.x,
                                      static_cast<const bf16*>(args_.x.data) +
                                          place_.begin * args_.x.stride +
                                          static_cast<std::int64_t>(unit) * kUnitRows,
                                      args_.x.stride, place_.count);
    const int of_head = units_of_head(args_);
    const uint4* const state =
        from_.states + (chunk_ * args_.heads * of_head + unit) * kUnitWords<kStates>;
    for (int i = threadIdx.x; i < kUnitWords<kStates>; i += kOutputThreads) {
      start_copy_of_16(to.state + i, state + i);
    }
    const float2* const steps = from_.steps + (chunk_ * args_.heads + unit / of_head) * kChunk;
    for (int i = 2 * threadIdx.x; i < kChunk; i += 2 * kOutputThreads) {
      start_copy_of_16(to.steps + i, steps + i);
    }
  }

  // C B^T on and under the diagonal.
  __device__ __forceinline__ void multiply(const Memory& memory) {
#pragma unroll
    for (int j = 0; j < kTokenTiles; ++j) {
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        if (j < kOutputWarps) early_[j][n / 4][n % 4] = 0.0f;
        late_[j][n / 4][n % 4] = 0.0f;
      }
    }
    if (!has(0)) return;
#pragma unroll 1
    for (int n = 0; n < kStates; n += kTile) {
      const uint4 early = Choice::template load<true>(memory.c, tile(0) * kTile, n);
      uint4 late = {0, 0, 0, 0};
      if (has(1)) late = Choice::template load<true>(memory.c, tile(1) * kTile, n);
#pragma unroll
      for (int j = 0; j < kTokenTiles; ++j) {
        if (j > (has(1) ? tile(1) : tile(0))) break;
        const uint4 b = Choice::template load<false>(memory.b, j * kTile, n);
        if (j < kOutputWarps && j <= tile(0)) {
          mma_bf16(early_[j % kOutputWarps][0], early, b.x, b.y);
          mma_bf16(early_[j % kOutputWarps][1], early, b.z, b.w);
        }
        if (has(1)) {
          mma_bf16(late_[j][0], late, b.x, b.y);
          mma_bf16(late_[j][1], late, b.z, b.w);
        }
      }
    }
  }

  __device__ __forceinline__ void compute(const Unit& from, Memory& memory, int unit) const {
    if (!has(0)) return;
    if (has(1)) return compute_tiles<2>(from, memory, unit);
    compute_tiles<1>(from, memory, unit);
  }

  template <int kTiles>
  __device__ __forceinline__ void compute_tiles(const Unit& from, Memory& memory, int unit) const {
    float y[kTiles][2 * kPairs][4] = {};
#pragma unroll 1
    for (int run = 0; run < kStates / 32; ++run) {
      uint4 c[kTiles][2];
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        c[i][0] = Choice::template load<true>(memory.c, tile(i) * kTile, run * 32);
        c[i][1] = Choice::template load<true>(memory.c, tile(i) * kTile, run * 32 + kTile);
      }
#pragma unroll
      for (int p = 0; p < 2 * kPairs; ++p) {
        const uint4 s = from.state[(p * (kStates / 32) + run) * kWarpLanes + lane()];
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
          mma_bf16(y[i][p], c[i][0], s.x, s.y);
          mma_bf16(y[i][p], c[i][1], s.z, s.w);
        }
      }
    }
    float since[kTiles][2];  // sums of logarithms up to the lane's tokens
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
      for (int below = 0; below < 2; ++below) {
        since[i][below] = from.steps[token(i, below)].x;
        const float kept = exp2_of(since[i][below]);
#pragma unroll
        for (int p = 0; p < 2 * kPairs; ++p) {
          y[i][p][2 * below] *= kept, y[i][p][2 * below + 1] *= kept;
        }
      }
    }
#pragma unroll
    for (int j = 0; j < (kTiles == 2 ? kTokenTiles : kOutputWarps); ++j) {
      if (j > tile(kTiles - 1)) break;
      uint4 x[kPairs];
#pragma unroll
      for (int p = 0; p < kPairs; ++p) {
        x[p] = X::template load_transposed<true>(from.x, j * kTile, p * kTile);
      }
      const float4 low = *reinterpret_cast<const float4*>(from.steps + source(j));
      const float4 high = *reinterpret_cast<const float4*>(from.steps + source(j) + 8);
      if (j < kOutputWarps && j <= tile(0)) {
        add(y[0], early_[j % kOutputWarps], since[0], low, high, j == tile(0), x);
      }
      if (kTiles == 2) {
        add(y[kTiles - 1], late_[j], since[kTiles - 1], low, high, j == tile(1), x);
      }
    }
    const int head = unit / units_of_head(args_);
    const float skip = head_number(args_.D, head, bf16{});
#pragma unroll
    for (int i = 0; i < kTiles; ++i) write(y[i], skip, i, from, memory.y[warp()], unit);
  }

  // The token of the lane's rows of tile i; the first of its columns of tile j.
  __device__ __forceinline__ static int token(int i, int below) {
    return tile(i) * kTile + lane() / 4 + 8 * below;
  }
  __device__ __forceinline__ static int source(int j) { return j * kTile + lane() % 4 * 2; }

  // y += (C B^T left dt) x for one tile of each, low and high being (logarithm, dt) of two tokens.
  __device__ __forceinline__ static void add(float (&y)[2 * kPairs][4],
                                             const float (&products)[2][4], const float (&since)[2],
                                             const float4& low, const float4& high, bool diagonal,
                                             const uint4 (&x)[kPairs]) {
    const auto weighed = [&](int side, int below) {
      const float4& of = side ? high : low;
      float first = exp2_of(since[below] - of.x) * of.y * products[side][2 * below];
      float second = exp2_of(since[below] - of.z) * of.w * products[side][2 * below + 1];
      if (diagonal) {  // nothing comes from later tokens, not even what is not a number
        const int by = lane() / 4 + 8 * below - (lane() % 4 * 2 + 8 * side);
        if (by < 0) first = 0.0f;
        if (by < 1) second = 0.0f;
      }
      return rounded(first, second, bf16{});
    };
    const uint4 weights = {weighed(0, 0), weighed(0, 1), weighed(1, 0), weighed(1, 1)};
#pragma unroll
    for (int p = 0; p < kPairs; ++p) {
      mma_bf16(y[2 * p], weights, x[p].x, x[p].y);
      mma_bf16(y[2 * p + 1], weights, x[p].z, x[p].w);
    }
  }

  // y + D x to memory, whole rows at a time.
  __device__ __forceinline__ void write(const float (&y)[2 * kPairs][4], float skip, int i,
                                        const Unit& from, uint4* rows, int unit) const {
    __syncwarp();  // the tile before has been read
#pragma unroll
    for (int p = 0; p < 2 * kPairs; ++p) {
#pragma unroll
      for (int below = 0; below < 2; ++below) {
        const int row = lane() / 4 + 8 * below, column = p * 8 + lane() % 4 * 2;
        const unsigned x = X::pair(from.x, tile(i) * kTile + row, column);
        reinterpret_cast<unsigned*>(rows + X::place(row, p))[lane() % 4] =
            rounded(fmadd(skip, low_of(x), y[p][2 * below]),
                    fmadd(skip, high_of(x), y[p][2 * below + 1]), bf16{});
      }
    }
    __syncwarp();
    bf16* const to = static_cast<bf16*>(args_.y.data) +
                     (place_.begin + tile(i) * kTile) * args_.y.stride +
                     static_cast<std::int64_t>(unit) * kUnitRows;
#pragma unroll
    for (int r = 0; r < kTile; r += kWarpLanes / X::kVectors) {
      const int row = r + lane() / X::kVectors, vector = lane() % X::kVectors;
      if (tile(i) * kTile + row >= place_.count) continue;
      *reinterpret_cast<uint4*>(to + row * args_.y.stride + vector * 8) =
          rows[X::place(row, vector)];
    }
  }

  const SsdArgs& args_;
  const ChunkPlace& place_;
  const std::int64_t chunk_;
  const int group_;
  const ChunkWorkspace from_;
  float early_[kOutputWarps][2][4], late_[kTokenTiles][2][4];  // C B^T of the warp's tiles
};

// A chunk of one token is a step.
template <class State, int kStates>
__device__ __forceinline__ void step_units(const SsdArgs& args, const ChunkPlace& place, int first,
                                           int last) {
  using Share = WholeShare<State, kStates, 8>;
  constexpr int kRuns = (kUnitRows + Share::kWarpRows - 1) / Share::kWarpRows;
  const int of_head = units_of_head(args);
  for (int run = first * kRuns + threadIdx.x / kWarpLanes; run < last * kRuns;
       run += kOutputWarps) {
    const int unit = run / kRuns;
    HeadRows<bf16, State, Share> rows(args, unit / of_head,
                                      unit % of_head * kUnitRows + run % kRuns * Share::kWarpRows);
    const auto in = rows.read(place.begin);
    rows.load(place.slot);
    const float y = rows.advance(in);
    rows.store(place.slot);
    rows.write(place.begin, y);
  }
}

// Blocks are numbered by chunk, group, and runs of up to `most` units of it.
template <class State, int kStates>
__global__ void __launch_bounds__(kOutputThreads, 2)
    ssd_outputs_kernel(const __grid_constant__ SsdArgs args, const int most) {
  extern __shared__ uint4 memory[];
  const unsigned of_group = static_cast<unsigned>(args.heads / args.groups) * units_of_head(args);
  const unsigned runs = (of_group + most - 1) / most;
  const unsigned groups = static_cast<unsigned>(args.groups);
  const int run = static_cast<int>(blockIdx.x % runs);
  const int group = static_cast<int>(blockIdx.x / runs % groups);
  const std::int64_t chunk = blockIdx.x / runs / groups;
  pdl_launch_dependents();
  wait_for_previous_kernel();
  const ChunkPlace place(args.layout, chunk);
  if (place.count == 0) return;
  const int first = group * static_cast<int>(of_group) + run * most;
  const int last = min(first + most, (group + 1) * static_cast<int>(of_group));
  if (place.slot < 0) {
    const int vectors = (last - first) * (kUnitRows / 8);
    for (int i = threadIdx.x; i < place.count * vectors; i += kOutputThreads) {
      bf16* const to = static_cast<bf16*>(args.y.data) +
                       (place.begin + i / vectors) * args.y.stride + first * kUnitRows;
      reinterpret_cast<uint4*>(to)[i % vectors] = {0, 0, 0, 0};
    }
    return;
  }
  if (place.count == 1) return step_units<State, kStates>(args, place, first, last);
  ChunkOutputs<kStates> outputs(args, place, chunk, group);
  outputs.run(*reinterpret_cast<OutputMemory<kStates>*>(memory), first, last);
}

// Units of a block: as many as leave `multiprocessors` enough blocks.
constexpr int kMostUnits = 8;
inline int units_of_block(const SsdArgs& args, int multiprocessors) {
  const long long chunks = divided_up(args.layout.tokens, kChunk);
  const long long of_group = args.layout.channels / kUnitRows / args.groups;
  int units = 1;
  while (units < kMostUnits && 2 * units <= of_group &&
         chunks * args.groups * divided_up(of_group, 2 * units) >= 4 * multiprocessors) {
    units *= 2;
  }
  return units;
}
inline long long outputs_blocks(const SsdArgs& args, int units) {
  const long long of_group = args.layout.channels / kUnitRows / args.groups;
  return args.layout.chunk_bound() * args.groups * divided_up(of_group, units);
}

// Whether chunk kernels take these arguments.
inline bool reads_in_chunks(const SsdArgs& args) {
  const auto aligned = [](const Stream& s) { return lie_aligned<bf16, 8>(s.data, s.stride); };
  return args.head_dim % kUnitRows == 0 && (args.states == 64 || args.states == 128) &&
         aligned(args.x) && aligned(args.B) && aligned(args.C) && aligned(args.y) &&
         (args.half_state ? lie_aligned<bf16, 8>(args.state, args.slot_stride)
                          : lie_aligned<float, 4>(args.state, args.slot_stride));
}

}  // namespace cuda
}  // namespace minserve
