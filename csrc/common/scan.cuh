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
#include "copies.cuh"
#include "gates.h"
#include "launch.cuh"
#include "step.cuh"
#include "tiles.cuh"
#include "words.cuh"

namespace minserve {
namespace cuda {

template <template <class> class CellOf, class O, class T, bool kAligned>
struct TileScan {
  using V = typename ComputeType<T>::type;
  using Cell = CellOf<V>;
  static constexpr bool kHeld = Cell::kPrevious < 0;
  using G = Geometry<T, Cell::kInputs, kHeld>;
  static constexpr int kVec = G::kVec, kRun = G::kRun, kBlock = G::kBlock;
  // Four-byte types write a tile one turn after they folded it. For two-byte types, whose limit is
  // the number of instructions, the way through shared memory costs more than the wait.
  static constexpr bool kLag = kHeld && sizeof(T) > 2;
  static constexpr int kParity = kLag ? 2 : 1;
  // Backward cells with room for two stages fetch a tile while the one before is still read.
  static constexpr int kStages = kHeld || G::kStageBytes > 49152 ? 1 : 2;
  static constexpr int kTiles = 4;
  static constexpr int kMinBlocks = kBlock == 256 ? 2 : kHeld ? 3 : 2;
  // Who meets at a barrier, and what for.
  static constexpr int kAll = kBlock + 32, kTotals = (G::kChannels + 31) / 32 * 32 + 32;
  enum { kComputing = 1, kStarted, kNextKnown, kTotalKnown, kCarryKnown };  // the last and two more
  static constexpr bool kAnyOptions = sizeof(O) > 1;

  // The (a, b) of these rows of a thread's run wait for the carry in registers, those of the others
  // in shared memory, where each thread finds its own again.
  static constexpr int kInRegisters = !kHeld ? 1 : kLag || kRun * kVec <= 32 ? kRun : 32 / kVec;
  static constexpr int kParked = kLag ? kRun : kHeld ? kRun - kInRegisters : 0;
  static constexpr int kParkedPacks = 2 * kVec * static_cast<int>(sizeof(V)) / 16;

  struct Shared {
    uint4 stage[kStages][Cell::kInputs][kRun][kBlock];
    uint4 parked[kParked > 0 ? kParked : 1][kParked > 0 ? kParkedPacks : 1]
                [kParked > 0 ? kBlock : 1];
    // Of two tiles each, by the parity of their turns.
    V a[kParity][G::kSegments][G::kChannels];  // aggregates of the segments
    V b[kParity][G::kSegments][G::kChannels];  // then the carries into them
    V group_a[kParity][G::kGroups][G::kChannels];
    V group_b[kParity][G::kGroups][G::kChannels];
    V total_a[G::kChannels], total_b[G::kChannels];  // aggregate of the tile
    V carry[3][G::kChannels];                        // into the tile
    Tile tiles[kTiles];
  };

  // What a thread is in every tile.
  struct Lane {
    int segment, position, channel;
    __device__ __forceinline__ Lane()
        : segment(static_cast<int>(threadIdx.x) / 32 * G::kSegmentsPerWarp +
                  static_cast<int>(threadIdx.x) % 32 / G::kLanes),
          position(segment * kRun),
          channel(static_cast<int>(threadIdx.x) % G::kLanes * kVec) {}
  };

  // A thread's first element in a stream, given the tile's first.
  static __device__ __forceinline__ T* first_of(const ScanArgs& args, const Stream& stream,
                                                std::int64_t tile_first, const Lane& lane) {
    const int rows = args.layout.reverse ? -lane.position : lane.position;
    return static_cast<T*>(stream.data) + tile_first +
           (rows * static_cast<int>(stream.stride) + lane.channel);
  }
  static __device__ __forceinline__ O options(const ScanArgs& args) {
    if constexpr (kAnyOptions) {
      return {args.linear_candidate, args.normalize_gates};
    } else {
      return {};
    }
  }
  static __device__ __forceinline__ std::int64_t direction(const ScanArgs& args) {
    return args.layout.reverse ? -1 : 1;
  }
  static __device__ __forceinline__ int channels_left(const ScanArgs& args, const Tile& tile,
                                                      int channel) {
    const std::int64_t left = args.layout.channels - tile.channel - channel;
    return left < 0 ? 0 : (left < kVec ? static_cast<int>(left) : kVec);
  }
  static __device__ __forceinline__ void fetch(const ScanArgs& args, const Tile& tile,
                                               const Lane& lane, Shared& shared, int stage) {
    const int real = channels_left(args, tile, lane.channel);
    if (tile.sequence >= 0 && tile.slot >= 0 && real > 0) {
      if constexpr (kAligned) {
        fetch_packs(args, tile, lane, shared, stage);
      } else {
        fetch_elements(args, tile, lane, shared, stage, real);
      }
    }
  }

