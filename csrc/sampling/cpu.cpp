// The loops over a row's logits on the CPU, once per instruction set.
//
// Every instruction set gives the same bits.
#include "sample.h"
#include "../core/exp_cpu.h"
#include "filters_cpu.h"

namespace minserve {
namespace MS_ISA {
namespace {

// 2^-distance for 0 <= distance <= 2 * kFarthest, within 1.1 ulp; 1 for 0. 2^n 2^r with |r| <= 1/2,
// and of 2^r the minimax polynomial of degree 7 with p(0) = 1, which leaves 2e-9 relative. Sums and
// products do not fuse.
MS_CELL float scaled_prob_of(float distance) {
  // 1.5 * 2^23: a difference from it is rounded to an integer, which is left in the low bits.
  constexpr float kMagic = 12582912.0f;
  const float shifted = kMagic - distance;
  const float r = (kMagic - shifted) - distance;
  float q = 1.51961567e-5f;
  q = q * r + 1.54667563e-4f;
  q = q * r + 1.33339351e-3f;
  q = q * r + 9.61803831e-3f;
  q = q * r + 5.55041023e-2f;
  q = q * r + 2.40226507e-1f;
  q = q * r + 6.93147182e-1f;
  const float p = q * r + 1.0f;
  return bit_cast<float>(bit_cast<std::uint32_t>(p) + (bit_cast<std::uint32_t>(shifted) << 23));
}

// Of scaled probabilities up to 1, 2^38 times as much, rounded down.
MS_CELL std::int64_t weight_of(float scaled_prob) {
  constexpr std::uint32_t kOne = 127, kFraction = 23;  // exponent of 1, bits below the leading one
  const auto bits = bit_cast<std::uint32_t>(scaled_prob);
  const std::uint32_t mantissa = (bits & ((1u << kFraction) - 1)) | 1u << kFraction;
  const std::uint32_t halvings = kOne - (bits >> kFraction);
  const std::uint64_t weight = static_cast<std::uint64_t>(mantissa) << (kWeightBits - kFraction);
  return static_cast<std::int64_t>(weight >> (halvings < 63 ? halvings : 63));
}

float scaled_prob(float distance) {
  return scaled_prob_of(distance);
}

float find_weights(const float* __restrict logits, std::int64_t vocab, float best, float octaves,
                   float* __restrict distances, std::int64_t* __restrict weights) {
  const auto bound = bit_cast<std::int32_t>(kFarthest);
  std::int32_t farthest = 0;  // as bits, which order as distances do
  for (std::int64_t i = 0; i < vocab; ++i) {
    const float exact = (best - logits[i]) * octaves;
    const float distance = exact < 2 * kFarthest ? exact : 2 * kFarthest;
    const auto bits = bit_cast<std::int32_t>(distance);
    const std::int32_t near = bits <= bound ? bits : 0;
    farthest = near > farthest ? near : farthest;
    distances[i] = distance;
    weights[i] = weight_of(scaled_prob_of(distance));
  }
  return bit_cast<float>(farthest);
}

}  // namespace

SampleKernels sample_kernels() {
  return {&best_logit, &first_place, &scaled_prob, &find_weights, &before, &bin, &holds, &keep};
}

}  // namespace MS_ISA
}  // namespace minserve
