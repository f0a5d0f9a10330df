// The host half of vec.h, which includes it: vectors of floats and their arithmetic.
#pragma once

namespace minserve {
namespace MS_ISA {

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

// --- arithmetic. minimum and maximum pass on a NaN in x; y is a constant or NaN together with x.

#if defined(MS_AVX512)
MS_CELL VF fmadd(VF x, VF y, VF z) {
  return (VF)_mm512_fmadd_ps((__m512)x, (__m512)y, (__m512)z);
}
MS_CELL VF minimum(VF x, VF y) {
  return (VF)_mm512_min_ps((__m512)y, (__m512)x);
}
MS_CELL VF maximum(VF x, VF y) {
  return (VF)_mm512_max_ps((__m512)y, (__m512)x);
}
// An estimate good to 14 bits and a Newton step: 1 ulp, in a third of a division's time. For x
// whose reciprocal is a normal number, as are all divisors of gates.h.
MS_CELL VF reciprocal(VF x) {
  const VF near = (VF)_mm512_rcp14_ps((__m512)x);
  return fmadd(near, (VF)_mm512_fnmadd_ps((__m512)x, (__m512)near, (__m512)splat<VF>(1.0f)), near);
}
#elif defined(MS_AVX2)
MS_CELL VF fmadd(VF x, VF y, VF z) {
  return (VF)_mm256_fmadd_ps((__m256)x, (__m256)y, (__m256)z);
}
MS_CELL VF minimum(VF x, VF y) {
  return (VF)_mm256_min_ps((__m256)y, (__m256)x);
}
MS_CELL VF maximum(VF x, VF y) {
  return (VF)_mm256_max_ps((__m256)y, (__m256)x);
}
MS_CELL VF reciprocal(VF x) {
  return 1.0f / x;
}
#else
MS_CELL VF fmadd(VF x, VF y, VF z) {
  return x * y + z;
}  // rounds twice: no FMA to rely on
MS_CELL VF minimum(VF x, VF y) {
  return x > y ? y : x;
}
MS_CELL VF maximum(VF x, VF y) {
  return x < y ? y : x;
}
MS_CELL VF reciprocal(VF x) {
  return 1.0f / x;
}
#endif
MS_CELL double fmadd(double x, double y, double z) {
  return x * y + z;
}
MS_CELL double minimum(double x, double y) {
  return x > y ? y : x;
}
MS_CELL double maximum(double x, double y) {
  return x < y ? y : x;
}
MS_CELL double reciprocal(double x) {
  return 1.0 / x;
}
// 1 / x and 1 / y: from one division, where x * y must stay finite; from two estimates where there
// are good ones, which is as many instructions in a shorter chain.
template <class V>
MS_CELL void reciprocals(V x, V y, V& one_over_x, V& one_over_y) {
#if defined(MS_AVX512)
  one_over_x = reciprocal(x);
  one_over_y = reciprocal(y);
#else
  const V both = reciprocal(x * y);
  one_over_x = both * y;
  one_over_y = both * x;
#endif
}
MS_CELL VF absolute(VF x) {
  return bit_cast<VF>(bit_cast<VI>(x) & 0x7fffffff);
}
MS_CELL double absolute(double x) {
  return __builtin_fabs(x);
}

// 2^x for x <= 127, floored at the smallest normal number. x = n + r with |r| <= 1/2; the minimax
// polynomial of degree 5 with p(0) = 1 leaves 9e-8 relative, with its rounding 2 ulp at most.
MS_CELL VF exp2_of(VF x) {
  x = maximum(x, splat<VF>(-126.0f));
#if defined(MS_AVX512)
  const VF n = (VF)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  // 1.5 * 2^23 and the exponent's bias: adding it rounds to an integer, whose biased value is left
  // in the low bits.
  const VF magic = splat<VF>(12582912.0f + 127.0f);
  const VF shifted = x + magic;
  const VF n = shifted - magic;
#endif
  const VF r = x - n;
  VF p = splat<VF>(1.32647273e-3f);
  p = fmadd(p, r, splat<VF>(9.67151299e-3f));
  p = fmadd(p, r, splat<VF>(5.55073358e-2f));
  p = fmadd(p, r, splat<VF>(2.40222424e-1f));
  p = fmadd(p, r, splat<VF>(6.93147004e-1f));
  p = fmadd(p, r, splat<VF>(1.0f));
#if defined(MS_AVX512)
  return (VF)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
  return p * bit_cast<VF>(bit_cast<VU>(shifted) << 23);  // a product, so that NaN passes
#endif
}
MS_CELL double exp2_of(double x) {
  return ::exp2(x);
}

// --- stored numbers to lanes and back

MS_CELL VF widen(VF x, const float*) {
  return x;
}
MS_CELL VF narrow(VF x, const float*) {
  return x;
}
MS_CELL double widen(double x, const double*) {
  return x;
}
MS_CELL double narrow(double x, const double*) {
  return x;
}
// A bfloat16 in the upper half of each word: rounded to nearest, ties to even; a NaN stays one.
MS_CELL VU rounded(VF x) {
  const VU bits = bit_cast<VU>(x);
  return (x == x) ? bits + 0x7fffu + ((bits >> 16) & 1u) : bits | 0x400000u;
}
MS_CELL VF widen(VH x, const bf16*) {
  return bit_cast<VF>(__builtin_convertvector(x, VU) << 16);
}
MS_CELL VH narrow(VF x, const bf16*) {
#if defined(MS_AVX512_BF16)
  return bit_cast<VH>(_mm512_cvtneps_pbh((__m512)x));  // subnormal numbers become zeros
#else
  return __builtin_convertvector(rounded(x) >> 16, VH);
#endif
}
#if defined(MS_AVX512)
MS_CELL VF widen(VH x, const f16*) {
  return (VF)_mm512_cvtph_ps(bit_cast<__m256i>(x));
}
MS_CELL VH narrow(VF x, const f16*) {
  return bit_cast<VH>(_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT));
}
#elif defined(MS_AVX2)
MS_CELL VF widen(VH x, const f16*) {
  return (VF)_mm256_cvtph_ps(bit_cast<__m128i>(x));
}
MS_CELL VH narrow(VF x, const f16*) {
  return bit_cast<VH>(_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
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
#endif

// --- one vector of channels in order; unaligned by design: tensors may start anywhere

template <class T>
struct Stored {
  using type = VH;
};
template <>
struct Stored<float> {
  using type = VF;
};
template <>
struct Stored<double> {
  using type = double;
};

template <class V, class T>
MS_CELL V load(const T* p, Full) {
  typename Stored<T>::type x;
  __builtin_memcpy(&x, p, sizeof(x));
  return widen(x, p);
}
template <class V, class T>
MS_CELL V load(const T* p, Part part) {
  typename Stored<T>::type x = {};
  __builtin_memcpy(&x, p, sizeof(T) * static_cast<unsigned>(part.count));
  return widen(x, p);
}
template <class V, class T>
MS_CELL void store(T* p, V v, Full) {
  auto x = narrow(v, p);
  __builtin_memcpy(p, &x, sizeof(x));
}
template <class V, class T>
MS_CELL void store(T* p, V v, Part part) {
  auto x = narrow(v, p);
  __builtin_memcpy(p, &x, sizeof(T) * static_cast<unsigned>(part.count));
}

}  // namespace MS_ISA
}  // namespace minserve
