// What the blocks of a scan pass to each other: h of every sequence, rounded as products read it,
// in two buffers that take turns, and a flag of each block.
//
// A block's flag counts what it has published: the state before the first token, then one time step
// after the other. Who has seen the flags of all blocks at t may read h of step t - 1, and may
// overwrite that of step t - 2, which nobody reads any more.
#pragma once

#include "../arch/ptx.cuh"
#include "../core/vector_access.cuh"
#include "args.h"

namespace minserve {
namespace cuda {

constexpr int kOctet = 8;   // units whose gates lie side by side
constexpr int kChunk = 32;  // inputs that a warp multiplies with at once
constexpr int kFlagBytes =
    64;  // a flag has these for itself, for many look at it while others write
constexpr int kMostScanBlocks = 1024;

struct GatedExchange {
  unsigned char* data = nullptr;
  std::int64_t inputs = 0;  // units in whole chunks; those beyond the last are zeros
  std::int64_t rows = 0;    // sequences in whole groups

  __device__ __forceinline__ void* flag(int block) const { return data + block * kFlagBytes; }
  // Row `s` before step t.
  template <class T>
  __device__ __forceinline__ T* row(int t, std::int64_t s) const {
    return reinterpret_cast<T*>(data + kMostScanBlocks * kFlagBytes) +
           ((t & 1) * rows + s) * inputs;
  }
};

// Has a warp wait until blocks [first, last] have published so much.
__device__ __forceinline__ void wait_for_flags(const GatedExchange& exchange, int first, int last,
                                               unsigned long long published) {
  for (int block = first + static_cast<int>(threadIdx.x % 32); block <= last; block += 32) {
    while (load_acquire(exchange.flag(block)) < published) look_again();
  }
  __syncwarp();
}

// Neighbouring lanes have neighbouring units of one row: those of eight bytes are stored at once.
// All lanes of a warp call this, or none.
template <class T>
__device__ __forceinline__ void store_units(T* at, float h, bool wanted, T type) {
  const float other = __shfl_xor_sync(0xffffffffu, h, 1);
  const unsigned lane = threadIdx.x % 32;
  if constexpr (sizeof(T) == 4) {
    if (wanted && lane % 2 == 0) {
      store_relaxed(
          at, static_cast<unsigned long long>(__float_as_uint(other)) << 32 | __float_as_uint(h));
    }
  } else {
    const unsigned pair = rounded(h, other, type), next = __shfl_xor_sync(0xffffffffu, pair, 2);
    if (wanted && lane % 4 == 0) {
      store_relaxed(at, static_cast<unsigned long long>(next) << 32 | pair);
    }
  }
}

}  // namespace cuda
}  // namespace minserve
