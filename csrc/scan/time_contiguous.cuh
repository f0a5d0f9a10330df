// linear_scan on CUDA where time is contiguous: one row of memory for each sequence and channel.
//
// A tile is one row by kTile positions, counted in scan order. Blocks stay and take tiles in ticket
// order, the next one's inputs streaming into shared memory while the current one is computed. A
// warp reads kPacks segments of 32 lanes x 16 bytes; a thread folds each of its vectors, a warp
// combines them by shuffles, the block its warps through shared memory, all in one fixed order. The
// carry into a tile comes from the word of the tile before it in the row (scan/lookback.cuh), and
// the carry out is A * h + B with the tile's aggregate (A, B), so a row's bits depend on nothing
// but the row. Tickets run over many rows before they come back to the next tile of the first: by
// then its carry is there, and only few long rows are looked back through.
#pragma once

#include "../core/vec16.cuh"
#include "../cells/gates.h"
#include "time_contiguous_tiles.cuh"

namespace minserve {
namespace cuda {

constexpr int kPacks = 4;  // 16-byte vectors of each input that a thread takes of a tile

// A vector's elements in the other order; the last parameter names their type.
__device__ __forceinline__ uint4 mirrored(const uint4& x, float) {
  return {x.w, x.z, x.y, x.x};
}
__device__ __forceinline__ uint4 mirrored(const uint4& x, double) {
  return {x.z, x.w, x.x, x.y};
}
__device__ __forceinline__ unsigned swapped_halves(unsigned x) {
  return __byte_perm(x, 0, 0x1032);
}
__device__ __forceinline__ uint4 mirrored(const uint4& x, bf16) {
  return {swapped_halves(x.w), swapped_halves(x.z), swapped_halves(x.y), swapped_halves(x.x)};
}
__device__ __forceinline__ uint4 mirrored(const uint4& x, f16) {
  return mirrored(x, bf16{});
}

// One element into shared memory: without waiting where there is such a copy.
template <class T>
__device__ __forceinline__ void copy_element(T* shared, const T* global) {
  if constexpr (sizeof(T) >= 4) {
    start_copy<static_cast<int>(sizeof(T))>(shared, global);
  } else {
    *shared = *global;
  }
}

// kWarps: of a block. The cell's first two inputs make (a, b); a backward cell's third is the state
// before, which is read as the state itself and moved by one position.
template <template <class> class CellOf, class T, int kWarps>
struct RowScan {
  using V = typename ComputeType<T>::type;
  using Cell = CellOf<V>;
  static constexpr int kVec = 16 / static_cast<int>(sizeof(T));
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kSegment = 32 * kVec;
  static constexpr int kWarpTile = kPacks * kSegment;
  static constexpr int kTile = kWarps * kWarpTile;
  static constexpr bool kShifted = Cell::kPrevious >= 0;
  static_assert(!kShifted || Cell::kPrevious == 2, "the state comes after a and b");
  // Warps for which a multiprocessor has registers (72 a thread, 80 where kShifted; doubles need
  // more) and, on recent ones, shared memory: over 100 KiB in flight.
  static constexpr int kWarpsAtOnce = sizeof(V) == 8 ? (kShifted ? 16 : 20) : (kShifted ? 24 : 28);
  static constexpr int kMinBlocks = kWarpsAtOnce / kWarps;

  struct Shared {
    uint4 stage[2][kPacks][kThreads];  // a and b: into registers at once, then free for the next
    // The state, needed last: of two iterations. Every warp has also the vector behind its own.
    uint4 state[kShifted ? 2 : 1][kShifted ? kPacks : 1][kShifted ? kThreads : 1];
    uint4 behind[2][kWarps];
    V a[2][kWarps], b[2][kWarps];  // aggregates of the warps, by the parity of the iteration
    V carry;                       // into the tile
    RowTile first, coming;
  };

  // Where a tile lies.
  struct RowSpan {
    std::int64_t offset;  // of the vector at position 0, in elements
    int count;            // positions to the row's end, at most 2^30
    __device__ __forceinline__ RowSpan(const ScanArgs& args, const RowTile& tile) {
      const std::int64_t time = args.layout.time, start = std::int64_t{tile.index} * kTile;
      offset = tile.row * time + (args.layout.reverse ? time - kVec - start : start);
      count = static_cast<int>(min(time - start, std::int64_t{1} << 30));
    }
    // In reverse a vector's first position is its last element.
    __device__ __forceinline__ std::int64_t at(const ScanArgs& args, int position) const {
      return args.layout.reverse ? offset - position : offset + position;
    }
  };

