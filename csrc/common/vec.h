// Lanes: the vector and scalar types that cells compute on, with loads, stores and exp.
// Compiled once per instruction set into its own namespace (MS_ISA), so that no function built for
// AVX-512 can be picked by the linker for a baseline machine. Hence no std templates here either.
#pragma once

#include <cmath>
#include <cstdint>

#include "types.h"

#ifdef __CUDACC__
#define MS_ISA cuda
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#elif defined(MS_AVX512)
#define MS_ISA avx512
#include <immintrin.h>
#elif defined(MS_AVX2)
#define MS_ISA avx2
#include <immintrin.h>
#else
#define MS_ISA generic
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
// The special-function unit's own forms: 2 ulp and 1 ulp, subnormals flushed.
__device__ __forceinline__ float exp2_of(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ double exp2_of(double x) {
  return exp2(x);
}
__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ double reciprocal(double x) {
  return 1.0 / x;
}
__device__ __forceinline__ float absolute(float x) {
  return fabsf(x);
}
__device__ __forceinline__ double absolute(double x) {
  return fabs(x);
}
// min and max that pass NaN on, in one instruction
__device__ __forceinline__ float minimum(float x, float y) {
  float z;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}
__device__ __forceinline__ float maximum(float x, float y) {
  float z;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
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

#else  // host

#if defined(MS_AVX512)
constexpr int kWidth = 16;
#elif defined(MS_AVX2)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif

typedef float VF __attribute__((vector_size(4 * kWidth)));
typedef std::int32_t VI __attribute__((vector_size(4 * kWidth)));
typedef std::uint32_t VU __attribute__((vector_size(4 * kWidth)));
typedef std::uint16_t VH __attribute__((vector_size(2 * kWidth)));

template <>
struct LanesOf<VF> {
  using scalar = float;
  static constexpr int width = kWidth;
};

template <class T>
struct ComputeType {
  using type = VF;
};
template <>
struct ComputeType<double> {
  using type = double;
};

#define MS_CELL inline __attribute__((always_inline))

template <class To, class From>
MS_CELL To bit_cast(From x) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast keeps the size");
  To y;
  __builtin_memcpy(&y, &x, sizeof(y));
  return y;
}
template <class V>
MS_CELL V splat(double x);
template <>
MS_CELL VF splat<VF>(double x) {
  return static_cast<float>(x) - VF{};
}
template <>
MS_CELL double splat<double>(double x) {
  return x;
}

MS_CELL VF widen(VF x, const float*) {
  return x;
}
MS_CELL VF widen(VH x, const bf16*) {
  return bit_cast<VF>(__builtin_convertvector(x, VU) << 16);
}
MS_CELL VH narrow(VF x, const bf16*) {
  VU bits = bit_cast<VU>(x);
  VU rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;  // to nearest, ties to even
  VU quiet = (bits >> 16) | 0x40u;                            // a NaN stays one
  return __builtin_convertvector((x == x) ? rounded : quiet, VH);
}
MS_CELL VF narrow(VF x, const float*) {
  return x;
}
#if defined(MS_AVX512)
MS_CELL VF widen(VH x, const f16*) {
  return (VF)_mm512_cvtph_ps(bit_cast<__m256i>(x));
}
MS_CELL VH narrow(VF x, const f16*) {
  return bit_cast<VH>(_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT));
}
MS_CELL VF fmadd(VF x, VF y, VF z) {
  return (VF)_mm512_fmadd_ps((__m512)x, (__m512)y, (__m512)z);
}
#elif defined(MS_AVX2)
MS_CELL VF widen(VH x, const f16*) {
  return (VF)_mm256_cvtph_ps(bit_cast<__m128i>(x));
}
MS_CELL VH narrow(VF x, const f16*) {
  return bit_cast<VH>(_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
}
MS_CELL VF fmadd(VF x, VF y, VF z) {
  return (VF)_mm256_fmadd_ps((__m256)x, (__m256)y, (__m256)z);
}
#else
MS_CELL VF widen(VH x, const f16*) {
  VF y;
  for (int i = 0; i < kWidth; ++i) y[i] = static_cast<float>(bit_cast<_Float16>(x[i]));
  return y;
}
MS_CELL VH narrow(VF x, const f16*) {
  VH y;
  for (int i = 0; i < kWidth; ++i) y[i] = bit_cast<std::uint16_t>(static_cast<_Float16>(x[i]));
  return y;
}
MS_CELL VF fmadd(VF x, VF y, VF z) {
  return x * y + z;
}  // rounds twice: no FMA to rely on
#endif
MS_CELL double fmadd(double x, double y, double z) {
  return x * y + z;
}

template <class T>
struct Stored {
  using type = VH;
};
template <>
struct Stored<float> {
  using type = VF;
};

// Unaligned by design: tensors may start anywhere.
template <class V, class T>
struct Memory {
  static MS_CELL V load(const T* p, Full) {
    typename Stored<T>::type x;
    __builtin_memcpy(&x, p, sizeof(x));
    return widen(x, p);
  }
  static MS_CELL V load(const T* p, Part part) {
    typename Stored<T>::type x = {};
    __builtin_memcpy(&x, p, sizeof(T) * static_cast<unsigned>(part.count));
    return widen(x, p);
  }
  static MS_CELL void store(T* p, V v, Full) {
    auto x = narrow(v, p);
    __builtin_memcpy(p, &x, sizeof(x));
  }
  static MS_CELL void store(T* p, V v, Part part) {
    auto x = narrow(v, p);
    __builtin_memcpy(p, &x, sizeof(T) * static_cast<unsigned>(part.count));
  }
};
template <>
struct Memory<double, double> {
  template <class L>
  static MS_CELL double load(const double* p, L) {
    return *p;
  }
  template <class L>
  static MS_CELL void store(double* p, double v, L) {
    *p = v;
  }
};
template <class V, class T, class L>
MS_CELL V load(const T* p, L lanes) {
  return Memory<V, T>::load(p, lanes);
}
template <class V, class T, class L>
MS_CELL void store(T* p, V x, L lanes) {
  Memory<V, T>::store(p, x, lanes);
}

// 2^x for x <= 127, floored at the smallest normal number. x = n + r with |r| <= 1/2; the Taylor
// polynomial of degree 7 leaves 5e-9 relative, under half an ulp of float.
MS_CELL VF exp2_of(VF x) {
  const VF floor = splat<VF>(-126.0f);
  x = x < floor ? floor : x;                // written so that NaN passes
  const VF magic = splat<VF>(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const VF n = (x + magic) - magic;
  const VF r = x - n;
  VF p = splat<VF>(1.52527338e-5f);  // (ln 2)^k / k! for k = 7 ... 0
  p = fmadd(p, r, splat<VF>(1.54035304e-4f));
  p = fmadd(p, r, splat<VF>(1.33335581e-3f));
  p = fmadd(p, r, splat<VF>(9.61812911e-3f));
  p = fmadd(p, r, splat<VF>(5.55041087e-2f));
  p = fmadd(p, r, splat<VF>(2.40226507e-1f));
  p = fmadd(p, r, splat<VF>(6.93147181e-1f));
  p = fmadd(p, r, splat<VF>(1.0f));
  const VI power = (__builtin_convertvector(n, VI) + 127) << 23;
  return p * bit_cast<VF>(power);
}
MS_CELL double exp2_of(double x) {
  return ::exp2(x);
}
MS_CELL VF reciprocal(VF x) {
  return 1.0f / x;
}
MS_CELL double reciprocal(double x) {
  return 1.0 / x;
}
MS_CELL VF absolute(VF x) {
  return bit_cast<VF>(bit_cast<VI>(x) & 0x7fffffff);
}
MS_CELL double absolute(double x) {
  return __builtin_fabs(x);
}
// Both pass on a NaN in x; y is a constant or NaN together with x.
MS_CELL VF minimum(VF x, VF y) {
  return x > y ? y : x;
}
MS_CELL VF maximum(VF x, VF y) {
  return x < y ? y : x;
}
MS_CELL double minimum(double x, double y) {
  return x > y ? y : x;
}
MS_CELL double maximum(double x, double y) {
  return x < y ? y : x;
}

#endif

}  // namespace MS_ISA
}  // namespace minserve
