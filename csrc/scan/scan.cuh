// The affine scan on CUDA in one pass over device memory.
//
// Blocks stay and take tile after tile (tiles.cuh). In a block, kBlock threads compute: each copies
// what it will itself read into shared memory ahead of time and folds a short run of time; the
// runs' aggregates are folded through shared memory in a fixed order; the tile's aggregate is
// published, the carry into it is found from the words of earlier tiles (lookback.cuh) and spread
// to the runs, and the outputs are written. Forward cells keep (a, b) from the fold to the output;
// backward cells, which need their inputs a second time, leave them in shared memory and compute
// again. One more warp, which holds no elements, takes the tiles.
//
// What is done while a tile's carry is on its way depends on the schedule: tile_loop.cuh.
//
// Lengths, slots and padding are found on the device, so a launch depends on tensor shapes alone
// and can be captured. Source of the recurrences: the cells.
#pragma once

#include "../arch/ptx.cuh"
#include "tile_memory.cuh"
#include "tiles.cuh"
#include "lookback.cuh"

namespace minserve {
namespace cuda {

// What both schedules have in common.
template <template <class> class CellOf, class O, class T, bool kAligned>
struct TileScan {
  using Memory = TileMemory<CellOf, O, T, kAligned>;
  using V = typename Memory::V;
  using Cell = typename Memory::Cell;
  using G = typename Memory::G;
  using Shared = typename Memory::Shared;
  using Lane = typename Memory::Lane;
  using OfChannels = typename Memory::OfChannels;
  static constexpr bool kHeld = Memory::kHeld, kNextTile = Memory::kNextTile;
  static constexpr int kVec = G::kVec, kRun = G::kRun, kBlock = G::kBlock;
  static constexpr int kParity = Memory::kParity, kInRegisters = Memory::kInRegisters;
  static constexpr int kThreads = kBlock + 32;  // one more warp takes the tiles
  // Barriers: of the computing threads; and of all, who meet there from different places in the
  // code (which __syncthreads() does not allow): the first tile is known; it has arrived; one is
  // folded.
  enum { kComputing = 1, kTaken, kStarted, kFolded };
  using Held = Affine<V>[kInRegisters][kVec];
  // How many blocks share a multiprocessor with 228 KiB of shared memory, where registers allow
  // `most`; 1 KiB of each is the system's.
  static constexpr int blocks_at_once(int most) {
    while (most > 1 && most * (sizeof(Shared) + 1024) > 228 * 1024) --most;
    return most;
  }

  template <bool kFull>
  static __device__ __forceinline__ void fold_run(const ScanArgs& args, const Tile& tile,
                                                  const Lane& lane, Shared& shared, int stage,
                                                  const OfChannels& parameters, Held& held,
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
        Affine<V> step = Cell::coefficients(Memory::options(args), element, parameters[v]);
        // Positions past the end change nothing, not even bits.
        if (!kFull && lane.position + k >= tile.count) step = {V(1), V(-0.0)};
        sum[v].b = fmadd(step.a, sum[v].b, step.b);
        sum[v].a = step.a * sum[v].a;
        if (k < kInRegisters) {
          if (kHeld) held[k < kInRegisters ? k : 0][v] = step;
        } else {
          steps[v] = step;
        }
      }
      if constexpr (kHeld && Memory::kParked > 0) {
        if (k >= kInRegisters) Memory::park(shared, k - kInRegisters, steps);
      }
    }
  }

  // Folds a thread's run of a tile that has arrived, and puts its aggregate down.
  static __device__ __forceinline__ void fold_tile(const ScanArgs& args, const Tile& tile,
                                                   const Lane& lane, Shared& shared, int stage,
                                                   const OfChannels& parameters, Held& held) {
    Affine<V> sum[kVec];
    if (tile.count == kScanChunk) {
      fold_run<true>(args, tile, lane, shared, stage, parameters, held, sum);
    } else {
      fold_run<false>(args, tile, lane, shared, stage, parameters, held, sum);
    }
    V a[kVec], b[kVec];
#pragma unroll
    for (int v = 0; v < kVec; ++v) a[v] = sum[v].a, b[v] = sum[v].b;
    // Where carries lie in the place of aggregates, all must have read those of the last tile.
    if (!kNextTile) barrier_sync<kBlock>(kComputing);
    store_values(&shared.a[lane.segment][lane.channel], a);
    store_values(&shared.b[lane.segment][lane.channel], b);
  }

