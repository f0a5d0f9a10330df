// The affine scan on CUDA in one pass over device memory.
//
// Blocks stay and take tile after tile (tiles.cuh). In a block, kBlock threads compute: each copies
// what it will itself read into shared memory ahead of time, folds a short run of time, and the
// runs' aggregates are folded through shared memory in a fixed order. One more warp, which holds no
// elements, meanwhile takes the next tile and finds the carry into the current one from the words
// of earlier tiles (words.cuh), so that neither is waited for. Forward cells keep (a, b) in
// registers between the fold and the output; backward cells, which need their inputs a second time,
// leave them in shared memory and compute again.
//
// Lengths, slots and padding are found on the device, so a launch depends on tensor shapes alone
// and can be captured. Source of the recurrences: the cells.
#pragma once

#include "barrier.cuh"
#include "tile_memory.cuh"
#include "tiles.cuh"
#include "words.cuh"

namespace minserve {
namespace cuda {

template <template <class> class CellOf, class O, class T, bool kAligned>
struct TileScan {
  using Memory = TileMemory<CellOf, O, T, kAligned>;
  using V = typename Memory::V;
  using Cell = typename Memory::Cell;
  using G = typename Memory::G;
  using Shared = typename Memory::Shared;
  using Lane = typename Memory::Lane;
  static constexpr bool kHeld = Memory::kHeld, kLag = Memory::kLag;
  static constexpr int kVec = G::kVec, kRun = G::kRun, kBlock = G::kBlock;
  static constexpr int kStages = Memory::kStages, kTiles = Memory::kTiles;
  static constexpr int kParity = Memory::kParity, kInRegisters = Memory::kInRegisters;
  static constexpr int kMinBlocks = kBlock == 256 ? 2 : kHeld ? 3 : 2;
  // Who meets at a barrier, and what for.
  static constexpr int kAll = kBlock + 32, kTotals = (G::kChannels + 31) / 32 * 32 + 32;
  enum { kComputing = 1, kStarted, kNextKnown, kTotalKnown, kCarryKnown };  // the last and two more

  template <bool kFull>
  static __device__ __forceinline__ void fold_run(const ScanArgs& args, const Tile& tile,
                                                  const Lane& lane, Shared& shared, int stage,
                                                  Affine<V> (&held)[kInRegisters][kVec],
                                                  Affine<V> (&sum)[kVec]) {
#pragma unroll
    for (int v = 0; v < kVec; ++v) sum[v] = {V(1), V(0)};
#pragma unroll
    for (int k = 0; k < kRun; ++k) {
      V in[Cell::kInputs][kVec];
      Affine<V> steps[kVec];
      Memory::read(args, tile, lane, shared, stage, k, in);
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
        V element[Cell::kInputs];
#pragma unroll
        for (int n = 0; n < Cell::kInputs; ++n) element[n] = in[n][v];
        Affine<V> step = Cell::affine(Memory::options(args), element);
        // Positions past the end change nothing, not even bits.
        if (!kFull && lane.position + k >= tile.count) step = {V(1), V(0)};
        sum[v].b = fmadd(step.a, sum[v].b, step.b);
        sum[v].a = step.a * sum[v].a;
        if (k < kInRegisters) {
          if (kHeld) held[k < kInRegisters ? k : 0][v] = step;
        } else {
          steps[v] = step;
        }
      }
      if (kHeld && k >= kInRegisters) Memory::park(shared, k - kInRegisters, steps);
    }
  }

