// The best of some logits and whose it is, in one number: bits that order as logits do, NaN above
// all, and the inverted id, so that of equal ones the lowest id counts.
#pragma once

#include <cstdint>

#include "../../arch/ptx.cuh"

namespace minserve {
namespace cuda {

constexpr unsigned kSignBit = 0x80000000u;

__device__ __forceinline__ unsigned order_of(float logit) {
  const unsigned bits = __float_as_uint(logit);
  return logit != logit ? 0xffffffffu : bits & kSignBit ? ~bits : bits | kSignBit;
}
__device__ __forceinline__ float logit_of(unsigned order) {
  return __uint_as_float(order & kSignBit ? order & ~kSignBit : ~order);
}

__device__ __forceinline__ bool is_finite(float logit) {
  return logit - logit == 0.0f;
}

struct ArgmaxKey {
  std::uint64_t key;

  // The logit is not -0, which is no less than 0.
  __device__ static ArgmaxKey of(float logit, unsigned id) {
    return {static_cast<std::uint64_t>(order_of(logit)) << 32 | ~id};
  }
  __device__ float logit() const { return logit_of(static_cast<unsigned>(key >> 32)); }
  __device__ unsigned id() const { return ~static_cast<unsigned>(key); }
  __device__ bool is_finite() const { return cuda::is_finite(logit()); }
};

__device__ __forceinline__ std::uint64_t greater(std::uint64_t x, std::uint64_t y) {
  return x > y ? x : y;
}

}  // namespace cuda
}  // namespace minserve
