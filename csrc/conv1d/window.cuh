// What step and scan share: a thread's channels, and the weights and bias of them.
#pragma once

#include "../cells/silu.cuh"
#include "../core/vector_access.cuh"
#include "args.h"

namespace minserve {
namespace cuda {

constexpr int kVec = 4;  // channels per thread: 16 bytes of the carried inputs

template <class T, int kTaps, bool kSilu>
struct Filter {
  Channels<T, kVec * kTaps> weight;
  Channels<T, kVec> bias;

  __device__ __forceinline__ void load(const ConvArgs& args, std::int64_t c) {
    weight.load(static_cast<const T*>(args.weight) + c * kTaps);
    if (args.bias) bias.load(static_cast<const T*>(args.bias) + c);
  }
  // Channel v's output: the sum over the inputs before, oldest first, and the current one, or SiLU
  // of it.
  template <class Before>
  __device__ __forceinline__ float output(int v, const Before& before, float current) const {
    float sum = bias[v];
#pragma unroll
    for (int k = 0; k < kTaps - 1; ++k) sum = fmadd(weight[v * kTaps + k], before[k][v], sum);
    sum = fmadd(weight[v * kTaps + kTaps - 1], current, sum);
    return kSilu ? silu(sum) : sum;
  }
};

// Whether rows can be read and written kVec channels at a time, and they and the elements between
// some of x be counted in 32 bits.
template <class T, int kTaps>
inline bool in_vectors(const ConvArgs& args) {
  const Layout& lay = args.layout;
  return lay.channels % kVec == 0 && lay.tokens < 1LL << 31 && lay.sequences < (1LL << 31) - 1 &&
         lay.num_slots < 1LL << 31 && args.x.stride < 1LL << 24 &&
         lie_aligned<T, kVec>(args.x.data, args.x.stride) && lie_aligned<T, kVec>(args.out) &&
         lie_aligned<T, kVec * kTaps>(args.weight) && lie_aligned<T, kVec>(args.bias) &&
         lie_aligned<float, kVec>(args.state, args.slot_stride) &&
         lie_aligned<float, kVec>(args.state, args.tap_stride);
}

}  // namespace cuda
}  // namespace minserve