  static __device__ __forceinline__ void write_run(const ScanArgs& args, const Tile& tile,
                                                   const Lane& lane, const Shared& shared,
                                                   int stage,
                                                   const Affine<V> (&held)[kInRegisters][kVec],
                                                   V (&h)[kVec]) {
    const int real = Memory::channels_left(args, tile, lane.channel);
    if (real == 0) return;
    const int left = tile.count - lane.position;
    T* to[Cell::kOutputs];
#pragma unroll
    for (int n = 0; n < Cell::kOutputs; ++n) {
      to[n] = Memory::first_of(args, args.outputs[n], tile.output[n], lane);
    }
#pragma unroll
    for (int k = 0; k < kRun; ++k) {
      V in[Cell::kInputs][kVec], out[Cell::kOutputs][kVec];
      Affine<V> steps[kVec];
      if (!kHeld) Memory::read(args, tile, lane, shared, stage, k, in);
      if (kLag) {
        Memory::unpark(shared, k, steps);
      } else if (kHeld && k >= kInRegisters) {
        Memory::unpark(shared, k - kInRegisters, steps);
      }
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
        V element[Cell::kInputs], result[Cell::kOutputs];
        if (!kHeld) {
#pragma unroll
          for (int n = 0; n < Cell::kInputs; ++n) element[n] = in[n][v];
        }
        const Affine<V> step = !kHeld ? Cell::affine(Memory::options(args), element)
                               : kLag || k >= kInRegisters ? steps[v]
                                                           : held[k < kInRegisters ? k : 0][v];
        const V after = fmadd(step.a, h[v], step.b);
        Cell::outputs(Memory::options(args), element, h[v], after, result);
        h[v] = after;
#pragma unroll
        for (int n = 0; n < Cell::kOutputs; ++n) out[n][v] = result[n];
      }
#pragma unroll
      for (int n = 0; n < Cell::kOutputs; ++n) {
        if (k < left) store_pack(to[n], pack(out[n], T{}), kAligned, real);
        to[n] += Memory::direction(args) * args.outputs[n].stride;
      }
    }
  }

  static __device__ __forceinline__ char* word_of(const ScanArgs& args, const Tile& tile,
                                                  int channel) {
    return static_cast<char*>(args.workspace) +
           (tile.word + channel) * static_cast<std::int64_t>(sizeof(Word<V>));
  }

  // Aggregates of the groups of segments and of the tile.
  static __device__ __forceinline__ void fold_groups(const ScanArgs& args, const Tile& tile,
                                                     Shared& shared, int turn) {
    const int channel = static_cast<int>(threadIdx.x) % G::kChannels;
    const int group = static_cast<int>(threadIdx.x) / G::kChannels;
    const int first = group * G::kGroupSegments;
    const auto& segment_a = shared.a[turn % kParity];
    const auto& segment_b = shared.b[turn % kParity];
    auto& group_a = shared.group_a[turn % kParity];
    auto& group_b = shared.group_b[turn % kParity];
    V a = segment_a[first][channel], b = segment_b[first][channel];
#pragma unroll
    for (int i = 1; i < G::kGroupSegments; ++i) {
      const V next = segment_a[first + i][channel];
      b = fmadd(next, b, segment_b[first + i][channel]);
      a = next * a;
    }
    group_a[group][channel] = a;
    group_b[group][channel] = b;
    Barrier<kBlock>::sync(kComputing);
    if (threadIdx.x >= kTotals - 32) return;
    if (group == 0) {
#pragma unroll
      for (int g = 1; g < G::kGroups; ++g) {
        const V next = group_a[g][channel];
        b = fmadd(next, b, group_b[g][channel]);
        a = next * a;
      }
      shared.total_a[channel] = a;
      shared.total_b[channel] = b;
      if (tile.chunk > 0 && !tile.last && tile.channel + channel < args.layout.channels) {
        Word<V>::aggregate(a, b).store(word_of(args, tile, channel));
      }
    }
    Barrier<kTotals>::arrive(kTotalKnown);
  }

  // From the groups' aggregates to the carry into the thread's segment.
  static __device__ __forceinline__ void spread_carries(const Lane& lane, Shared& shared, int turn,
                                                        V (&h)[kVec]) {
    const int channel = static_cast<int>(threadIdx.x) % G::kChannels;
    const int group = static_cast<int>(threadIdx.x) / G::kChannels;
    const int first = group * G::kGroupSegments;
    Barrier<kAll>::sync(kCarryKnown + turn % 3);
    V carry = shared.carry[turn % 3][channel];
#pragma unroll
    for (int g = 0; g < G::kGroups - 1; ++g) {
      if (g < group) {
        carry = fmadd(shared.group_a[turn % kParity][g][channel], carry,
                      shared.group_b[turn % kParity][g][channel]);
      }
    }
#pragma unroll
    for (int i = 0; i < G::kGroupSegments; ++i) {
      const V a = shared.a[turn % kParity][first + i][channel];
      const V b = shared.b[turn % kParity][first + i][channel];
      shared.b[turn % kParity][first + i][channel] = carry;
      carry = fmadd(a, carry, b);
    }
    Barrier<kBlock>::sync(kComputing);
    load_values(&shared.b[turn % kParity][lane.segment][lane.channel], h);
  }