  static __device__ __forceinline__ int position_of(int k) {
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    return warp * kWarpTile + k * kSegment + lane * kVec;
  }
  static __device__ __forceinline__ uint4 ordered(const ScanArgs& args, const uint4& bits) {
    return args.layout.reverse ? mirrored(bits, T{}) : bits;
  }

  static __device__ __forceinline__ uint4* slot(Shared& shared, int n, int k, int parity) {
    return n < 2 ? &shared.stage[n][k][threadIdx.x] : &shared.state[parity][k][threadIdx.x];
  }
  static __device__ __forceinline__ const T* input(const ScanArgs& args, int n) {
    return static_cast<const T*>(args.inputs[n].data);
  }
  // Positions past the end get a = 1, b = 0: they change nothing, not even bits.
  static __device__ __forceinline__ V past_end(int n) { return n == 0 ? V(1) : V(0); }

  static __device__ __forceinline__ void fetch(const ScanArgs& args, const RowTile& tile,
                                               Shared& shared, int parity) {
    const RowSpan span(args, tile);
    if (!args.aligned) return fetch_elements(args, span, shared, parity);
    const auto vector = [&](int n, uint4* to, int position) {
      if (position < span.count) {
        start_copy_of_16(to, input(args, n) + span.at(args, position));
      } else {
        V fill[kVec];
#pragma unroll
        for (int i = 0; i < kVec; ++i) fill[i] = past_end(n);
        *to = pack(fill, T{});
      }
    };
#pragma unroll
    for (int n = 0; n < Cell::kInputs; ++n) {
#pragma unroll
      for (int k = 0; k < kPacks; ++k) vector(n, slot(shared, n, k, parity), position_of(k));
    }
    if (kShifted && threadIdx.x % 32 == 0) {
      vector(2, &shared.behind[parity][threadIdx.x / 32], position_of(kPacks));
    }
  }

  // The same for tensors that are not aligned to 16 bytes, or whose rows are not.
  static __device__ __forceinline__ void fetch_elements(const ScanArgs& args, const RowSpan& span,
                                                        Shared& shared, int parity) {
    const auto vector = [&](int n, uint4* to, int position) {
      const T* from = input(args, n) + span.at(args, position);
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        T* const each = reinterpret_cast<T*>(to) + i;
        if (position + (args.layout.reverse ? kVec - 1 - i : i) < span.count) {
          copy_element(each, from + i);
        } else {
          from_lane(each, past_end(n));
        }
      }
    };
#pragma unroll 1
    for (int n = 0; n < Cell::kInputs; ++n) {
#pragma unroll 1
      for (int k = 0; k < kPacks; ++k) vector(n, slot(shared, n, k, parity), position_of(k));
    }
    if (kShifted && threadIdx.x % 32 == 0) {
      vector(2, &shared.behind[parity][threadIdx.x / 32], position_of(kPacks));
    }
  }

  static __device__ __forceinline__ void unpack_inputs(const uint4 (&held)[2],
                                                       V (&in)[Cell::kInputs][kVec]) {
    unpack(held[0], in[0], T{});
    unpack(held[1], in[1], T{});
  }
  static __device__ __forceinline__ void element(const V (&in)[Cell::kInputs][kVec], int i,
                                                 V (&one)[Cell::kInputs]) {
#pragma unroll
    for (int n = 0; n < Cell::kInputs; ++n) one[n] = in[n][i];
  }

