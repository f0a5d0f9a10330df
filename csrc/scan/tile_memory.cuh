// A tile's way through memory: inputs into shared memory ahead of time, parked values, outputs.
#pragma once

#include <type_traits>

#include "../core/vec16.cuh"
#include "../cells/gates.h"
#include "parameters.cuh"
#include "tiles.cuh"

namespace minserve {
namespace cuda {

// When a tile's outputs are written: before the next tile is folded, or after (tile_loop.cuh).
enum class TileSchedule { same_tile, next_tile };

template <template <class> class CellOf, class O, class T, bool kAligned>
struct TileMemory {
  using V = typename ComputeType<T>::type;
  using Cell = CellOf<V>;
  static constexpr bool kHeld = Cell::kPrevious < 0;
  static_assert(kHeld || Cell::kParameters == 0, "backward cells read none");
  using G = Geometry<T, Cell::kInputs, kHeld>;
  static constexpr int kVec = G::kVec, kRun = G::kRun, kBlock = G::kBlock;
  static constexpr TileSchedule kSchedule =
      kHeld && sizeof(T) > 2 ? TileSchedule::next_tile : TileSchedule::same_tile;
  static constexpr bool kNextTile = kSchedule == TileSchedule::next_tile;
  static constexpr int kParity = kNextTile ? 2 : 1;
  // Backward cells with room for two stages fetch a tile while the one before is still read.
  static constexpr int kMostStages = kHeld || G::kStageBytes > 49152 ? 1 : 2;
  static constexpr int kTiles = 4;
  static constexpr bool kAnyOptions = sizeof(O) > 1;

  // The (a, b) of these rows of a thread's run wait for the carry in registers, those of the others
  // in shared memory, where each thread finds its own again: all of them where the next tile's take
  // their place.
  static constexpr int kInRegisters = !kHeld                           ? 1
                                      : kNextTile || kRun * kVec <= 32 ? kRun
                                                                       : 32 / kVec;
  static constexpr int kParked = kNextTile ? kRun : kHeld ? kRun - kInRegisters : 0;
  static constexpr int kParkedPacks = 2 * kVec * static_cast<int>(sizeof(V)) / 16;

  // Lines of global memory that are copied across lines of shared memory take a seventh longer.
  static constexpr int kLine = 128;
  using PerRun = V[G::kSegments][G::kChannels];
  template <int kWhich>
  struct Nothing {};
  struct Parking {
    alignas(kLine) uint4 parked[kParked > 0 ? kParked : 1][kParkedPacks][kBlock];
  };
  struct OfNextTile {
    PerRun entry;                                          // carries into the segments
    V total_a[2][G::kChannels], total_b[2][G::kChannels];  // aggregates of tiles
  };
  struct Shared : std::conditional_t<(kParked > 0), Parking, Nothing<0>>,
                  std::conditional_t<kNextTile, OfNextTile, Nothing<1>> {
    PerRun a, b;  // aggregates of the segments
    // Of two tiles, by the parity of their iterations, with next_tile.
    V group_a[kParity][G::kGroups][G::kChannels];
    V group_b[kParity][G::kGroups][G::kChannels];
    // Of two tiles, by the parity of their iterations.
    V carry[2][G::kChannels];  // into the tile
    int known[2];              // whether it was known early
    Tile tiles[kTiles];
    // At the end, so that a launch may do with fewer.
    alignas(kLine) uint4 stage[kMostStages][Cell::kInputs][kRun][kBlock];

    // Where the carries into the segments lie: with same_tile, in the place of b.
    __device__ __forceinline__ PerRun& entries() {
      if constexpr (kNextTile) {
        return this->entry;
      } else {
        return b;
      }
    }
  };

  static constexpr int shared_bytes(int stages) {
    return static_cast<int>(sizeof(Shared)) - (kMostStages - stages) * G::kStageBytes;
  }

  using OfChannels = ChannelParameters<Cell, V, kVec>;

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
  static __device__ __forceinline__ void load_parameters(const ScanArgs& args, const Tile& tile,
                                                         const Lane& lane, OfChannels& to) {
    to.template load<kAligned>(args, tile.channel + lane.channel,
                               channels_left(args, tile, lane.channel));
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
        if (k < left) start_copy_of_16(to + k * kBlock, none ? from - step : from);
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
};

}  // namespace cuda
}  // namespace minserve
