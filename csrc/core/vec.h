// Lanes: the vector and scalar types that cells compute on, with loads, stores and exp.
// Compiled once per instruction set into its own namespace (MS_ISA), so that no function built for
// AVX-512 can be picked by the linker for a baseline machine. Hence no std templates here either.
#pragma once

#include <cmath>
#include <cstdint>

#include "types.h"

#ifdef __CUDACC__
#define MS_ISA cuda
#include "../arch/ptx.cuh"
#elif defined(MS_AMX)
#define MS_AVX512
#define MS_AVX512_BF16
#define MS_ISA amx
#include <immintrin.h>
#elif defined(MS_AVX512_BF16)
#define MS_AVX512
#define MS_ISA avx512_bf16
#include <immintrin.h>
#elif defined(MS_AVX512)
#define MS_ISA avx512
#include <immintrin.h>
#elif defined(MS_AVX2)
#define MS_ISA avx2
#include <immintrin.h>
#else
#define MS_ISA generic
#define MS_BASELINE
#endif

namespace minserve {
namespace MS_ISA {

template <class V>
struct LanesOf {
  using scalar = V;
  static constexpr int width = 1;
};

// How many lanes of a vector are real: all, or the first n (the rest are computed on zeros and
// dropped, by the same code, so that a channel's position never changes its bits).
struct Full {};
struct Part {
  int count;
};

#ifdef __CUDACC__

template <class T>
struct ComputeType {
  using type = float;
};
template <>
struct ComputeType<double> {
  using type = double;
};

__device__ __forceinline__ float to_lane(float x) {
  return x;
}
__device__ __forceinline__ double to_lane(double x) {
  return x;
}
__device__ __forceinline__ float to_lane(bf16 x) {
  return __uint_as_float(static_cast<unsigned>(x.bits) << 16);
}
__device__ __forceinline__ float to_lane(f16 x) {
  return __half2float(__ushort_as_half(x.bits));
}
__device__ __forceinline__ void from_lane(float* p, float x) {
  *p = x;
}
__device__ __forceinline__ void from_lane(double* p, double x) {
  *p = x;
}
__device__ __forceinline__ void from_lane(bf16* p, float x) {
  p->bits = __bfloat16_as_ushort(__float2bfloat16_rn(x));
}
__device__ __forceinline__ void from_lane(f16* p, float x) {
  p->bits = __half_as_ushort(__float2half_rn(x));
}

template <class V, class T>
__device__ __forceinline__ V load(const T* p, Full) {
  return to_lane(*p);
}
template <class V, class T>
__device__ __forceinline__ void store(T* p, V x, Full) {
  from_lane(p, x);
}
__device__ __forceinline__ float fmadd(float x, float y, float z) {
  return __fmaf_rn(x, y, z);
}
__device__ __forceinline__ double fmadd(double x, double y, double z) {
  return __fma_rn(x, y, z);
}
__device__ __forceinline__ float exp2_of(float x) {
  return fast_exp2(x);
}
__device__ __forceinline__ double exp2_of(double x) {
  return exp2(x);
}
__device__ __forceinline__ float reciprocal(float x) {
  return fast_reciprocal(x);
}
__device__ __forceinline__ double reciprocal(double x) {
  return 1.0 / x;
}
// 1 / x and 1 / y. The special-function unit has room for both; instructions are what is short.
template <class V>
__device__ __forceinline__ void reciprocals(V x, V y, V& one_over_x, V& one_over_y) {
  one_over_x = reciprocal(x);
  one_over_y = reciprocal(y);
}
__device__ __forceinline__ float absolute(float x) {
  return fabsf(x);
}
__device__ __forceinline__ double absolute(double x) {
  return fabs(x);
}
// min and max that pass NaN on
__device__ __forceinline__ float minimum(float x, float y) {
  return min_or_nan(x, y);
}
__device__ __forceinline__ float maximum(float x, float y) {
  return max_or_nan(x, y);
}
__device__ __forceinline__ double minimum(double x, double y) {
  return x > y ? y : x;
}
__device__ __forceinline__ double maximum(double x, double y) {
  return x < y ? y : x;
}
template <class V>
__device__ __forceinline__ V splat(double x) {
  return static_cast<V>(x);
}

#define MS_CELL __device__ __forceinline__

#endif

}  // namespace MS_ISA
}  // namespace minserve

#ifndef __CUDACC__
#include "vec_cpu.h"
#endif
