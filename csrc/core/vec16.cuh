// Sixteen bytes of a tensor at a time: loads, stores and conversions.
#pragma once

#include <cstdint>

#include "vec.h"

namespace minserve {
namespace cuda {

struct alignas(16) SixteenBytes {
  uint4 bits;
};

// 16 bytes as accumulation values; the last parameter names the type in memory.
__device__ __forceinline__ void unpack(const uint4& bits, float (&x)[4], float) {
  x[0] = __uint_as_float(bits.x), x[1] = __uint_as_float(bits.y);
  x[2] = __uint_as_float(bits.z), x[3] = __uint_as_float(bits.w);
}
__device__ __forceinline__ void unpack(const uint4& bits, double (&x)[2], double) {
  x[0] = __hiloint2double(static_cast<int>(bits.y), static_cast<int>(bits.x));
  x[1] = __hiloint2double(static_cast<int>(bits.w), static_cast<int>(bits.z));
}
__device__ __forceinline__ void unpack(const uint4& bits, float (&x)[8], bf16) {
  const unsigned pairs[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[2 * i] = __uint_as_float(pairs[i] << 16);
    x[2 * i + 1] = __uint_as_float(pairs[i] & 0xffff0000u);
  }
}
__device__ __forceinline__ void unpack(const uint4& bits, float (&x)[8], f16) {
  const unsigned pairs[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&pairs[i]));
    x[2 * i] = pair.x, x[2 * i + 1] = pair.y;
  }
}

__device__ __forceinline__ uint4 pack(const float (&x)[4], float) {
  return {__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]),
          __float_as_uint(x[3])};
}
__device__ __forceinline__ uint4 pack(const double (&x)[2], double) {
  return {static_cast<unsigned>(__double2loint(x[0])), static_cast<unsigned>(__double2hiint(x[0])),
          static_cast<unsigned>(__double2loint(x[1])), static_cast<unsigned>(__double2hiint(x[1]))};
}
template <class Pair, class Join>
__device__ __forceinline__ uint4 pack_pairs(const float (&x)[8], Join join) {
  unsigned pairs[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const Pair pair = join(x[2 * i], x[2 * i + 1]);
    pairs[i] = *reinterpret_cast<const unsigned*>(&pair);
  }
  return {pairs[0], pairs[1], pairs[2], pairs[3]};
}
__device__ __forceinline__ uint4 pack(const float (&x)[8], bf16) {
  return pack_pairs<__nv_bfloat162>(
      x, [](float low, float high) { return __floats2bfloat162_rn(low, high); });
}
__device__ __forceinline__ uint4 pack(const float (&x)[8], f16) {
  return pack_pairs<__half2>(x, [](float low, float high) { return __floats2half2_rn(low, high); });
}

// A pack's worth of accumulation values, 16 bytes at a time.
__device__ __forceinline__ void load_values(const float* p, float (&x)[4]) {
  unpack(*reinterpret_cast<const uint4*>(p), x, float{});
}
__device__ __forceinline__ void load_values(const float* p, float (&x)[8]) {
  const float4 low = reinterpret_cast<const float4*>(p)[0];
  const float4 high = reinterpret_cast<const float4*>(p)[1];
  x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
  x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
}
__device__ __forceinline__ void load_values(const double* p, double (&x)[2]) {
  unpack(*reinterpret_cast<const uint4*>(p), x, double{});
}
__device__ __forceinline__ void store_values(float* p, const float (&x)[4]) {
  *reinterpret_cast<uint4*>(p) = pack(x, float{});
}
__device__ __forceinline__ void store_values(float* p, const float (&x)[8]) {
  reinterpret_cast<float4*>(p)[0] = {x[0], x[1], x[2], x[3]};
  reinterpret_cast<float4*>(p)[1] = {x[4], x[5], x[6], x[7]};
}
__device__ __forceinline__ void store_values(double* p, const double (&x)[2]) {
  *reinterpret_cast<uint4*>(p) = pack(x, double{});
}

// One access where the tensor is aligned for it, else element by element; `count` of them are real.
template <class T>
__device__ __forceinline__ void store_pack(T* p, const uint4& given, bool aligned, int count) {
  if (aligned) {
    *reinterpret_cast<uint4*>(p) = given;
    return;
  }
  union {
    uint4 all;
    T each[16 / sizeof(T)];
  } bits;
  bits.all = given;
#pragma unroll
  for (int i = 0; i < static_cast<int>(16 / sizeof(T)); ++i) {
    if (i < count) p[i] = bits.each[i];
  }
}

}  // namespace cuda
}  // namespace minserve
