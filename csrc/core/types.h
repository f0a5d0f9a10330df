// Storage types, and where sequences lie in token rows; for host and device code. No torch in here.
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

MS_HD std::int64_t divided_up(std::int64_t x, std::int64_t by) {
  return (x + by - 1) / by;
}

// Elements under which another CPU thread costs more than it brings.
constexpr std::int64_t kGrainElements = 8192;

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

}  // namespace minserve
