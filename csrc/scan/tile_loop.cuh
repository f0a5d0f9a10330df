// A block's loop over its tiles, in one of two schedules.
//
// same_tile: a tile is finished in the iteration in which it was folded. For two-byte types, whose
// limit is the number of instructions, so that the way of (a, b) through shared memory would cost
// more than the wait; and for backward cells, which keep their inputs until then. The computing
// threads have nothing else to do while a carry is on its way, so they look for it themselves, all
// at once; the warp that takes the tiles only looks whether it is there early.
//
// next_tile: a tile is written after the next one has been folded, so that its carry has all that
// time to arrive. For four- and eight-byte forward scans. The warp that takes the tiles finds the
// carries meanwhile.
#pragma once

#include "scan.cuh"

namespace minserve {
namespace cuda {

template <template <class> class CellOf, class O, class T, bool kAligned>
struct TileLoop : TileScan<CellOf, O, T, kAligned> {
  using Scan = TileScan<CellOf, O, T, kAligned>;
  using Memory = typename Scan::Memory;
  using V = typename Scan::V;
  using G = typename Scan::G;
  using Shared = typename Scan::Shared;
  using Lane = typename Scan::Lane;
  using Segments = typename Scan::Segments;
  static constexpr bool kNextTile = Memory::kSchedule == TileSchedule::next_tile;
  static constexpr bool kHeld = Scan::kHeld;
  static constexpr int kBlock = Scan::kBlock, kTiles = Memory::kTiles, kVec = Scan::kVec;
  static constexpr int kThreads = Scan::kThreads;
  static constexpr int kMinBlocks =
      Scan::blocks_at_once(!kNextTile && (kBlock == 256 || !kHeld) ? 2 : 3);
  // At kFolded the next tile is known too, and with next_tile the carry into the tile before; there
  // it also comes once when there is no more tile.
  static constexpr int kComputing = Scan::kComputing, kTaken = Scan::kTaken;
  static constexpr int kStarted = Scan::kStarted, kFolded = Scan::kFolded;

  // Chunks whose words are looked at together. next_tile: as many as stay in registers. same_tile:
  // by each group of threads; more in all would crowd out what the registers hold.
  static constexpr int kLookbackWords = kNextTile        ? (sizeof(V) == 8 ? 4 : 16)
                                        : G::kGroups < 8 ? 12 / G::kGroups
                                                         : 1;
  using LookbackWords = LookbackWindow<V, kLookbackWords>;
  // When the words of the chunks before are loaded early, in halves of a round (see within()): a
  // wide block's rounds are longer, and its registers fewer.
  static constexpr int kEarly = kBlock == 256 ? 1 : 4;

  static __device__ __forceinline__ void run(const ScanArgs& args, Tickets::Shared* shared_tickets,
                                             Shared& shared, int stages) {
    if (threadIdx.x < kBlock) {
      if constexpr (kNextTile) {
        compute_next_tile(args, shared);
      } else {
        compute_same_tile(args, shared, Memory::kMostStages == 2 && stages == 2);
      }
    } else {
      take_tiles(args, shared_tickets, shared);
    }
  }

  // The second tile is taken only when the first has arrived in shared memory, or blocks that start
  // later would find their predecessors queued behind other work.
  static __device__ __forceinline__ void take_tiles(const ScanArgs& args,
                                                    Tickets::Shared* shared_tickets,
                                                    Shared& shared) {
    const Order order(args, reinterpret_cast<int2*>(shared.a));
    lookback_cleared();
    Tickets tickets(shared_tickets, order.count() > 0, !kNextTile && long_and_few(args.layout));
    Scan::find_tile_into(shared.tiles[0], args, order, tickets.first(), tickets);
    barrier_sync<kThreads>(kTaken);
    for (int n = 0;; ++n) {
      const Tile& tile = shared.tiles[n % kTiles];
      if (tile.sequence < 0) break;
      if (n == 0) barrier_sync<kThreads>(kStarted);
      Scan::find_tile_into(shared.tiles[(n + 1) % kTiles], args, order, tickets.next(), tickets);
      if constexpr (kNextTile) {
        find_carry(args, tile, shared, n);
      } else {
        if (tile.slot >= 0) look_early(args, tile, shared, n);
        barrier_sync<kThreads>(kFolded);
      }
    }
    if (kNextTile) barrier_sync<kThreads>(kFolded);
  }

  // --- next_tile

