// The operands of a product in registers: activations as matrices read them, and the weights of a
// step of a panel in each of the types that matrix.h describes.
#pragma once

#include "../core/vec.h"
#include "matrix.h"
#include "thread_team.h"

namespace minserve {
namespace MS_ISA {

constexpr int kParts = static_cast<int>(kPanel) / kWidth;  // vectors of a panel

typedef std::int8_t VB __attribute__((vector_size(kWidth)));

// --- activations as matrices read them: one element of memory and a broadcast of a step's

struct FedFloat {
  static constexpr bool kHalf = false;
  using element = float;
  static MS_CELL void put(char* row, std::int64_t c, VF v) {
    __builtin_memcpy(row + c * 4, &v, sizeof(v));
  }
};
#if defined(MS_AVX512_BF16)
struct FedHalf {
  static constexpr bool kHalf = true;
  using element = bf16;
  static MS_CELL void put(char* row, std::int64_t c, VF v) {
    store(reinterpret_cast<bf16*>(row) + c, v, Full{});
  }
};
#else
// Rounded to bfloat16 and kept as floats: products are formed in fp32.
struct FedHalf {
  static constexpr bool kHalf = true;
  using element = float;
  static MS_CELL void put(char* row, std::int64_t c, VF v) {
    const VF x = bit_cast<VF>(rounded(v) & 0xffff0000u);
    __builtin_memcpy(row + c * 4, &x, sizeof(x));
  }
};
#endif

MS_CELL VF float_at(const char* p) {
  float x;
  __builtin_memcpy(&x, p, 4);
  return x - VF{};
}
template <class V>
MS_CELL V vector_at(const char* p) {
  V x;
  __builtin_memcpy(&x, p, sizeof(x));
  return x;
}

// --- weights: what a step of a panel is in registers, and how it is multiplied and added

struct WeightsFloat {
  using Fed = FedFloat;
  static constexpr int kInputs = 1;
  static constexpr std::int64_t kStepBytes = 4 * kPanel;
  VF w[kParts];
  using Input = VF;
  static MS_CELL Input input(const char* p) { return float_at(p); }
  MS_CELL void load(const char* p) {
#pragma GCC unroll 4
    for (int i = 0; i < kParts; ++i) w[i] = vector_at<VF>(p + i * 4 * kWidth);
  }
  MS_CELL void add(VF (&sum)[kParts], Input x) const {
#pragma GCC unroll 4
    for (int i = 0; i < kParts; ++i) sum[i] = fmadd(w[i], x, sum[i]);
  }
};

struct TwoFloats {
  VF first, second;
};
struct WeightsInTwo {  // of two inputs, as floats
  VF first[kParts], second[kParts];
  using Input = TwoFloats;
  static constexpr int kInputs = 2;
  static MS_CELL Input input(const char* p) { return {float_at(p), float_at(p + 4)}; }
  MS_CELL void add(VF (&sum)[kParts], const Input& x) const {
#pragma GCC unroll 4
    for (int i = 0; i < kParts; ++i) sum[i] = fmadd(first[i], x.first, sum[i]);
#pragma GCC unroll 4
    for (int i = 0; i < kParts; ++i) sum[i] = fmadd(second[i], x.second, sum[i]);
  }
};
MS_CELL VF floats_of(VB bytes) {
#if defined(MS_AVX512)
  return (VF)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)bytes));
#elif defined(MS_AVX2)
  const __m128i low = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(&bytes));
  return (VF)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(low));
#else
  return __builtin_convertvector(__builtin_convertvector(bytes, VI), VF);
#endif
}
template <class F>
struct WeightsByte : WeightsInTwo {
  using Fed = F;
  static constexpr std::int64_t kStepBytes = 2 * kPanel;
  MS_CELL void load(const char* p) {
#pragma GCC unroll 4
    for (int i = 0; i < kParts; ++i) {
      first[i] = floats_of(vector_at<VB>(p + i * kWidth));
      second[i] = floats_of(vector_at<VB>(p + kPanel + i * kWidth));
    }
  }
};

#if defined(MS_AVX512_BF16)
struct WeightsInPairs {  // of two inputs, as bfloat16
  VU w;
  using Fed = FedHalf;
  using Input = VU;
  static constexpr int kInputs = 2;
  static MS_CELL Input input(const char* p) {
    std::uint32_t x;
    __builtin_memcpy(&x, p, 4);
    return x - VU{};
  }
  MS_CELL void add(VF (&sum)[1], Input x) const {
    sum[0] = (VF)_mm512_dpbf16_ps((__m512)sum[0], (__m512bh)w, (__m512bh)x);
  }
};
struct WeightsHalf : WeightsInPairs {
  static constexpr std::int64_t kStepBytes = 4 * kPanel;
  MS_CELL void load(const char* p) { w = vector_at<VU>(p); }
};
// Small integers are exact in bfloat16, so the upper halves of their floats are all of them.
template <>
struct WeightsByte<FedHalf> : WeightsInPairs {
  static constexpr std::int64_t kStepBytes = 2 * kPanel;
  MS_CELL void load(const char* p) {
    const VU first = bit_cast<VU>(floats_of(vector_at<VB>(p)));
    const VU second = bit_cast<VU>(floats_of(vector_at<VB>(p + kPanel)));
    w = (first >> 16) | second;
  }
  // Two panels side by side: both bytes of each number's bfloat16 are looked up by its magnitude
  // and put beside those of the other input. Half the instructions; -128 is not in the tables.
  static MS_CELL void load_two(const char* p, WeightsByte& one, WeightsByte& two) {
    const __m512i bytes = vector_at<__m512i>(p), index = _mm512_abs_epi8(bytes);
    const __m512i low = look_up(kBytes.low, index);
    const __m512i sign = _mm512_set1_epi8(static_cast<char>(0x80));
    const __m512i high = look_up(kBytes.high, index) | (bytes & sign);
    one.w = (VU)_mm512_permutex2var_epi8(low, vector_at<__m512i>(kBytes.one), high);
    two.w = (VU)_mm512_permutex2var_epi8(low, vector_at<__m512i>(kBytes.two), high);
  }

