// How a scan is cut into tiles, and in which order running blocks take them.
//
// A tile is one chunk of time by kChannels channels. The block that holds a tile knows that
// every earlier one is finished or belongs to a block that runs (see Tickets): waiting for an
// earlier tile always ends. Order: the sequences are handed to up to 32 streams that advance side
// by side, a chunk of each at a time with all its channels; the more streams, the longer ago was
// the chunk before, whose carry a tile needs.
#pragma once

#include "args.h"

namespace minserve {
namespace cuda {

// A warp covers kLanes channel vectors by 32 / kLanes segments of time; a thread holds kRun
// positions of one segment by kVec channels. The segments of all warps make up the chunk.
template <class T, int kInputs, bool kHeld>
struct Geometry {
  static constexpr int kVec = 16 / static_cast<int>(sizeof(T));
  // Rows of a tile are pieces of 128 bytes or more: the L2 cache is limited by requests as well.
  // The block of three two-byte streams is wide, or too few would fit a multiprocessor.
  static constexpr int kBlock = kHeld && sizeof(T) == 2 && kInputs == 3 ? 256 : 128;
  static constexpr int kWarps = kBlock / 32;
  // Longer runs would leave a multiprocessor room for fewer blocks.
  static constexpr int kRun = !kHeld && sizeof(T) == 2 ? 4 : kBlock == 256 ? 4 : 8;
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
  std::int64_t row;                // of the first position
  std::int64_t word;               // of the first channel
  std::int64_t input[kMaxInputs];  // first element in each stream
  std::int64_t output[kMaxOutputs];
  int first_position;  // where the forward scan of this sequence begins, for
                       // backward cells
  int sequence;        // -1: no more tiles
  int slot;            // of the state; negative: zero the rows
  int chunk;           // of the sequence
  int channel;         // first channel
  int count;           // positions, up to kScanChunk; 0 only in a sequence without rows
  bool last;           // chunk of the sequence
  int distance;        // in places of the order, to the chunk before
};

// The largest s in [low, low + count) with first_chunk(s) <= chunk, found by a
// whole warp, 32 probes at a time; low must be one of them.
__device__ __forceinline__ int find_sequence(const Layout& lay, int chunk, int low, int count) {
  const int lane = threadIdx.x % 32;
  while (count > 1) {
    const int step = (count + 31) / 32;
    const bool below = lane * step < count && lay.first_chunk(low + lane * step) <= chunk;
    const int passed = __popc(__ballot_sync(0xffffffffu, below)) - 1;  // lane 0 always passes
    low += passed * step;
    count = min(count - passed * step, step);
  }
  return low;
}

// A chunk in the order, and its sequence.
struct OrderedChunk {
  int number;  // of the chunk
  int sequence;
  int abreast;              // how many streams advance side by side there
  std::int64_t begin, end;  // rows of the sequence
  int slot;
};

// The order of the chunk numbers, spread over the lanes of one warp. Stream n begins at lane n's
// `first` chunk and `sequence`. Streams end one after another; in phase n, described by lane n,
// those of rank n and more are left, and `owner` is the stream of that rank.
class Order {
 public:
  // scratch: 32 of shared memory
  __device__ __forceinline__ Order(const ScanArgs& args, int2* scratch)
      : lane_(static_cast<int>(threadIdx.x) % 32) {
    const Layout& lay = args.layout;
    const bool only_long = args.short_length >= 0;        // have tiles, if they are few
    const int all = static_cast<int>(lay.sequences) + 1;  // with the padding tail
    const int sequences = only_long ? list_long(args, all, scratch) : all;
    if (sequences == 0) return;
    streams_ = min(sequences, 32);
    direct_ = sequences <= 32;
    int length = 0x7fffffff;
    if (direct_) {
      // A stream for each sequence, of the chunks that it has; what is asked for again and again
      // stays in registers.
      sequence_ = min(lane_, sequences - 1);
      if (only_long) sequence_ = scratch[sequence_].x;
      begin_ = lay.begin(sequence_), end_ = lay.end(sequence_);
      slot_ = static_cast<int>(lay.slot(sequence_));
      first_ = static_cast<int>(lay.first_chunk(sequence_));
      const std::int64_t chunks = (end_ - begin_ + kScanChunk - 1) / kScanChunk;
      // A sequence without rows still hands its initial carry on as the last one.
      if (lane_ < streams_) length = chunks == 0 && slot_ >= 0 ? 1 : static_cast<int>(chunks);
    } else {
      // Equal shares of the chunk numbers, cut where a sequence begins.
      const int bound = static_cast<int>(lay.chunk_bound());
      sequence_ =
          static_cast<int>(lay.sequence_of_chunk(static_cast<std::int64_t>(lane_) * bound / 32));
      first_ = lane_ == 0 ? 0 : static_cast<int>(lay.first_chunk(sequence_));
      const int next = __shfl_down_sync(kAll, first_, 1);
      length = (lane_ < 31 ? next : bound) - first_;
    }
    int rank = 0;
    for (int other = 0; other < 32; ++other) {
      const int theirs = __shfl_sync(kAll, length, other);
      rank += theirs < length || (theirs == length && other < lane_);
    }
    __syncwarp();  // the list has been read
    scratch[rank] = make_int2(length, lane_);
    __syncwarp();
    const int level = scratch[lane_].x;
    owner_ = scratch[lane_].y;
    level_before_ = __shfl_up_sync(kAll, level, 1);
    if (lane_ == 0) level_before_ = 0;
    const int own = lane_ < streams_ ? (level - level_before_) * (streams_ - lane_) : 0;
    through_ = own;
    for (int distance = 1; distance < 32; distance *= 2) {
      const int theirs = __shfl_up_sync(kAll, through_, distance);
      if (lane_ >= distance) through_ += theirs;
    }
    before_ = through_ - own;
  }