  static __device__ __forceinline__ void compute_next_tile(const ScanArgs& args, Shared& shared) {
    const Lane lane;
    Segments now, earlier;
    barrier_sync<kThreads>(kTaken);
    Memory::fetch(args, shared.tiles[0], lane, shared, 0);
    for (int n = 0;; ++n) {
      const Tile& tile = shared.tiles[n % kTiles];
      const bool more = tile.sequence >= 0, scans = more && tile.slot >= 0;
      typename Scan::Held held;
      if (more) {
        typename Scan::OfChannels parameters;
        Memory::load_parameters(args, tile, lane, parameters);
        wait_for_copies();
        if (n == 0) barrier_sync<kThreads>(kStarted);
        if (scans) {
          Scan::fold_tile(args, tile, lane, shared, 0, parameters, held);
          const Affine<V> total = Scan::fold_groups(shared, n, now);
          if (Scan::group_of_thread() == 0) {
            const int channel = Scan::channel_of_thread();
            shared.total_a[n % 2][channel] = total.a;
            shared.total_b[n % 2][channel] = total.b;
            Scan::publish_aggregate(args, tile, channel, total);
          }
        } else {
          Memory::zero(args, tile, lane);
        }
        barrier_sync<kThreads>(kFolded);
        Memory::fetch(args, shared.tiles[(n + 1) % kTiles], lane, shared, 0);
      } else {
        barrier_sync<kThreads>(kFolded);
      }
      const Tile& before = shared.tiles[(n + kTiles - 1) % kTiles];
      if (n > 0 && before.slot >= 0) {
        V h[kVec];
        Scan::spread_carry(lane, shared, n - 1, earlier, h);
        Scan::write_run(args, before, lane, shared, 0, held, h);
      }
      if (!more) return;
      if (scans) {
        earlier = now;
#pragma unroll
        for (int k = 0; k < Scan::kRun; ++k) Memory::park(shared, k, held[k]);
      }
    }
  }

  // By the warp that takes the tiles, a lane for each channel; meets the others at kFolded.
  static __device__ __forceinline__ void find_carry(const ScanArgs& args, const Tile& tile,
                                                    Shared& shared, int iteration) {
    static_assert(G::kChannels <= 32, "a lane finds the carry of one channel");
    const int channel = static_cast<int>(threadIdx.x) - kBlock;
    const std::int64_t step = Scan::lookback_step(args);
    const bool real =
        channel < G::kChannels && tile.slot >= 0 && tile.channel + channel < args.layout.channels;
    char* const own = Scan::lookback_word(args, tile, channel);
    bool found = !real;
    V carry = V(0);
    if (real && tile.chunk == 0) {
      carry = Scan::initial_of(args, tile, channel);
      found = true;
    } else if (real && tile.distance >= 2 * static_cast<int>(gridDim.x)) {
      const LookbackWord<V> word =
          LookbackWord<V>::load(own - step);  // long ago, so it may well be a carry
      carry = word.b;
      found = word.is_carry();
    }
    barrier_sync<kThreads>(kFolded);
    const V a = real ? shared.total_a[iteration % 2][channel] : V(1);
    const V b = real ? shared.total_b[iteration % 2][channel] : V(0);
    // Looking any earlier would only keep the words' cache lines busy.
    if (!found) {
      LookbackWords words;
      words.load(own, step, tile.chunk, 0);
      carry = look_back(words, own, step, tile.chunk);
    }
    if (real) {
      Scan::publish_carry(args, tile, channel, fmadd(a, carry, b));
      shared.carry[iteration % 2][channel] = carry;
    }
  }

  // --- same_tile

  // two_stages: there is room for the next tile's inputs beside those that are still read.
  static __device__ __forceinline__ void compute_same_tile(const ScanArgs& args, Shared& shared,
                                                           bool two_stages) {
    const Lane lane;
    const int channel = Scan::channel_of_thread(), group = Scan::group_of_thread();
    barrier_sync<kThreads>(kTaken);
    Memory::fetch(args, shared.tiles[0], lane, shared, 0);
    for (int n = 0;; ++n) {
      const Tile& tile = shared.tiles[n % kTiles];
      if (tile.sequence < 0) return;
      const Tile& coming = shared.tiles[(n + 1) % kTiles];  // from kFolded on
      const int stage = two_stages ? n % 2 : 0, next_stage = two_stages ? (n + 1) % 2 : 0;
      const bool scans = tile.slot >= 0;
      const bool real = tile.channel + channel < args.layout.channels;
      typename Scan::OfChannels parameters;
      Memory::load_parameters(args, tile, lane, parameters);
      wait_for_copies();
      if (n == 0) barrier_sync<kThreads>(kStarted);
      typename Scan::Held held;
      Segments own;
      Affine<V> total;
      LookbackWords words;
      if (scans) {
        Scan::fold_tile(args, tile, lane, shared, stage, parameters, held);
        total = Scan::fold_groups(shared, n, own);
        if (group == 0) Scan::publish_aggregate(args, tile, channel, total);
        // A chunk's carry that was taken longer ago is sure to be known later on. Now, because
        // behind the copies of the next tile these loads would wait.
        if (real && within(kEarly, tile)) {
          words.load(Scan::lookback_word(args, tile, channel), Scan::lookback_step(args),
                     tile.chunk, group * kLookbackWords);
        }
      } else {
        Memory::zero(args, tile, lane);
      }
      barrier_sync<kThreads>(kFolded);
      if (kHeld || two_stages) Memory::fetch(args, coming, lane, shared, next_stage);
      if (scans) {
        if (!shared.known[n % 2]) wait_for_carry(args, tile, shared, n, words, real);
        if (group == 0 && real) {
          Scan::publish_carry(args, tile, channel,
                              fmadd(total.a, shared.carry[n % 2][channel], total.b));
        }
        V h[kVec];
        own.read(shared);  // again: until here the registers had better uses
        Scan::spread_carry(lane, shared, n, own, h);
        Scan::write_run(args, tile, lane, shared, stage, held, h);
      }
      if (!kHeld && !two_stages) Memory::fetch(args, coming, lane, shared, 0);
    }
  }