 private:
  struct Tables {
    alignas(64) char low[128], high[128];  // the bytes of 0 to 127 in bfloat16
    alignas(64) char one[64], two[64];     // which bytes of low and (from 64 on) high go where
  };
  static constexpr Tables tables() {
    Tables t{};
    for (int i = 1; i < 128; ++i) {
      int exponent = 0;
      while (i >> (exponent + 1)) ++exponent;
      const int bits = (127 + exponent) << 7 | ((i << (7 - exponent)) & 127);
      t.low[i] = static_cast<char>(bits & 255);
      t.high[i] = static_cast<char>(bits >> 8);
    }
    for (int i = 0; i < 64; ++i) {
      const int from = i / 4 + i % 4 / 2 * 16 + i % 2 * 64;
      t.one[i] = static_cast<char>(from);
      t.two[i] = static_cast<char>(from + 32);
    }
    return t;
  }
  static const Tables kBytes;
  static MS_CELL __m512i look_up(const char* table, __m512i index) {
    return _mm512_permutex2var_epi8(vector_at<__m512i>(table), index,
                                    vector_at<__m512i>(table + 64));
  }
};
inline constexpr WeightsByte<FedHalf>::Tables WeightsByte<FedHalf>::kBytes =
    WeightsByte<FedHalf>::tables();
#else
struct WeightsHalf : WeightsInTwo {
  using Fed = FedHalf;
  static constexpr std::int64_t kStepBytes = 4 * kPanel;
  MS_CELL void load(const char* p) {
#pragma GCC unroll 4
    for (int i = 0; i < kParts; ++i) {
      const VU both = vector_at<VU>(p + i * 4 * kWidth);
      first[i] = bit_cast<VF>(both << 16);
      second[i] = bit_cast<VF>(both & 0xffff0000u);
    }
  }
};
#endif

// Of what feeds one step.
template <class W>
constexpr std::int64_t kInputBytes = W::kInputs * sizeof(typename W::Fed::element);

// Bytes are widened into what products are formed of anew for every block of rows, so where there
// are more blocks than one, a few steps are widened first: `steps` of P panels -> the layout of
// WeightsFloat, or of WeightsHalf.
template <class W>
struct Widened {
  using Weights = W;
  static constexpr bool kNeeded = false;
};
template <>
struct Widened<WeightsByte<FedFloat>> {
  using Weights = WeightsFloat;
  static constexpr bool kNeeded = true;
  static MS_CELL void put(const WeightsByte<FedFloat>& w, char* to, std::int64_t panels) {
#pragma GCC unroll 4
    for (int i = 0; i < kParts; ++i) {
      __builtin_memcpy(to + i * sizeof(VF), &w.first[i], sizeof(VF));
      __builtin_memcpy(to + panels * 4 * kPanel + i * sizeof(VF), &w.second[i], sizeof(VF));
    }
  }
};
template <>
struct Widened<WeightsByte<FedHalf>> {
  using Weights = WeightsHalf;
  static constexpr bool kNeeded = true;
  static MS_CELL void put(const WeightsByte<FedHalf>& w, char* to, std::int64_t) {
#if defined(MS_AVX512_BF16)
    __builtin_memcpy(to, &w.w, sizeof(VU));
#else
#pragma GCC unroll 4
    for (int i = 0; i < kParts; ++i) {
      const VU both = (bit_cast<VU>(w.first[i]) >> 16) | bit_cast<VU>(w.second[i]);
      __builtin_memcpy(to + i * sizeof(VU), &both, sizeof(VU));
    }
#endif
  }
};
template <class W>
void widen(const char* weights, std::int64_t stride, std::int64_t steps, std::int64_t panels,
           char* to) {
  constexpr std::int64_t bytes =
      W::kInputs / Widened<W>::Weights::kInputs * Widened<W>::Weights::kStepBytes;
  for (std::int64_t s = 0; s < steps; ++s) {
    for (std::int64_t p = 0; p < panels; ++p) {
      W w;
      w.load(weights + s * stride + p * W::kStepBytes);
      Widened<W>::put(w, to + s * panels * bytes + p * 4 * kPanel, panels);
    }
  }
}

template <int R, class W, int P>
MS_CELL void load_all(const char* p, W (&w)[P]) {
  int first = 0;
#if defined(MS_AVX512_BF16)
  if constexpr (R <= 4 && Widened<W>::kNeeded && W::Fed::kHalf) {  // more leave it no registers
#pragma GCC unroll 2
    for (; first + 1 < P; first += 2) {
      W::load_two(p + first * W::kStepBytes, w[first], w[first + 1]);
    }
  }
#endif
#pragma GCC unroll 4
  for (; first < P; ++first) w[first].load(p + first * W::kStepBytes);
}

}  // namespace MS_ISA
}  // namespace minserve
