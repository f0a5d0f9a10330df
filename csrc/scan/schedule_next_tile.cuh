// Tiles written one turn after they were folded, so that their carries have all that time to
// arrive: for four- and eight-byte forward scans.
//
// The warp that takes the tiles finds the carries meanwhile.
#pragma once

#include "scan.cuh"

namespace minserve {
namespace cuda {

template <template <class> class CellOf, class O, class T, bool kAligned>
struct LaggingScan : TileScan<CellOf, O, T, kAligned> {
  using Scan = TileScan<CellOf, O, T, kAligned>;
  using Memory = typename Scan::Memory;
  using V = typename Scan::V;
  using G = typename Scan::G;
  using Shared = typename Scan::Shared;
  using Lane = typename Scan::Lane;
  using Segments = typename Scan::Segments;
  static constexpr int kBlock = Scan::kBlock, kTiles = Memory::kTiles, kVec = Scan::kVec;
  static constexpr int kThreads = Scan::kThreads, kMinBlocks = Scan::blocks_at_once(3);
  // Chunks looked at together: as many as stay in registers.
  static constexpr int kWindow = sizeof(V) == 8 ? 4 : 16;
  // At kFolded the carry into the tile before and the next tile are known too; it also comes once
  // when there is no more tile.
  static constexpr int kTaken = Scan::kTaken, kStarted = Scan::kStarted;
  static constexpr int kFolded = Scan::kFolded;
  static_assert(G::kChannels <= 32, "a lane finds the carry of one channel");

  static __device__ __forceinline__ void run(const ScanArgs& args, Tickets::Shared* shared_tickets,
                                             Shared& shared, int) {
    if (threadIdx.x < kBlock) {
      compute(args, shared);
    } else {
      find_carries(args, shared_tickets, shared);
    }
  }

  static __device__ __forceinline__ void compute(const ScanArgs& args, Shared& shared) {
    const Lane lane;
    Segments now, earlier;
    barrier_sync<kThreads>(kTaken);
    Memory::fetch(args, shared.tiles[0], lane, shared, 0);
    for (int n = 0;; ++n) {
      const Tile& tile = shared.tiles[n % kTiles];
      const bool more = tile.sequence >= 0, scans = more && tile.slot >= 0;
      typename Scan::Held held;
      if (more) {
        wait_for_copies();
        if (n == 0) barrier_sync<kThreads>(kStarted);
        if (scans) {
          Scan::fold_tile(args, tile, lane, shared, 0, held);
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

  // The second tile is taken only when the first has arrived in shared memory, or blocks that start
  // later would find their predecessors queued behind other work.
  static __device__ __forceinline__ void find_carries(const ScanArgs& args,
                                                      Tickets::Shared* shared_tickets,
                                                      Shared& shared) {
    const int channel = static_cast<int>(threadIdx.x) - kBlock;
    const std::int64_t step = Scan::word_step(args);
    const Order order(args, reinterpret_cast<int2*>(shared.a));
    words_cleared();
    Tickets tickets(shared_tickets, order.places() > 0, false);
    Scan::find_tile_into(shared.tiles[0], args, order, tickets.first(), tickets);
    barrier_sync<kThreads>(kTaken);
    for (int n = 0;; ++n) {
      const Tile& tile = shared.tiles[n % kTiles];
      if (tile.sequence < 0) break;
      if (n == 0) barrier_sync<kThreads>(kStarted);
      Scan::find_tile_into(shared.tiles[(n + 1) % kTiles], args, order, tickets.next(), tickets);
      const bool real =
          channel < G::kChannels && tile.slot >= 0 && tile.channel + channel < args.layout.channels;
      char* const own = Scan::word_of(args, tile, channel);
      bool found = !real;
      V carry = V(0);
      if (real && tile.chunk == 0) {
        carry = Scan::initial_of(args, tile, channel);
        found = true;
      } else if (real && tile.distance >= 2 * static_cast<int>(gridDim.x)) {
        const Word<V> word = Word<V>::load(own - step);  // long ago, so it may well be a carry
        carry = word.b;
        found = word.is_carry();
      }
      barrier_sync<kThreads>(kFolded);
      const V a = real ? shared.total_a[n % 2][channel] : V(1);
      const V b = real ? shared.total_b[n % 2][channel] : V(0);
      // Looking any earlier would only keep the words' cache lines busy.
      if (!found) {
        Window<V, kWindow> window;
        window.load(own, step, tile.chunk, 0);
        carry = look_back(window, own, step, tile.chunk);
      }
      if (real) {
        Scan::publish_carry(args, tile, channel, fmadd(a, carry, b));
        shared.carry[n % 2][channel] = carry;
      }
    }
    barrier_sync<kThreads>(kFolded);
  }
};

}  // namespace cuda
}  // namespace minserve
