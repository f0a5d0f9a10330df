// How a scan is cut into tiles, and how running blocks take them in order.
//
// A tile is one chunk of time by kChannels channels. Tiles are numbered chunk by chunk, channel
// blocks innermost, and are taken from a counter: whoever holds a tile knows that every earlier one
// is finished or held by a block that runs, so waiting for an earlier tile always ends.
#pragma once

#include "types.h"
#ifndef MS_RUN2
#define MS_RUN2 4
#endif
#ifndef MS_RUN4
#define MS_RUN4 8
#endif
#ifndef MS_MINB
#define MS_MINB 2
#endif
#ifndef MS_WINDOW
#define MS_WINDOW 8
#endif

namespace minserve {
namespace cuda {

#ifndef MS_BLOCK
#define MS_BLOCK 256
#endif
constexpr int kBlock = MS_BLOCK;  // threads
constexpr int kWarps = kBlock / 32;

// A warp covers kLanes channel vectors by 32 / kLanes segments of time; a thread holds kRun
// positions of one segment by kVec channels. The segments of all warps make up the chunk.
template <class T, int kInputs, bool kHeld>
struct Geometry {
  static constexpr int kVec = 16 / static_cast<int>(sizeof(T));
  // As long a run as registers (32 held elements) and shared memory (64 KiB staged) allow.
  static constexpr int kRunHeld = sizeof(T) == 2 ? MS_RUN2 : MS_RUN4;
  static constexpr int kRun = kInputs * kRunHeld * kBlock * 16 <= 65536 ? kRunHeld : kRunHeld / 2;
  static constexpr int kSegmentsPerWarp = static_cast<int>(kScanChunk) / (kWarps * kRun);
  static constexpr int kLanes = 32 / kSegmentsPerWarp;
  static constexpr int kChannels = kLanes * kVec;
  static constexpr int kSegments = kWarps * kSegmentsPerWarp;
  static constexpr int kGroups = kBlock / kChannels;  // threads that share a channel
  static constexpr int kGroupSegments = kSegments / kGroups;
  static constexpr int kStageBytes = kInputs * kRun * kBlock * 16;
  static_assert(kSegmentsPerWarp * kWarps * kRun == kScanChunk, "segments fill the chunk");
  static_assert(kGroups * kGroupSegments == kSegments, "groups share the segments evenly");
};

struct Tile {
  std::int64_t row;        // of the first position
  std::int64_t word;       // of the first channel
  std::int64_t first_row;  // of the forward scan in this sequence
  int sequence;            // -1: no more tiles
  int slot;                // of the state; negative: zero the rows
  int chunk;               // of the sequence
  int channel;             // first channel
  int count;               // positions, up to kScanChunk; 0 only in a sequence without rows
  bool last;               // chunk of the sequence
};

// The largest s in [0, sequences] with first_chunk(s) <= chunk, found by a whole warp, 32 probes at
// a time.
__device__ __forceinline__ int find_sequence(const Layout& lay, int chunk) {
  const int lane = threadIdx.x % 32;
  int low = 0, count = static_cast<int>(lay.sequences) + 1;  // the answer is in [low, low + count)
  while (count > 1) {
    const int step = (count + 31) / 32;
    const bool below = lane * step < count && lay.first_chunk(low + lane * step) <= chunk;
    const int passed = __popc(__ballot_sync(0xffffffffu, below)) - 1;  // lane 0 always passes
    low += passed * step;
    count = min(count - passed * step, step);
  }
  return low;
}

// The next tile that has work; called by one whole warp.
__device__ __forceinline__ Tile next_tile(const Layout& lay, unsigned* counter, int channels) {
  const unsigned blocks = static_cast<unsigned>((lay.channels + channels - 1) / channels);
  const unsigned total = static_cast<unsigned>(lay.chunk_bound()) * blocks;
  Tile tile;
  for (;;) {
    unsigned ticket = 0;
    // The counter starts at all ones, as cudaMemsetAsync left it.
    if (threadIdx.x % 32 == 0) ticket = atomicAdd(counter, 1u) + 1u;
    ticket = __shfl_sync(0xffffffffu, ticket, 0);
    if (ticket >= total) {
      tile.sequence = -1;
      return tile;
    }
    const int number = static_cast<int>(ticket / blocks);
    tile.channel = static_cast<int>(ticket % blocks) * channels;
    const int s = find_sequence(lay, number);
    tile.chunk = number - static_cast<int>(lay.first_chunk(s));
    const std::int64_t begin = lay.begin(s), end = lay.end(s);
    const std::int64_t done = tile.chunk * kScanChunk, left = end - begin - done;
    tile.slot = static_cast<int>(lay.slot(s));
    // A sequence without rows still hands its initial carry on as the last one.
    const bool empty = left == 0 && tile.chunk == 0 && tile.slot >= 0;
    if (left <= 0 && !empty) continue;  // a number that no chunk has
    tile.sequence = s;
    tile.row = lay.reverse ? end - 1 - done : begin + done;
    tile.first_row = lay.reverse ? begin : end - 1;
    tile.word = number * lay.channels + tile.channel;
    tile.last = left <= kScanChunk;
    tile.count = static_cast<int>(tile.last ? left : kScanChunk);
    return tile;
  }
}

}  // namespace cuda
}  // namespace minserve
