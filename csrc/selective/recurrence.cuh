// What the selective scan and step compute alike, in one order of operations, so that neither bits
// of y nor of a state depend on which kernel reads a token, or with how many threads.
//
// The states of a channel are shared by kLanes lanes of a warp, kStates neighbours to each: lane =
// group * (32 / kLanes) + channel, and a group's states begin at group * kStates. Lanes of one
// group read the same B and C.
#pragma once

#include "../cells/silu.cuh"
#include "args.h"

namespace minserve {
namespace cuda {

constexpr int kWarpLanes = 32;
constexpr unsigned kWholeWarp = 0xffffffffu;

// log(1 + e^x) = max(x, 0) + log(1 + u) with u = e^-|x|. log(1 + u) / u is a polynomial that leaves
// 3e-8 relative on [0, 1]: a logarithm would need the special-function unit, which is what the
// exponentials of the states wait for.
__device__ __forceinline__ float softplus(float x) {
  const float u = exp2_of(absolute(x) * static_cast<float>(-kLog2e));
  float p = 0.005232694f;
  p = fmadd(p, u, -0.02950524f);
  p = fmadd(p, u, 0.078225955f);
  p = fmadd(p, u, -0.13663246f);
  p = fmadd(p, u, 0.19106007f);
  p = fmadd(p, u, -0.24842982f);
  p = fmadd(p, u, 0.33319098f);
  p = fmadd(p, u, -0.49999493f);
  p = fmadd(p, u, 0.99999994f);
  return fmadd(u, p, maximum(x, 0.0f));
}

// dt behind softplus, times log2(e): the decay of a state is then a power of two.
__device__ __forceinline__ float decay_of(float delta) {
  return delta * static_cast<float>(kLog2e);
}
// One state's step: `a` and `b` of A and B, `write` is dt x.
__device__ __forceinline__ float advance(float h, float decay, float a, float write, float b) {
  return fmadd(exp2_of(decay * a), h, write * b);
}

// The sum of C h over neighbouring states: of pairs, of neighbouring pairs, and so on. However
// many states a thread has, sum_over_lanes() goes on with the same tree.
template <int kStates>
__device__ __forceinline__ float sum_of_states(const float (&c)[kStates],
                                               const float (&h)[kStates]) {
  static_assert(kStates >= 2 && (kStates & (kStates - 1)) == 0, "whole levels of the tree");
  float sums[kStates / 2];
#pragma unroll
  for (int i = 0; i < kStates / 2; ++i) {
    sums[i] = fmadd(c[2 * i + 1], h[2 * i + 1], c[2 * i] * h[2 * i]);
  }
#pragma unroll
  for (int width = kStates / 4; width > 0; width /= 2) {
#pragma unroll
    for (int i = 0; i < width; ++i) sums[i] = sums[2 * i] + sums[2 * i + 1];
  }
  return sums[0];
}

// Of kValues sums over a lane's own states, one over the states of all lanes of its channel:
// that with index value_of_lane(). With every level of the tree a lane keeps half of the values
// that it has, and its neighbour the other half.
template <int kLanes, int kValues>
__device__ __forceinline__ float sum_over_lanes(float (&values)[kValues]) {
  static_assert(kValues <= kLanes && (kValues & (kValues - 1)) == 0, "each lane keeps one");
  int distance = kWarpLanes / kLanes;
#pragma unroll
  for (int half = kValues / 2; half > 0; half /= 2) {
    const bool upper = threadIdx.x & distance;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float kept = upper ? values[i + half] : values[i];
      const float given = upper ? values[i] : values[i + half];
      values[i] = kept + __shfl_xor_sync(kWholeWarp, given, distance);
    }
    distance *= 2;
  }
#pragma unroll
  for (; distance < kWarpLanes; distance *= 2) {
    values[0] += __shfl_xor_sync(kWholeWarp, values[0], distance);
  }
  return values[0];
}
// The sum over groups of kGroupLanes lanes, of lanes with the same place in theirs.
template <int kGroupLanes>
__device__ __forceinline__ float sum_over_groups(float x) {
#pragma unroll
  for (int distance = kGroupLanes; distance < kWarpLanes; distance *= 2) {
    x += __shfl_xor_sync(kWholeWarp, x, distance);
  }
  return x;
}
// It is its own inverse for the groups below kValues.
template <int kValues>
__device__ __forceinline__ int value_of_group(int group) {
  int value = 0;
#pragma unroll
  for (int bit = 1; bit < kValues; bit *= 2) {
    if (group & bit) value += kValues / (2 * bit);
  }
  return value;
}

// kCount neighbours of a row that has `count` from `from` on: all or none of them in one access
// (kInVectors), or one by one with zeros in place of those that are not there.
template <bool kInVectors, class T, int kCount>
__device__ __forceinline__ void load_states(const T* from, std::int64_t count, float (&x)[kCount]) {
  if constexpr (kInVectors) {
    Channels<T, kCount> all;
    if (count > 0) all.load(from);
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = all[i];
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = i < count ? to_lane(from[i]) : 0.0f;
  }
}
template <bool kInVectors, class T, int kCount>
__device__ __forceinline__ void store_states(T* to, std::int64_t count, const float (&x)[kCount]) {
  if constexpr (kInVectors) {
    Channels<T, kCount> all;
    all.set(x);
    if (count > 0) all.store(to);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (i < count) from_lane(to + i, x[i]);
    }
  }
}

__device__ __forceinline__ float channel_number(const ChannelVector& v, std::int64_t c, float) {
  return static_cast<const float*>(v.data)[c];
}
template <class T>
__device__ __forceinline__ float channel_number(const ChannelVector& v, std::int64_t c, T) {
  return v.is_float ? static_cast<const float*>(v.data)[c]
                    : to_lane(static_cast<const T*>(v.data)[c]);
}

}  // namespace cuda
}  // namespace minserve