  static __device__ __forceinline__ void write_run(const ScanArgs& args, const Tile& tile,
                                                   const Lane& lane, const Shared& shared,
                                                   int stage, const Held& held, V (&h)[kVec]) {
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
      if constexpr (kNextTile) {
        Memory::unpark(shared, k, steps);
      } else if constexpr (Memory::kParked > 0) {
        if (k >= kInRegisters) Memory::unpark(shared, k - kInRegisters, steps);
      }
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
        V element[Cell::kInputs], result[Cell::kOutputs];
        if (!kHeld) {
#pragma unroll
          for (int n = 0; n < Cell::kInputs; ++n) element[n] = in[n][v];
        }
        Affine<V> step;
        if constexpr (!kHeld) {
          step = Cell::coefficients(Memory::options(args), element);
        } else {
          step = kNextTile || k >= kInRegisters ? steps[v] : held[k < kInRegisters ? k : 0][v];
        }
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

  // Between the runs a thread stands for one channel and a group of neighbouring segments.
  static __device__ __forceinline__ int channel_of_thread() {
    return static_cast<int>(threadIdx.x) % G::kChannels;
  }
  static __device__ __forceinline__ int group_of_thread() {
    return static_cast<int>(threadIdx.x) / G::kChannels;
  }

  // The aggregates of a thread's group.
  struct Segments {
    V a[G::kGroupSegments], b[G::kGroupSegments];
    __device__ __forceinline__ void read(const Shared& shared) {
      const int first = group_of_thread() * G::kGroupSegments;
#pragma unroll
      for (int i = 0; i < G::kGroupSegments; ++i) {
        a[i] = shared.a[first + i][channel_of_thread()];
        b[i] = shared.b[first + i][channel_of_thread()];
      }
    }
  };

  // Aggregates of the groups, and of the tile for the first group's threads.
  static __device__ __forceinline__ Affine<V> fold_groups(Shared& shared, int iteration,
                                                          Segments& own) {
    const int channel = channel_of_thread(), group = group_of_thread();
    barrier_sync<kBlock>(kComputing);
    own.read(shared);
    auto& group_a = shared.group_a[iteration % kParity];
    auto& group_b = shared.group_b[iteration % kParity];
    V a = own.a[0], b = own.b[0];
#pragma unroll
    for (int i = 1; i < G::kGroupSegments; ++i) {
      b = fmadd(own.a[i], b, own.b[i]);
      a = own.a[i] * a;
    }
    group_a[group][channel] = a;
    group_b[group][channel] = b;
    barrier_sync<kBlock>(kComputing);
    if (group == 0) {
#pragma unroll
      for (int g = 1; g < G::kGroups; ++g) {
        const V next = group_a[g][channel];
        b = fmadd(next, b, group_b[g][channel]);
        a = next * a;
      }
    }
    return {a, b};
  }

  // From the tile's carry and the groups' aggregates to the carry into the thread's run.
  static __device__ __forceinline__ void spread_carry(const Lane& lane, Shared& shared,
                                                      int iteration, const Segments& own,
                                                      V (&h)[kVec]) {
    const int channel = channel_of_thread(), group = group_of_thread();
    V carry = shared.carry[iteration % 2][channel];
#pragma unroll
    for (int g = 0; g < G::kGroups - 1; ++g) {
      if (g < group) {
        carry = fmadd(shared.group_a[iteration % kParity][g][channel], carry,
                      shared.group_b[iteration % kParity][g][channel]);
      }
    }
#pragma unroll
    for (int i = 0; i < G::kGroupSegments; ++i) {
      shared.entries()[group * G::kGroupSegments + i][channel] = carry;
      carry = fmadd(own.a[i], carry, own.b[i]);
    }
    barrier_sync<kBlock>(kComputing);
    load_values(&shared.entries()[lane.segment][lane.channel], h);
  }

  static __device__ __forceinline__ char* lookback_word(const ScanArgs& args, const Tile& tile,
                                                        int channel) {
    return static_cast<char*>(args.workspace) +
           (tile.word + channel) * static_cast<std::int64_t>(sizeof(LookbackWord<V>));
  }
  static __device__ __forceinline__ std::int64_t lookback_step(const ScanArgs& args) {
    return args.layout.channels * static_cast<std::int64_t>(sizeof(LookbackWord<V>));
  }
  static __device__ __forceinline__ V initial_of(const ScanArgs& args, const Tile& tile,
                                                 int channel) {
    if (!args.initial) return V(0);
    return static_cast<const V*>(
        args.initial)[tile.slot * args.initial_stride + tile.channel + channel];
  }

  // A tile's aggregate, for those that look for their carries; chunk 0 waits for none itself.
  static __device__ __forceinline__ void publish_aggregate(const ScanArgs& args, const Tile& tile,
                                                           int channel, const Affine<V>& total) {
    if (tile.chunk > 0 && !tile.last && tile.channel + channel < args.layout.channels) {
      LookbackWord<V>::aggregate(total.a, total.b).store(lookback_word(args, tile, channel));
    }
  }
  // The carry that leaves a tile.
  static __device__ __forceinline__ void publish_carry(const ScanArgs& args, const Tile& tile,
                                                       int channel, V next) {
    if (!tile.last) {
      LookbackWord<V>::carry(next).store(lookback_word(args, tile, channel));
    } else if (args.last) {
      static_cast<V*>(args.last)[tile.slot * args.last_stride + tile.channel + channel] = next;
    }
  }

  // Called by one whole warp.
  static __device__ __forceinline__ void find_tile_into(Tile& to, const ScanArgs& args,
                                                        const Order& order, unsigned ticket,
                                                        Tickets& tickets) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const Tile tile = find_tile(args, order, ticket, tickets, G::kChannels);
    if (lane == 0) to = tile;
    __syncwarp();
    if (lane < Cell::kInputs) to.input[lane] = tile.row * args.inputs[lane].stride + tile.channel;
    if (lane < Cell::kOutputs)
      to.output[lane] = tile.row * args.outputs[lane].stride + tile.channel;
    __syncwarp();
  }
};

}  // namespace cuda
}  // namespace minserve