  // Whether the chunk before was taken within so many halves of a round of all blocks.
  static __device__ __forceinline__ bool within(int halves, const Tile& tile) {
    return tile.chunk > 0 && 2 * tile.distance < halves * static_cast<int>(gridDim.x);
  }

  // From the words to shared.carry: the group that looks at the oldest chunks hands its fold on to
  // the next.
  static __device__ __forceinline__ void wait_for_carry(const ScanArgs& args, const Tile& tile,
                                                        Shared& shared, int iteration,
                                                        LookbackWords& words, bool real) {
    const int channel = Scan::channel_of_thread(), group = Scan::group_of_thread();
    const std::int64_t step = Scan::lookback_step(args);
    const char* const own = Scan::lookback_word(args, tile, channel);
    V& carry = shared.carry[iteration % 2][channel];
    const int oldest = min(G::kGroups - 1, (tile.chunk - 1) / kLookbackWords),
              base = group * kLookbackWords;
    if (group <= oldest && real) {
      if (!within(kEarly, tile)) words.load(own, step, tile.chunk, base);
      if (group == oldest) {
        carry = look_back(words, own - base * step, step, tile.chunk - base);
      } else {
        words.wait(own, step, tile.chunk, base);
      }
    }
    for (int g = oldest - 1; g >= 0; --g) {
      barrier_sync<kBlock>(kComputing);
      if (group == g && real) carry = words.fold(carry);
    }
    barrier_sync<kBlock>(kComputing);
  }

  // Where all blocks work on neighbouring chunks, tiles held back cost more than blocks that run
  // unevenly; in few iterations the uneven last one costs more.
  static __device__ __forceinline__ bool long_and_few(const Layout& lay) {
    const std::int64_t columns = (lay.channels + G::kChannels - 1) / G::kChannels;
    return 2 * lay.sequences * columns < gridDim.x &&
           lay.tokens / kScanChunk * columns > 8 * gridDim.x;
  }

  // Puts down the carry where there is none to be waited for, or where that of the chunk before,
  // taken half a round of all blocks ago or more, arrives in the time of some looks, which is about
  // that of folding the tile.
  static __device__ __forceinline__ void look_early(const ScanArgs& args, const Tile& tile,
                                                    Shared& shared, int iteration) {
    constexpr int kEach = (G::kChannels + 31) / 32;  // neighbouring channels of a lane
    constexpr int kTries = 3;
    const int channel = static_cast<int>(threadIdx.x) % 32 * kEach;
    const std::int64_t left = args.layout.channels - tile.channel - channel;
    const int real = channel >= G::kChannels || left < 0 ? 0
                     : left < kEach                      ? static_cast<int>(left)
                                                         : kEach;
    const char* const before = Scan::lookback_word(args, tile, channel) - Scan::lookback_step(args);
    V carry[kEach] = {};
    bool known = real == 0;
    if (tile.chunk == 0) {
      known = true;
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        if (i < real) carry[i] = Scan::initial_of(args, tile, channel + i);
      }
    } else if (!within(1, tile)) {
      for (int tries = 0; tries < kTries && !known; ++tries) {
        known = true;
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
          if (i >= real) break;
          const LookbackWord<V> word = LookbackWord<V>::load(before + i * sizeof(LookbackWord<V>));
          known = known && word.is_carry();
          carry[i] = word.b;
        }
      }
    }
    known = __all_sync(0xffffffffu, known);
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (i < real) shared.carry[iteration % 2][channel + i] = carry[i];
    }
    if (channel == 0) shared.known[iteration % 2] = known;
  }
};

}  // namespace cuda
}  // namespace minserve
