// Softplus in vectors of the CPU.
#pragma once

#include "gates.h"

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

}  // namespace MS_ISA
}  // namespace minserve