  // From the thread's vectors to their inclusive aggregates in their segments.
  static __device__ __forceinline__ void fold(const uint4 (&held)[kPacks][2], V (&a)[kPacks],
                                              V (&b)[kPacks]) {
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      V in[Cell::kInputs][kVec] = {};
      unpack_inputs(held[k], in);
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        V one[Cell::kInputs];
        element(in, i, one);
        const Affine<V> step = Cell::coefficients(UsualOptions{}, one);
        b[k] = i == 0 ? step.b : fmadd(step.a, b[k], step.b);
        a[k] = i == 0 ? step.a : step.a * a[k];
      }
    }
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
#pragma unroll
      for (int k = 0; k < kPacks; ++k) {
        const V before_a = __shfl_up_sync(0xffffffffu, a[k], distance);
        const V before_b = __shfl_up_sync(0xffffffffu, b[k], distance);
        if (lane >= distance) {
          b[k] = fmadd(a[k], before_b, b[k]);
          a[k] = a[k] * before_a;
        }
      }
    }
  }

  // The first warp's: the carry into the tile, and what later tiles of the row want to know.
  static __device__ __forceinline__ void pass_on(const ScanArgs& args, const RowTiles& tiles,
                                                 const RowTile& tile, const LookbackWord<V>& seen,
                                                 Shared& shared, int parity) {
    // One lane has looked: others could have seen another kind of word, and gone another way.
    LookbackWord<V> nearest;
    nearest.kind = __shfl_sync(0xffffffffu, seen.kind, 0);
    nearest.b = __shfl_sync(0xffffffffu, seen.b, 0);
    const bool writes = threadIdx.x == 0, last = tile.index + 1 == tiles.per_row;
    char* const own = static_cast<char*>(args.workspace) +
                      (static_cast<std::int64_t>(tile.row) * (tiles.per_row - 1) + tile.index) *
                          static_cast<std::int64_t>(sizeof(LookbackWord<V>));
    V a = shared.a[parity][0], b = shared.b[parity][0];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) {
      b = fmadd(shared.a[parity][w], b, shared.b[parity][w]);
      a = shared.a[parity][w] * a;
    }
    V h = nearest.b;
    if (tile.index == 0) {
      const V* initial = static_cast<const V*>(args.initial);
      h = initial ? initial[tile.row] : V(0);
    } else if (!nearest.is_carry()) {
      if (writes && !last) LookbackWord<V>::aggregate(a, b).store(own);
      h = look_back_in_row<V>(own, tile.index);
    }
    if (!writes) return;
    shared.carry = h;
    const V next = fmadd(a, h, b);
    if (!last) {
      LookbackWord<V>::carry(next).store(own);
    } else if (args.last) {
      static_cast<V*>(args.last)[tile.row] = next;
    }
  }

  // The state one position further on, in scan order; at the row's end it is h0.
  static __device__ __forceinline__ void shifted_state(const ScanArgs& args, const RowTile& tile,
                                                       const Shared& shared, int parity, int k,
                                                       int left, V (&out)[kVec]) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    V own[kVec], next[kVec];
    unpack(ordered(args, shared.state[parity][k][threadIdx.x]), own, T{});
    // Only the first lane looks at the vector behind the segment, for the last one.
    unpack(ordered(args, k + 1 < kPacks ? shared.state[parity][k + 1][threadIdx.x / 32 * 32]
                                        : shared.behind[parity][threadIdx.x / 32]),
           next, T{});
#pragma unroll
    for (int i = 0; i + 1 < kVec; ++i) out[i] = own[i + 1];
    out[kVec - 1] = __shfl_sync(0xffffffffu, lane == 0 ? next[0] : own[0], (lane + 1) % 32);
    if (left > kVec || left <= 0) return;
    const V* h0 = static_cast<const V*>(args.h0);
    const V first = h0 ? h0[tile.row] : V(0);
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      if (i + 1 == left) out[i] = first;
    }
  }

  // The outputs of vector k from the state before it.
  static __device__ __forceinline__ void write(const ScanArgs& args, const RowTile& tile,
                                               const uint4 (&held)[2], const Shared& shared,
                                               int parity, int k, V h) {
    const RowSpan span(args, tile);
    const int position = position_of(k), left = span.count - position;
    V in[Cell::kInputs][kVec], out[Cell::kOutputs][kVec];
    unpack_inputs(held, in);
    if constexpr (kShifted) shifted_state(args, tile, shared, parity, k, left, in[2]);
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      V one[Cell::kInputs], result[Cell::kOutputs];
      element(in, i, one);
      const Affine<V> step = Cell::coefficients(UsualOptions{}, one);
      const V before = h;
      h = fmadd(step.a, h, step.b);
      Cell::outputs(UsualOptions{}, one, before, h, result);
#pragma unroll
      for (int n = 0; n < Cell::kOutputs; ++n) out[n][i] = result[n];
    }
    if (left <= 0) return;