  static __device__ __forceinline__ void fold_tile(const ScanArgs& args, const Tile& tile,
                                                   const Lane& lane, Shared& shared, int turn,
                                                   Affine<V> (&held)[kInRegisters][kVec]) {
    Affine<V> sum[kVec];
    if (tile.count == kScanChunk) {
      fold_run<true>(args, tile, lane, shared, turn % kStages, held, sum);
    } else {
      fold_run<false>(args, tile, lane, shared, turn % kStages, held, sum);
    }
    V a[kVec], b[kVec];
#pragma unroll
    for (int v = 0; v < kVec; ++v) a[v] = sum[v].a, b[v] = sum[v].b;
    // With one set of arrays all must have read the last tile's carries.
    if (kParity == 1) Barrier<kBlock>::sync(kComputing);
    store_values(&shared.a[turn % kParity][lane.segment][lane.channel], a);
    store_values(&shared.b[turn % kParity][lane.segment][lane.channel], b);
  }

  // The computing threads where a tile is written one turn after it was folded, so that its carry
  // has all that time to arrive.
  static __device__ __forceinline__ void compute_lagging(const ScanArgs& args, Shared& shared) {
    const Lane lane;
    Memory::fetch(args, shared.tiles[0], lane, shared, 0);
    for (int n = 0;; ++n) {
      const Tile& tile = shared.tiles[n % kTiles];
      const bool more = tile.sequence >= 0, scans = more && tile.slot >= 0;
      Affine<V> held[kInRegisters][kVec];
      if (more) {
        wait_for_copies();
        if (n == 0) Barrier<kAll>::arrive(kStarted);
        if (scans) fold_tile(args, tile, lane, shared, n, held);
        Barrier<kAll>::sync(kNextKnown);
        Memory::fetch(args, shared.tiles[(n + 1) % kTiles], lane, shared, 0);
        if (scans) {
          fold_groups(args, tile, shared, n);
        } else {
          Memory::zero(args, tile, lane);
        }
      }
      const Tile& before = shared.tiles[(n + kTiles - 1) % kTiles];
      if (n > 0 && before.slot >= 0) {
        V h[kVec];
        spread_carries(lane, shared, n - 1, h);
        write_run(args, before, lane, shared, 0, held, h);
      }
      if (!more) return;
      if (scans) {
#pragma unroll
        for (int k = 0; k < kRun; ++k) Memory::park(shared, k, held[k < kInRegisters ? k : 0]);
      }
    }
  }

  // The computing threads where each tile is finished in its turn.
  static __device__ __forceinline__ void compute(const ScanArgs& args, Shared& shared) {
    const Lane lane;
    Memory::fetch(args, shared.tiles[0], lane, shared, 0);
    for (int n = 0;; ++n) {
      const Tile& tile = shared.tiles[n % kTiles];
      if (tile.sequence < 0) return;
      const Tile& coming = shared.tiles[(n + 1) % kTiles];  // from kNextKnown on
      const int stage = n % kStages, next_stage = (n + 1) % kStages;
      wait_for_copies();
      if (n == 0) Barrier<kAll>::arrive(kStarted);
      const bool scans = tile.slot >= 0;
      Affine<V> held[kInRegisters][kVec];
      if (scans) {
        fold_tile(args, tile, lane, shared, n, held);
      } else {
        Memory::zero(args, tile, lane);
      }
      Barrier<kAll>::sync(kNextKnown);
      if (kHeld || kStages == 2) Memory::fetch(args, coming, lane, shared, next_stage);
      if (scans) {
        fold_groups(args, tile, shared, n);
        V h[kVec];
        spread_carries(lane, shared, n, h);
        write_run(args, tile, lane, shared, stage, held, h);
      }
      if (!kHeld && kStages == 1) Memory::fetch(args, coming, lane, shared, 0);
    }
  }