  // How many there are.
  __device__ __forceinline__ int count() const { return __shfl_sync(kAll, through_, 31); }

  __device__ __forceinline__ OrderedChunk locate(const Layout& lay, int n) const {
    const int phase = __popc(__ballot_sync(kAll, lane_ < streams_ && through_ <= n));
    const int in_phase = n - __shfl_sync(kAll, before_, phase);
    OrderedChunk ordered;
    ordered.abreast = streams_ - phase;
    const int step = in_phase / ordered.abreast;
    const int owner = __shfl_sync(kAll, owner_, (phase + in_phase - step * ordered.abreast) % 32);
    ordered.number =
        __shfl_sync(kAll, first_, owner) + __shfl_sync(kAll, level_before_, phase) + step;
    ordered.sequence = __shfl_sync(kAll, sequence_, owner);
    if (direct_) {
      ordered.begin = __shfl_sync(kAll, begin_, owner);
      ordered.end = __shfl_sync(kAll, end_, owner);
      ordered.slot = __shfl_sync(kAll, slot_, owner);
      return ordered;
    }
    const int next = __shfl_sync(kAll, sequence_, (owner + 1) % 32);
    const int last = owner == 31 ? static_cast<int>(lay.sequences) : next;
    ordered.sequence =
        find_sequence(lay, ordered.number, ordered.sequence, last - ordered.sequence + 1);
    ordered.begin = lay.begin(ordered.sequence), ordered.end = lay.end(ordered.sequence);
    ordered.slot = static_cast<int>(lay.slot(ordered.sequence));
    return ordered;
  }

 private:
  static constexpr unsigned kAll = 0xffffffffu;

  // Puts down which sequences are not short, and returns how many; more than 32 are not all found.
  __device__ __forceinline__ int list_long(const ScanArgs& args, int sequences,
                                           int2* scratch) const {
    constexpr int kAtOnce = 4;  // loads on their way
    int count = 0;
    for (int first = 0; first < sequences && count <= 32; first += 32 * kAtOnce) {
      bool is_long[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int s = first + 32 * i + lane_;
        is_long[i] = s < sequences && !args.is_short(s);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const unsigned found = __ballot_sync(kAll, is_long[i]);
        const int at = count + __popc(found & ((1u << lane_) - 1));
        if (is_long[i] && at < 32) scratch[at].x = first + 32 * i + lane_;
        count += __popc(found);
      }
    }
    __syncwarp();
    return count;
  }