  static __device__ __forceinline__ void fetch_packs(const ScanArgs& args, const Tile& tile,
                                                     const Lane& lane, Shared& shared, int stage) {
    const int left = tile.count - lane.position;
#pragma unroll
    for (int n = 0; n < Cell::kInputs; ++n) {
      const std::int64_t step = direction(args) * args.inputs[n].stride;
      const T* from = first_of(args, args.inputs[n], tile.input[n], lane);
      // The previous state is one row further on, except for the forward scan's first row, whose
      // value is replaced when it is read.
      if (n == Cell::kPrevious) from += step;
      uint4* to = &shared.stage[stage][n][0][threadIdx.x];
#pragma unroll
      for (int k = 0; k < kRun; ++k) {
        const bool none = n == Cell::kPrevious && lane.position + k == tile.first_position;
        if (k < left) copy_async(to + k * kBlock, none ? from - step : from);
        from += step;
      }
    }
  }

  // The same for tensors that are not aligned to 16 bytes, or whose rows are not.
  static __device__ __forceinline__ void fetch_elements(const ScanArgs& args, const Tile& tile,
                                                        const Lane& lane, Shared& shared, int stage,
                                                        int real) {
#pragma unroll 1
    for (int n = 0; n < Cell::kInputs; ++n) {
      const T* p = static_cast<const T*>(args.inputs[n].data) + tile.channel + lane.channel;
#pragma unroll 1
      for (int k = 0; k < kRun && lane.position + k < tile.count; ++k) {
        std::int64_t row = tile.row + direction(args) * (lane.position + k);
        if (n == Cell::kPrevious && lane.position + k != tile.first_position) {
          row += direction(args);
        }
        T* to = reinterpret_cast<T*>(&shared.stage[stage][n][k][threadIdx.x]);
        for (int v = 0; v < kVec; ++v) to[v] = v < real ? p[row * args.inputs[n].stride + v] : T{};
      }
    }
  }

  // The inputs of the thread's k-th position.
  static __device__ __forceinline__ void read(const ScanArgs& args, const Tile& tile,
                                              const Lane& lane, const Shared& shared, int stage,
                                              int k, V (&in)[Cell::kInputs][kVec]) {
#pragma unroll
    for (int n = 0; n < Cell::kInputs; ++n) {
      unpack(shared.stage[stage][n][k][threadIdx.x], in[n], T{});
    }
    if constexpr (!kHeld) {
      if (lane.position + k != tile.first_position) return;
      const int real = channels_left(args, tile, lane.channel);
      const V* h0 = static_cast<const V*>(args.h0);
      if (h0) h0 += tile.sequence * args.layout.channels + tile.channel + lane.channel;
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
        in[Cell::kPrevious][v] = h0 && v < real ? h0[v] : V(0);
      }
    }
  }

