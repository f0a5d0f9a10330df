// SiLU in vectors of the CPU; of GPUs it is in silu.cuh.
#pragma once

#include "gates.h"

namespace minserve {
namespace MS_ISA {

// x sigma(x). Of |x|, so that the exponential stays below one.
MS_CELL VF silu(VF x) {
  const VF small = exp2_of(absolute(x) * splat<VF>(-kLog2e)), inverse = reciprocal(small + 1.0f);
  return x * (x < 0.0f ? small * inverse : inverse);
}

}  // namespace MS_ISA
}  // namespace minserve
