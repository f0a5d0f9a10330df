// Two neighbouring channels of one token.
#pragma once

#include "vector_access.cuh"

namespace minserve {
namespace cuda {

__device__ __forceinline__ float2 unpack_bf16x2(unsigned pair) {
  return {number_of(&pair, 0, bf16{}), number_of(&pair, 1, bf16{})};
}
__device__ __forceinline__ float2 load_pair(const void* p, std::int64_t at) {
  return unpack_bf16x2(*reinterpret_cast<const unsigned*>(static_cast<const bf16*>(p) + at));
}

// A convolution's step for a pair of channels of one sequence: what it needs besides the newest
// input is loaded first, so that it may be on its way while something else is done.
template <int kMost>
class Convolution {
 public:
  // taps [channels, count], bias [channels] or null; the inputs before, oldest first, begin at
  // `row` and are tap_stride apart.
  __device__ __forceinline__ void load(const void* taps, const void* bias, int count, int channel,
                                       float* row, std::int64_t tap_stride) {
    count_ = count, row_ = row, stride_ = tap_stride;
    const auto* first = static_cast<const bf16*>(taps) + channel * count;
    bias_ = bias ? *reinterpret_cast<const unsigned*>(static_cast<const bf16*>(bias) + channel) : 0;
#pragma unroll
    for (int k = 0; k < kMost; ++k) {
      if (k < count) low_[k] = first[k], high_[k] = first[count + k];
      if (k + 1 < count) inputs_[k] = *reinterpret_cast<const float2*>(row + k * tap_stride);
    }
  }
  // The inputs before move on. Of a sequence that is none: zeros.
  __device__ __forceinline__ float2 step(float2 x, bool live) {
    float2 y = unpack_bf16x2(bias_);
#pragma unroll
    for (int k = 0; k < kMost; ++k) {
      if (k >= count_) continue;
      const float2 input = k + 1 < count_ ? inputs_[k] : x;
      y.x = fmadd(to_lane(low_[k]), input.x, y.x);
      y.y = fmadd(to_lane(high_[k]), input.y, y.y);
      if (k > 0 && live) *reinterpret_cast<float2*>(row_ + (k - 1) * stride_) = input;
    }
    return live ? y : make_float2(0.0f, 0.0f);
  }

 private:
  int count_;
  unsigned bias_;
  bf16 low_[kMost], high_[kMost];
  float2 inputs_[kMost];
  float* row_;
  std::int64_t stride_;
};

}  // namespace cuda
}  // namespace minserve