  static __device__ __forceinline__ void park(Shared& shared, int row,
                                              const Affine<V> (&steps)[kVec]) {
    constexpr int kEach = 8 / static_cast<int>(sizeof(V));  // steps in 16 bytes
#pragma unroll
    for (int i = 0; i < kParkedPacks; ++i) {
      *reinterpret_cast<SixteenBytes*>(&shared.parked[row][i][threadIdx.x]) =
          *reinterpret_cast<const SixteenBytes*>(&steps[i * kEach]);
    }
  }
  static __device__ __forceinline__ void unpark(const Shared& shared, int row,
                                                Affine<V> (&steps)[kVec]) {
    constexpr int kEach = 8 / static_cast<int>(sizeof(V));
#pragma unroll
    for (int i = 0; i < kParkedPacks; ++i) {
      *reinterpret_cast<SixteenBytes*>(&steps[i * kEach]) =
          *reinterpret_cast<const SixteenBytes*>(&shared.parked[row][i][threadIdx.x]);
    }
  }

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
      read(args, tile, lane, shared, stage, k, in);
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
        V element[Cell::kInputs];
#pragma unroll
        for (int n = 0; n < Cell::kInputs; ++n) element[n] = in[n][v];
        Affine<V> step = Cell::affine(options(args), element);
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
      if (kHeld && k >= kInRegisters) park(shared, k - kInRegisters, steps);
    }
  }

  static __device__ __forceinline__ void write_run(const ScanArgs& args, const Tile& tile,
                                                   const Lane& lane, const Shared& shared,
                                                   int stage,
                                                   const Affine<V> (&held)[kInRegisters][kVec],
                                                   V (&h)[kVec]) {
    const int real = channels_left(args, tile, lane.channel);
    if (real == 0) return;
    const int left = tile.count - lane.position;
    T* to[Cell::kOutputs];
#pragma unroll
    for (int n = 0; n < Cell::kOutputs; ++n) {
      to[n] = first_of(args, args.outputs[n], tile.output[n], lane);
    }
#pragma unroll
    for (int k = 0; k < kRun; ++k) {
      V in[Cell::kInputs][kVec], out[Cell::kOutputs][kVec];
      Affine<V> steps[kVec];
      if (!kHeld) read(args, tile, lane, shared, stage, k, in);
      if (kLag) {
        unpark(shared, k, steps);
      } else if (kHeld && k >= kInRegisters) {
        unpark(shared, k - kInRegisters, steps);
      }
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
        V element[Cell::kInputs], result[Cell::kOutputs];
        if (!kHeld) {
#pragma unroll
          for (int n = 0; n < Cell::kInputs; ++n) element[n] = in[n][v];
        }
        const Affine<V> step = !kHeld                      ? Cell::affine(options(args), element)
                               : kLag || k >= kInRegisters ? steps[v]
                                                           : held[k < kInRegisters ? k : 0][v];
        const V after = fmadd(step.a, h[v], step.b);
        Cell::outputs(options(args), element, h[v], after, result);
        h[v] = after;
#pragma unroll
        for (int n = 0; n < Cell::kOutputs; ++n) out[n][v] = result[n];
      }
#pragma unroll
      for (int n = 0; n < Cell::kOutputs; ++n) {
        if (k < left) store_pack(to[n], pack(out[n], T{}), kAligned, real);
        to[n] += direction(args) * args.outputs[n].stride;
      }
    }
  }

  static __device__ __forceinline__ void zero(const ScanArgs& args, const Tile& tile,
                                              const Lane& lane) {
    const int real = channels_left(args, tile, lane.channel);
    if (real == 0) return;
    const V none[kVec] = {};
#pragma unroll
    for (int n = 0; n < Cell::kOutputs; ++n) {
      T* to = first_of(args, args.outputs[n], tile.output[n], lane);
      for (int k = 0; k < kRun && lane.position + k < tile.count; ++k) {
        store_pack(to, pack(none, T{}), kAligned, real);
        to += direction(args) * args.outputs[n].stride;
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
    fetch(args, shared.tiles[0], lane, shared, 0);
    for (int n = 0;; ++n) {
      const Tile& tile = shared.tiles[n % kTiles];
      const bool more = tile.sequence >= 0, scans = more && tile.slot >= 0;
      Affine<V> held[kInRegisters][kVec];
      if (more) {
        copies_done();
        if (n == 0) Barrier<kAll>::arrive(kStarted);
        if (scans) fold_tile(args, tile, lane, shared, n, held);
        Barrier<kAll>::sync(kNextKnown);
        fetch(args, shared.tiles[(n + 1) % kTiles], lane, shared, 0);
        if (scans) {
          fold_groups(args, tile, shared, n);
        } else {
          zero(args, tile, lane);
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
        for (int k = 0; k < kRun; ++k) park(shared, k, held[k < kInRegisters ? k : 0]);
      }
    }
  }

  // The computing threads where each tile is finished in its turn.
  static __device__ __forceinline__ void compute(const ScanArgs& args, Shared& shared) {
    const Lane lane;
    fetch(args, shared.tiles[0], lane, shared, 0);
    for (int n = 0;; ++n) {
      const Tile& tile = shared.tiles[n % kTiles];
      if (tile.sequence < 0) return;
      const Tile& coming = shared.tiles[(n + 1) % kTiles];  // from kNextKnown on
      const int stage = n % kStages, next_stage = (n + 1) % kStages;
      copies_done();
      if (n == 0) Barrier<kAll>::arrive(kStarted);
      const bool scans = tile.slot >= 0;
      Affine<V> held[kInRegisters][kVec];
      if (scans) {
        fold_tile(args, tile, lane, shared, n, held);
      } else {
        zero(args, tile, lane);
      }
      Barrier<kAll>::sync(kNextKnown);
      if (kHeld || kStages == 2) fetch(args, coming, lane, shared, next_stage);
      if (scans) {
        fold_groups(args, tile, shared, n);
        V h[kVec];
        spread_carries(lane, shared, n, h);
        write_run(args, tile, lane, shared, stage, held, h);
      }
      if (!kHeld && kStages == 1) fetch(args, coming, lane, shared, 0);
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
        look_back<V, kEach>(word_of(args, tile, channel), word_step, tile.chunk, tile.close, real,
                            h);
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

template <template <class> class CellOf, class O, class T, bool kAligned>
void launch_tiles(const ScanArgs& args, cudaStream_t stream) {
  using Scan = TileScan<CellOf, O, T, kAligned>;
  const auto kernel = &tile_kernel<CellOf, O, T, kAligned>;
  const int shared = static_cast<int>(sizeof(typename Scan::Shared));
  const Layout& lay = args.layout;
  const std::int64_t tiles =
      lay.chunk_bound() * ((lay.channels + Scan::G::kChannels - 1) / Scan::G::kChannels);
  if (tiles > 4294967295LL - 1000000) {  // the counter has 32 bits and is passed once by each block
    throw std::runtime_error("minserve: too large for one scan: " + std::to_string(tiles) +
                             " tiles");
  }
  const std::int64_t bytes = workspace_bytes(lay, sizeof(Word<typename Scan::V>));
  char* counter = static_cast<char*>(args.workspace) + bytes - 16;
  const std::int64_t blocks =
      resident_blocks(reinterpret_cast<const void*>(kernel), Scan::kAll, shared);
  clear_kernel<<<static_cast<unsigned>(bytes / 16 / 1024 < blocks ? bytes / 16 / 1024 + 1 : blocks),
                 256, 0, stream>>>(static_cast<uint4*>(args.workspace), bytes / 16);
  check(cudaGetLastError(), "clearing the scan's words");
  const OverlappedLaunch launch(tiles < blocks ? tiles : blocks, Scan::kAll, shared, stream);
  check(cudaLaunchKernelEx(launch.config(), kernel, args, reinterpret_cast<unsigned*>(counter)),
        "scan");
  check(cudaGetLastError(), "scan");
}

// Whether rows that begin at data and follow each other by stride elements are aligned to 16 bytes.
inline bool aligned_rows(const void* data, std::int64_t stride, std::int64_t size) {
  return reinterpret_cast<std::uintptr_t>(data) % 16 == 0 && stride * size % 16 == 0;
}

template <template <class> class CellOf, class T>
void launch_scan(ScanArgs args, cudaStream_t stream) {
  using Cell = CellOf<float>;
  const Layout& lay = args.layout;
  args.aligned = lay.channels * sizeof(T) % 16 == 0;
  for (int n = 0; n < Cell::kInputs; ++n) {
    args.aligned =
        args.aligned && aligned_rows(args.inputs[n].data, args.inputs[n].stride, sizeof(T));
  }
  for (int n = 0; n < Cell::kOutputs; ++n) {
    args.aligned =
        args.aligned && aligned_rows(args.outputs[n].data, args.outputs[n].stride, sizeof(T));
  }
  const std::int64_t size = sizeof(typename ComputeType<T>::type);
  args.aligned_state = args.aligned && aligned_rows(args.initial, args.initial_stride, size) &&
                       aligned_rows(args.last, args.last_stride, size);
  const bool step = Cell::kPrevious < 0 && !lay.cu_seqlens && lay.time == 1;
  with_options<Cell::kHasOptions>(args, [&](auto options) {
    if constexpr (Cell::kPrevious < 0) {
      if (step) return launch_step<CellOf, decltype(options), T>(args, options, stream);
    }
    if constexpr (sizeof(T) < 8) {  // float64 is for checking gradients
      if (args.aligned) return launch_tiles<CellOf, decltype(options), T, true>(args, stream);
    }
    launch_tiles<CellOf, decltype(options), T, false>(args, stream);
  });
}

// One entry point over dtypes and direction for a pair of cells.
template <template <class> class Forward, template <class> class Backward>
void launch_by_dtype(const ScanArgs& args, Dtype dtype, bool backward, int device,
                     void* stream_handle) {
  const DeviceGuard guard(device);
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_handle);
  switch (dtype) {
    case Dtype::f32:
      return backward ? launch_scan<Backward, float>(args, stream)
                      : launch_scan<Forward, float>(args, stream);
    case Dtype::f64:
      return backward ? launch_scan<Backward, double>(args, stream)
                      : launch_scan<Forward, double>(args, stream);
    case Dtype::bf16:
      return backward ? launch_scan<Backward, bf16>(args, stream)
                      : launch_scan<Forward, bf16>(args, stream);
    case Dtype::f16:
      return backward ? launch_scan<Backward, f16>(args, stream)
                      : launch_scan<Forward, f16>(args, stream);
  }
}

}  // namespace cuda
}  // namespace minserve
