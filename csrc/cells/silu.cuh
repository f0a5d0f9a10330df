// SiLU, the gate of outputs and of SwiGLU.
#pragma once

#include "gates.h"

namespace minserve {
namespace cuda {

// x sigma(x), from the exponential of -|x|, which cannot overflow.
__device__ __forceinline__ float silu(float x) {
  const float small = exp2_of(absolute(x) * static_cast<float>(-kLog2e));
  const float over = reciprocal(small + 1.0f);
  return x * (x < 0.0f ? small * over : over);
}

}  // namespace cuda
}  // namespace minserve
