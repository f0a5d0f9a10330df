// Storage types and the arguments of a scan, shared by host and device code. No torch in here.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define MS_HD __host__ __device__ __forceinline__
#else
#define MS_HD inline __attribute__((always_inline))
#endif

namespace minserve {

// Two-byte floats as tags around their bits: every conversion is written out in load and store.
struct bf16 {
  std::uint16_t bits;
};
struct f16 {
  std::uint16_t bits;
};

enum class Dtype { f32, f64, bf16, f16 };

// Time is cut here, counted from the sequence's start in scan order. The carry handed on by a chunk
// is A * h + B with the chunk's aggregate (A, B); inside a chunk every value is formed in one fixed
// way from the carry-in. Every regime does exactly this, so results do not depend on batch, threads
// or chunk-multiple splits.
constexpr std::int64_t kScanChunk = 128;

// Work on the CPU is handed out in runs of channels: multiples of a cache line of two-byte floats,
// and no wider than what a thread keeps of each channel has room for in its caches.
constexpr std::int64_t kNarrowestItem = 32;
constexpr std::int64_t kWidestItem = 2048;

// Where sequences lie in the token rows: packed (cu_seqlens) or uniform (time rows each).
struct Layout {
  std::int64_t sequences = 0;
  std::int64_t tokens = 0;
  std::int64_t channels = 0;
  std::int64_t time = 0;                     // rows per sequence when cu_seqlens is null
  const std::int32_t* cu_seqlens = nullptr;  // [sequences + 1]
  const std::int32_t* slots = nullptr;       // [sequences]; null: sequence s has row s
  std::int64_t num_slots = 0;
  bool reverse = false;

  // Row range of sequence s; s == sequences is the padding tail. Clamped, so that bad device-side
  // indices can give wrong numbers but never an access out of bounds.
  MS_HD std::int64_t begin(std::int64_t s) const {
    std::int64_t at = cu_seqlens ? static_cast<std::int64_t>(cu_seqlens[s]) : s * time;
    return at < 0 ? 0 : (at > tokens ? tokens : at);
  }
  MS_HD std::int64_t end(std::int64_t s) const {
    if (s == sequences) return tokens;
    std::int64_t from = begin(s), to = begin(s + 1);
    return to < from ? from : to;
  }
  // Row of the state tensor, or -1: padding (or out of range, which the host path has refused).
  MS_HD std::int64_t slot(std::int64_t s) const {
    if (s == sequences) return -1;
    if (!slots) return s;
    std::int64_t at = slots[s];
    return at >= 0 && at < num_slots ? at : -1;
  }
  // Chunks are numbered without a prefix sum: those of sequence s start at begin / chunk + s, which
  // leaves room for ceil(length / chunk) of them. Some numbers stay unused.
  MS_HD std::int64_t first_chunk(std::int64_t s) const { return begin(s) / kScanChunk + s; }
  MS_HD std::int64_t chunk_bound() const { return tokens / kScanChunk + sequences + 1; }
  MS_HD std::int64_t sequence_of_chunk(std::int64_t chunk) const {
    std::int64_t low = 0, high = sequences;  // the largest s with first_chunk(s) <= chunk
    while (low < high) {
      std::int64_t middle = (low + high + 1) / 2;
      if (first_chunk(middle) <= chunk) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    return low;
  }
};

// One array that a scan reads or writes once: element (row, channel) is at row * stride + channel.
struct Stream {
  void* data = nullptr;
  std::int64_t stride = 0;
};

constexpr int kMaxInputs = 5;
constexpr int kMaxOutputs = 3;

// One struct for all scans. What the streams mean is the cell's business (<operator>/cell.h); all
// have the operator's dtype.
struct ScanArgs {
  Layout layout;
  Stream inputs[kMaxInputs];
  Stream outputs[kMaxOutputs];
  // State before the first element, for backward cells that read the previous state: rows
  // [sequences, channels], accumulation type; null: zero.
  const void* h0 = nullptr;
  // Carry into the first chunk (null: zero) and out of the last (null: not wanted), by slot.
  const void* initial = nullptr;
  std::int64_t initial_stride = 0;
  void* last = nullptr;
  std::int64_t last_stride = 0;
  bool linear_candidate = false;
  bool normalize_gates = true;
  // Whether all streams, and the rows of initial and last, allow 16-byte accesses; set by
  // launchers.
  bool aligned = false;
  bool aligned_state = false;
  // On CUDA: sequences of at most so many positions, not over kScanChunk, are left to short_sequences.cuh,
  // and only longer ones to the tiles; -1: all are theirs.
  std::int64_t short_length = -1;
  MS_HD bool is_short(std::int64_t s) const {
    return layout.end(s) - layout.begin(s) <= short_length;
  }
  // Workspace: on the CPU rows of the accumulation type (scan_cpu.h), on CUDA the words described
  // in scan.cuh.
  void* workspace = nullptr;
};

enum class Phase { serial, aggregate, carry, output };

// How a scan is handed out on the CPU.
struct Share {
  std::int64_t width = 0;    // channels of an item, a multiple of kNarrowestItem
  bool past_caches = false;  // what is written has left the caches by the time anyone reads it
  // Where time is cut: the chunks of this wave, of at most wave_chunks, and the channels of a row
  // of the workspace, a multiple of kNarrowestItem.
  std::int64_t first_chunk = 0, last_chunk = 0, wave_chunks = 0, row_channels = 0;
};

// Does items [begin, end) of a phase on the CPU; how items are numbered is told in scan_cpu.h.
using ScanFn = void (*)(const ScanArgs&, const Share&, Phase, std::int64_t begin, std::int64_t end);

struct ConvArgs {
  Layout layout;
  std::int64_t taps = 0;
  const void* x = nullptr;       // [tokens, channels]
  const void* weight = nullptr;  // [channels, taps]
  const void* bias = nullptr;    // [channels] or null
  float* state = nullptr;        // [num_slots, taps - 1, channels]
  std::int64_t slot_stride = 0;
  std::int64_t tap_stride = 0;
  void* out = nullptr;
  float* weight_rows =
      nullptr;  // CPU workspace: [taps + 1, channels], weights turned, then the bias
};

using ConvFn = void (*)(const ConvArgs&, Phase, std::int64_t begin, std::int64_t end);

}  // namespace minserve