  static __device__ __forceinline__ void find_tile_into(Tile& to, const ScanArgs& args,
                                                        const Order& order, unsigned ticket,
                                                        unsigned* counter) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const Tile tile = find_tile(args.layout, order, ticket, counter, G::kChannels);
    if (lane == 0) to = tile;
    __syncwarp();
    if (lane < Cell::kInputs) to.input[lane] = tile.row * args.inputs[lane].stride + tile.channel;
    if (lane < Cell::kOutputs)
      to.output[lane] = tile.row * args.outputs[lane].stride + tile.channel;
    __syncwarp();
  }

  // The warp that takes tiles and finds carries; it may be a turn ahead of the computing threads.
  // The second tile is taken only when the first has arrived in shared memory, or blocks that start
  // later would find their predecessors queued behind other work.
  static __device__ __forceinline__ void carry(const ScanArgs& args, unsigned* counter,
                                               Shared& shared) {
    constexpr int kEach = (G::kChannels + 31) / 32;  // neighbouring channels of a lane
    // Chunks looked at together: as many as stay in registers.
    constexpr int kWindow = sizeof(V) == 8 ? 4 : (kBlock == 256 ? 12 : 20) / kEach;
    const int channel = static_cast<int>(threadIdx.x) % 32 * kEach;
    const std::int64_t word_step =
        args.layout.channels * static_cast<std::int64_t>(sizeof(Word<V>));
    const Order order(args.layout, reinterpret_cast<int2*>(shared.a));
    words_cleared();
    unsigned ticket = take_ticket(counter);
    find_tile_into(shared.tiles[0], args, order, ticket, counter);
    __syncthreads();
    for (int n = 0;; ++n) {
      const Tile& tile = shared.tiles[n % kTiles];
      if (tile.sequence < 0) return;
      if (n == 0) Barrier<kAll>::sync(kStarted);
      ticket = take_ticket(counter);
      find_tile_into(shared.tiles[(n + 1) % kTiles], args, order, ticket, counter);
      if (tile.slot < 0) {
        Barrier<kAll>::sync(kNextKnown);  // or this warp could be two turns ahead
        continue;
      }
      Barrier<kAll>::arrive(kNextKnown);
      const std::int64_t left = args.layout.channels - tile.channel - channel;
      const int real = channel >= G::kChannels ? 0 : left < kEach ? static_cast<int>(left) : kEach;
      V h[kEach] = {};
      if (real > 0 && tile.chunk > 0) {
        look_back<V, kEach, kWindow>(word_of(args, tile, channel), word_step, tile.chunk,
                                     tile.close, real, h);
      } else if (real > 0 && args.initial) {
        const V* initial = static_cast<const V*>(args.initial) + tile.slot * args.initial_stride +
                           tile.channel + channel;
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
          if (i < real) h[i] = initial[i];
        }
      }
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        if (i < real) shared.carry[n % 3][channel + i] = h[i];
      }
      __syncwarp();
      Barrier<kAll>::arrive(kCarryKnown + n % 3);
      Barrier<kTotals>::sync(kTotalKnown);
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        if (i >= real) break;
        const V next = fmadd(shared.total_a[channel + i], h[i], shared.total_b[channel + i]);
        if (!tile.last) {
          Word<V>::carry(next).store(word_of(args, tile, channel + i));
        } else if (args.last) {
          static_cast<V*>(args.last)[tile.slot * args.last_stride + tile.channel + channel + i] =
              next;
        }
      }
    }
  }

  static __device__ __forceinline__ void run(const ScanArgs& args, unsigned* counter,
                                             Shared& shared) {
    if (threadIdx.x < kBlock) {
      __syncthreads();
      if constexpr (kLag) {
        compute_lagging(args, shared);
      } else {
        compute(args, shared);
      }
    } else {
      carry(args, counter, shared);
    }
  }
};

template <template <class> class CellOf, class O, class T, bool kAligned>
__global__ void __launch_bounds__((TileScan<CellOf, O, T, kAligned>::kAll),
                                  (TileScan<CellOf, O, T, kAligned>::kMinBlocks))
    tile_kernel(const __grid_constant__ ScanArgs args, unsigned* counter) {
  using Scan = TileScan<CellOf, O, T, kAligned>;
  extern __shared__ uint4 memory[];
  Scan::run(args, counter, *reinterpret_cast<typename Scan::Shared*>(memory));
}

}  // namespace cuda
}  // namespace minserve
