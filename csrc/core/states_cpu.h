// What recurrences with several states a channel share on the CPU: sums over states, and copies
// from one type to another.
#pragma once

#include "vec.h"

namespace minserve {
namespace MS_ISA {

#if defined(MS_AVX512)
MS_CELL __m512 pairs_added(__m512 x, __m512 y) {
  return _mm512_add_ps(_mm512_unpacklo_ps(x, y), _mm512_unpackhi_ps(x, y));
}
MS_CELL __m512 doubles_added(__m512 x, __m512 y) {
  const __m512d a = _mm512_castps_pd(x), b = _mm512_castps_pd(y);
  return _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)),
                       _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
}
MS_CELL __m512 quarters_added(__m512 x, __m512 y) {
  return _mm512_add_ps(_mm512_shuffle_f32x4(x, y, 0x88), _mm512_shuffle_f32x4(x, y, 0xdd));
}
// The sums over the lanes of each vector, in the vectors' order.
MS_CELL VF sums_of_each(const VF (&v)[kWidth]) {
  __m512 quads[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    quads[i] = doubles_added(pairs_added((__m512)v[4 * i], (__m512)v[4 * i + 1]),
                             pairs_added((__m512)v[4 * i + 2], (__m512)v[4 * i + 3]));
  }
  return (VF)quarters_added(quarters_added(quads[0], quads[1]), quarters_added(quads[2], quads[3]));
}
#elif defined(MS_AVX2)
MS_CELL __m256 pairs_added(__m256 x, __m256 y) {
  return _mm256_add_ps(_mm256_unpacklo_ps(x, y), _mm256_unpackhi_ps(x, y));
}
MS_CELL __m256 doubles_added(__m256 x, __m256 y) {
  const __m256d a = _mm256_castps_pd(x), b = _mm256_castps_pd(y);
  return _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(a, b)),
                       _mm256_castpd_ps(_mm256_unpackhi_pd(a, b)));
}
// The sums over the lanes of each vector, in the vectors' order.
MS_CELL VF sums_of_each(const VF (&v)[kWidth]) {
  __m256 quads[2];
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    quads[i] = doubles_added(pairs_added((__m256)v[4 * i], (__m256)v[4 * i + 1]),
                             pairs_added((__m256)v[4 * i + 2], (__m256)v[4 * i + 3]));
  }
  return (VF)_mm256_add_ps(_mm256_permute2f128_ps(quads[0], quads[1], 0x20),
                           _mm256_permute2f128_ps(quads[0], quads[1], 0x31));
}
#else
MS_CELL VF sums_of_each(const VF (&v)[kWidth]) {
  VF sums;
  for (int i = 0; i < kWidth; ++i) sums[i] = (v[i][0] + v[i][2]) + (v[i][1] + v[i][3]);
  return sums;
}
#endif

// From one type to another.
template <class From, class To>
inline void copy_states(const From* from, To* to, std::int64_t count) {
  std::int64_t n = 0;
  for (; n + kWidth <= count; n += kWidth) store(to + n, load<VF>(from + n, Full{}), Full{});
  if (n < count) {
    const Part rest{static_cast<int>(count - n)};
    store(to + n, load<VF>(from + n, rest), rest);
  }
}

}  // namespace MS_ISA
}  // namespace minserve
