// The exact GELU.
#pragma once

#include "device.cuh"

namespace minserve {
namespace cuda {

// y Phi(y). erf of |x| = |y| / sqrt(2) as 1 - (a_1 t + ... + a_5 t^5) e^(-x^2), t = 1 / (1 + p
// |x|), absolute error 1.5e-7 (Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26).
__device__ __forceinline__ float gelu(float y) {
  const float x = fabsf(y) * 0.70710678f;
  const float t = fast_reciprocal(fmaf(0.3275911f, x, 1.0f));
  float sum = fmaf(1.061405429f, t, -1.453152027f);
  sum = fmaf(sum, t, 1.421413741f);
  sum = fmaf(sum, t, -0.284496736f);
  sum = fmaf(sum, t, 0.254829592f);
  const float tail = sum * t * fast_exp2(x * x * -1.44269504f);  // 1 - erf(x)
  return y * (y < 0.0f ? 0.5f * tail : 1.0f - 0.5f * tail);
}

}  // namespace cuda
}  // namespace minserve
