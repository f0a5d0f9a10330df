// How a block reads a row of logits: each warp a run of neighbouring tokens, four at a time.
#pragma once

#include <cstdint>

#include "block_reduce.cuh"

namespace minserve {
namespace cuda {

constexpr unsigned kTogether = 4;                      // tokens that a lane takes side by side
constexpr unsigned kStride = kTogether * kWarp;        // tokens that a warp takes side by side
constexpr float kImpossible = -__builtin_huge_valf();  // stands for tokens past the end

// In global or in shared memory.
struct Row {
  const float* logits;
  unsigned vocab;
  bool aligned;                         // to 16 bytes
  unsigned warps = blockDim.x / kWarp;  // a constant, where the caller knows it, saves divisions

  __device__ static bool is_aligned(const float* logits) {
    return reinterpret_cast<std::uintptr_t>(logits) % 16 == 0;
  }

  // Tokens [first, last) of a warp; runs are in the order of the warps.
  __device__ unsigned run() const {
    return ((vocab + warps - 1) / warps + kStride - 1) / kStride * kStride;
  }
  __device__ unsigned first(unsigned warp) const {
    const unsigned at = warp * run();
    return at < vocab ? at : vocab;
  }
  __device__ unsigned last(unsigned warp) const {
    const unsigned at = first(warp) + run();
    return at < vocab ? at : vocab;
  }

  __device__ __forceinline__ float4 four(unsigned id) const {
    if (aligned && id + kTogether <= vocab) return *reinterpret_cast<const float4*>(logits + id);
    float4 x = {kImpossible, kImpossible, kImpossible, kImpossible};
    if (id < vocab) x.x = logits[id];
    if (id + 1 < vocab) x.y = logits[id + 1];
    if (id + 2 < vocab) x.z = logits[id + 2];
    if (id + 3 < vocab) x.w = logits[id + 3];
    return x;
  }

  // Calls visit(id, x) for this lane's fours: tokens id to id + 3 and their logits, ids ascending.
  // kAhead fours are on their way before the first of them is visited.
  template <unsigned kAhead, class Visit>
  __device__ __forceinline__ void each(Visit visit) const {
    const unsigned warp = threadIdx.x / kWarp, end = last(warp);
    for (unsigned id = first(warp) + threadIdx.x % kWarp * kTogether; id < end;
         id += kAhead * kStride) {
      float4 x[kAhead];
#pragma unroll
      for (unsigned a = 0; a < kAhead; ++a) {
        if (id + a * kStride < end) x[a] = four(id + a * kStride);
      }
#pragma unroll
      for (unsigned a = 0; a < kAhead; ++a) {
        if (id + a * kStride < end) visit(id + a * kStride, x[a]);
      }
    }
  }
};

// Threads of a block that reads a row: one for each four tokens, up to `most`.
inline unsigned row_threads(std::int64_t vocab, unsigned most) {
  const std::int64_t fours = (vocab + kTogether - 1) / kTogether;
  const std::int64_t threads = (fours + kWarp - 1) / kWarp * kWarp;
  return static_cast<unsigned>(threads < most ? threads : most);
}

}  // namespace cuda
}  // namespace minserve