  int lane_, streams_, first_, sequence_, owner_ = 0, level_before_, before_, through_ = 0;
  bool direct_;
  std::int64_t begin_ = 0, end_ = 0;
  int slot_ = 0;
};

// Which tiles of the order a block takes. Called by one whole warp.
//
// By tickets: a block that is ready takes the next. Round robin: every block takes each
// gridDim.x-th tile, so that no block can hold a tile that others wait for behind one that waits
// itself; but a tile is sure to be taken only if all blocks run. That is known when the last of the
// first tickets has been taken; blocks that see it too late agree on tickets.
class Tickets {
 public:
  // All ones at the start.
  struct Shared {
    unsigned counter, agreement;
  };

  // any: whether there are tiles; where none are, a ticket for one beyond them is not taken.
  __device__ __forceinline__ Tickets(Shared* shared, bool any, bool prefer_round_robin)
      : shared_(shared),
        policy_(prefer_round_robin ? kOpen : kByTickets),
        own_(any ? next_ticket() : gridDim.x) {
    // While the policy is open no block takes a second ticket.
    if (own_ == gridDim.x - 1 && first_lane()) atomicCAS(&shared_->agreement, kOpen, kRoundRobin);
  }
  __device__ __forceinline__ unsigned first() const { return own_; }

  __device__ __forceinline__ unsigned next() {
    if (policy_ == kOpen) policy_ = agree();
    return policy_ == kRoundRobin ? own_ += gridDim.x : next_ticket();
  }

 private:
  static constexpr unsigned kAll = 0xffffffffu;
  static constexpr unsigned kOpen = 0xffffffffu, kRoundRobin = 0, kByTickets = 1;

  static __device__ __forceinline__ bool first_lane() { return threadIdx.x % 32 == 0; }
  __device__ __forceinline__ unsigned next_ticket() const {
    return __shfl_sync(kAll, first_lane() ? atomicAdd(&shared_->counter, 1u) + 1u : 0, 0);
  }
  // Waits a little for the blocks that have not started yet.
  __device__ __forceinline__ unsigned agree() const {
    constexpr int kTries = 32;
    unsigned agreed = kOpen;
    for (int tries = 1; first_lane() && tries <= kTries && agreed == kOpen; ++tries) {
      if (tries > 1) __nanosleep(256);
      const unsigned offer = tries < kTries ? kOpen : kByTickets;
      agreed = atomicCAS(&shared_->agreement, kOpen, offer);
    }
    agreed = __shfl_sync(kAll, agreed, 0);
    return agreed == kOpen ? kByTickets : agreed;
  }

  Shared* shared_;
  unsigned policy_, own_;
};

// The tile of a ticket, or of the next one that has work; called by one whole warp.
__device__ __forceinline__ Tile find_tile(const ScanArgs& args, const Order& order, unsigned ticket,
                                          Tickets& tickets, int channels) {
  const Layout& lay = args.layout;
  const unsigned blocks = static_cast<unsigned>((lay.channels + channels - 1) / channels);
  const unsigned total = static_cast<unsigned>(order.count()) * blocks;
  Tile tile;
  for (;; ticket = tickets.next()) {
    if (ticket >= total) {
      tile.sequence = -1;
      return tile;
    }
    const int n = static_cast<int>(ticket / blocks);
    const OrderedChunk ordered = order.locate(lay, n);
    tile.distance = ordered.abreast * static_cast<int>(blocks);
    tile.channel = static_cast<int>(ticket - n * blocks) * channels;
    const int number = ordered.number, s = ordered.sequence;
    const std::int64_t begin = ordered.begin, end = ordered.end;
    tile.chunk = number - static_cast<int>(begin / kScanChunk) - s;
    const std::int64_t done = tile.chunk * kScanChunk, left = end - begin - done;
    tile.slot = ordered.slot;
    const bool empty = left == 0 && tile.chunk == 0 && tile.slot >= 0;
    if (left <= 0 && !empty) continue;  // a number that no chunk has
    if (tile.chunk < 0) continue;       // cu_seqlens that do not begin at 0
    if (end - begin <= args.short_length) continue;
    tile.sequence = s;
    tile.row = lay.reverse ? end - 1 - done : begin + done;
    tile.word = number * lay.channels + tile.channel;
    tile.last = left <= kScanChunk;
    tile.count = static_cast<int>(tile.last ? left : kScanChunk);
    // A backward scan ends where the forward one began.
    tile.first_position = tile.last ? tile.count - 1 : -1;
    return tile;
  }
}

}  // namespace cuda
}  // namespace minserve