#pragma unroll
    for (int n = 0; n < Cell::kOutputs; ++n) {
      T* const to = static_cast<T*>(args.outputs[n].data) + span.at(args, position);
      if (args.aligned) {
        *reinterpret_cast<uint4*>(to) = ordered(args, pack(out[n], T{}));
      } else {
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
          if (i < left) from_lane(to + (args.layout.reverse ? kVec - 1 - i : i), out[n][i]);
        }
      }
    }
  }

  static __device__ __forceinline__ void run(const ScanArgs& args, const RowTiles& tiles,
                                             Shared& shared) {
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    if (threadIdx.x == 0) shared.first = tile_of(tiles, take_ticket(tiles, 0));
    __syncthreads();
    RowTile tile = shared.first;
    if (tile.row == RowTile::kNone) return;
    fetch(args, tile, shared, 0);
    for (unsigned iteration = 0;; ++iteration) {
      const int parity = static_cast<int>(iteration % 2);
      // Asked for now, looked at when the inputs have been folded. The second tile is taken only
      // when the first has arrived, or blocks that start later would find their predecessors queued
      // behind other work.
      unsigned ticket = 0;
      LookbackWord<V> nearest;
      if (iteration > 0 && threadIdx.x == 0) ticket = take_ticket(tiles, iteration + 1);
      if (threadIdx.x == 0 && tile.index > 0) {
        nearest = LookbackWord<V>::load(
            static_cast<const char*>(args.workspace) +
            (static_cast<std::int64_t>(tile.row) * (tiles.per_row - 1) + tile.index - 1) *
                static_cast<std::int64_t>(sizeof(LookbackWord<V>)));
      }
      wait_for_copies();
      if (iteration == 0 && threadIdx.x == 0) ticket = take_ticket(tiles, 1);
      uint4 held[kPacks][2];
#pragma unroll
      for (int k = 0; k < kPacks; ++k) {
        held[k][0] = ordered(args, shared.stage[0][k][threadIdx.x]);
        held[k][1] = ordered(args, shared.stage[1][k][threadIdx.x]);
      }
      V a[kPacks], b[kPacks];
      fold(held, a, b);
      if (lane == 31) {
        V all_a = a[0], all_b = b[0];
#pragma unroll
        for (int k = 1; k < kPacks; ++k) {
          all_b = fmadd(a[k], all_b, b[k]);
          all_a = a[k] * all_a;
        }
        shared.a[parity][warp] = all_a;
        shared.b[parity][warp] = all_b;
      }
      if (threadIdx.x == 0) shared.coming = tile_of(tiles, ticket);
      __syncthreads();
      const RowTile coming = shared.coming;
      if (coming.row != RowTile::kNone) fetch(args, coming, shared, 1 - parity);
      if (warp == 0) pass_on(args, tiles, tile, nearest, shared, parity);
      __syncthreads();
      V h = shared.carry;
#pragma unroll
      for (int w = 0; w < kWarps - 1; ++w) {
        if (w < warp) h = fmadd(shared.a[parity][w], h, shared.b[parity][w]);
      }
#pragma unroll
      for (int k = 0; k < kPacks; ++k) {
        const V left_a = __shfl_up_sync(0xffffffffu, a[k], 1);
        const V left_b = __shfl_up_sync(0xffffffffu, b[k], 1);
        forget_derived(held[k][0]);
        forget_derived(held[k][1]);
        write(args, tile, held[k], shared, parity, k, lane == 0 ? h : fmadd(left_a, h, left_b));
        const V all_a = __shfl_sync(0xffffffffu, a[k], 31);
        const V all_b = __shfl_sync(0xffffffffu, b[k], 31);
        h = fmadd(all_a, h, all_b);
      }
      if (coming.row == RowTile::kNone) return;
      tile = coming;
    }
  }
};

template <template <class> class CellOf, class T, int kWarps>
__global__ void __launch_bounds__(32 * kWarps, (RowScan<CellOf, T, kWarps>::kMinBlocks))
    row_kernel(const __grid_constant__ ScanArgs args, const __grid_constant__ RowTiles tiles) {
  using Scan = RowScan<CellOf, T, kWarps>;
  extern __shared__ uint4 memory[];
  Scan::run(args, tiles, *reinterpret_cast<typename Scan::Shared*>(memory));
}

}  // namespace cuda
}  // namespace minserve
