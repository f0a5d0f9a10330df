// The exact GELU, as far as bfloat16 and float16 can tell.
#pragma once

#include "../arch/ptx.cuh"

namespace minserve {
namespace cuda {

// y Phi(y) = max(y, 0) - |y| Phi(-|y|), the last as a power of two: its logarithm is nearly a
// parabola. The polynomial was fitted to log2 Phi(-a) over [0, 6] by Lawson's algorithm, with a
// weight of one up to 4.2 that falls by a power of two every quarter beyond. Relative error of Phi,
// and so of negative results: 1.3e-4 up to 4.2 (bfloat16 rounds by 2e-3, float16 by 5e-4), 5e-4 up
// to 5, and below 1e-8 in all beyond, where the polynomial falls for good. Absolute error: 1.9e-5.
// Infinite y give NaN.
__device__ __forceinline__ float gelu(float y) {
  const float a = fabsf(y);
  float power = fmaf(-2.8654136e-4f, a, 5.4825582e-3f);
  power = fmaf(power, a, -4.7027521e-2f);
  power = fmaf(power, a, -0.4658266f);
  power = fmaf(power, a, -1.1483513f);
  power = fmaf(power, a, -1.0001827f);
  return fmaf(-a, fast_exp2(power), fmaxf(y, 0.0f));
}

}  // namespace cuda
}  // namespace minserve
