// One token of the selective recurrence on the CPU, for a vector of channels.
//
// A channel's states lie side by side in memory, so a vector has states of one channel: nothing is
// transposed but the sums over states, of which a vector has those of kWidth channels.
#pragma once

#include "../cells/silu_cpu.h"

namespace minserve {
namespace MS_ISA {

// log(1 + e^x) = max(x, 0) + log(1 + u) with u = e^-|x|, and log(1 + u) = s P(s^2) with
// s = u / (2 + u) at most 1/3: of 2 atanh(s), a polynomial that leaves 4e-9 relative.
MS_CELL VF softplus(VF x) {
  const VF u = exp2_of(absolute(x) * splat<VF>(-kLog2e));
  const VF s = u * reciprocal(u + 2.0f), square = s * s;
  VF p = splat<VF>(0.2816145384435038);
  p = fmadd(p, square, splat<VF>(0.2796434468539182));
  p = fmadd(p, square, splat<VF>(0.4002465133516967));
  p = fmadd(p, square, splat<VF>(0.6666632040637649));
  p = fmadd(p, square, splat<VF>(2.0000000077239792));
  return fmadd(s, p, maximum(x, splat<VF>(0.0f)));
}

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

// What a token has for all channels: B and C, fp32 [states]. kVectors: so many whole vectors are
// the states, and stay in registers; 0: there are any number of states.
template <int kVectors>
class SelectiveToken {
 public:
  SelectiveToken(const float* B, const float* C, std::int64_t states)
      : B_(B), C_(C), states_(states) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      b_[v] = load<VF>(B + v * kWidth, Full{});
      c_[v] = load<VF>(C + v * kWidth, Full{});
    }
  }

  // h <- exp(dt A) h + dt x B of `count` channels; returns the sums over C h. A and h: [count,
  // states]; dt is behind softplus.
  MS_CELL VF advance(const float* A, float* h, VF dt, VF x, int count) const {
    alignas(64) float scaled[kWidth], write[kWidth];
    store(scaled, dt * splat<VF>(kLog2e), Full{});
    store(write, dt * x, Full{});
    VF sums[kWidth] = {};
    for (int i = 0; i < count; ++i) {
      const VF d = scaled[i] - VF{}, w = write[i] - VF{};
      const float* const a = A + i * states_;
      float* const own = h + i * states_;
      VF sum = splat<VF>(0.0f);
      if constexpr (kVectors > 0) {
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
          const VF after = next(a + v * kWidth, own + v * kWidth, d, w * b_[v], Full{});
          sum = v == 0 ? c_[v] * after : fmadd(c_[v], after, sum);
        }
      } else {
        const auto add = [&](std::int64_t n, auto lanes) {
          const VF after = next(a + n, own + n, d, w * load<VF>(B_ + n, lanes), lanes);
          sum = fmadd(load<VF>(C_ + n, lanes), after, sum);
        };
        std::int64_t n = 0;
        for (; n + kWidth <= states_; n += kWidth) add(n, Full{});
        if (n < states_) add(n, Part{static_cast<int>(states_ - n)});
      }
      sums[i] = sum;
    }
    return sums_of_each(sums);
  }

 private:
  // A vector of h, moved on.
  template <class L>
  static MS_CELL VF next(const float* A, float* h, VF d, VF write, L lanes) {
    const VF after = fmadd(exp2_of(d * load<VF>(A, lanes)), load<VF>(h, lanes), write);
    store(h, after, lanes);
    return after;
  }

  const float *B_, *C_;
  std::int64_t states_;
  VF b_[kVectors > 0 ? kVectors : 1], c_[kVectors > 0 ? kVectors : 1];
};

// f(SelectiveVectors<n>{}) with n as SelectiveToken takes it.
template <int kVectors>
struct SelectiveVectors {
  static constexpr int value = kVectors;
};
template <class F>
MS_CELL void with_states(std::int64_t states, const F& f) {
  constexpr int usual = 16 / kWidth;
  if (states == usual * kWidth) {
    f(SelectiveVectors<usual>{});
  } else {
    f(SelectiveVectors<0>{});
  }
}

}  // namespace MS_ISA
}  // namespace minserve
