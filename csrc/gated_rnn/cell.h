// The cells of GRU and LSTM as torch.nn has them, written once for CPU vectors and CUDA threads.
#pragma once

#include "../cells/gates.h"
#include "args.h"

namespace minserve {
namespace MS_ISA {

// sigma(x) = 1 / (1 + e^-x)
template <class V>
MS_CELL V sigmoid(V x) {
  return reciprocal(exp_below(-x, 120.0f) + 1.0f);
}

// From e^-2|x|, and near zero, where that would cancel, by a polynomial to 1 ulp (Cephes, tanhf).
template <class V>
MS_CELL V hyperbolic_tangent(V x) {
  const V size = absolute(x), small = exp2_of(size * splat<V>(-2.0 * kLog2e));
  const V of_size = (1.0f - small) * reciprocal(small + 1.0f);
  const V square = x * x;
  V p = splat<V>(-5.70498872745e-3);
  p = fmadd(p, square, splat<V>(2.06390887954e-2));
  p = fmadd(p, square, splat<V>(-5.37397155531e-2));
  p = fmadd(p, square, splat<V>(1.33314422036e-1));
  p = fmadd(p, square, splat<V>(-3.33332819422e-1));
  const V near = fmadd(p * square, x, x);
  const V far = x < 0.0f ? -of_size : of_size;
  return size < 0.625f ? near : far;
}

// The next state from pre-activations `in` and U h + c in `of_h`, both by gates.
template <class V>
struct GruUnit {
  static constexpr int kGates = kGruGates;
  V h;
  MS_CELL void advance(const V (&in)[kGates], const V (&of_h)[kGates]) {
    const V r = sigmoid(in[0] + of_h[0]);
    // 1 - z is formed as e^-x / (1 + e^-x), not as a difference.
    const V e = exp_below(-(in[1] + of_h[1]), 120.0f), z = reciprocal(e + 1.0f);
    const V n = hyperbolic_tangent(fmadd(r, of_h[2], in[2]));
    h = fmadd(e * z, n, z * h);
  }
};
template <class V>
struct LstmUnit {
  static constexpr int kGates = kLstmGates;
  V h, c;
  MS_CELL void advance(const V (&in)[kGates], const V (&of_h)[kGates]) {
    const V i = sigmoid(in[0] + of_h[0]), f = sigmoid(in[1] + of_h[1]);
    const V g = hyperbolic_tangent(in[2] + of_h[2]), o = sigmoid(in[3] + of_h[3]);
    c = fmadd(f, c, i * g);
    h = o * hyperbolic_tangent(c);
  }
};

}  // namespace MS_ISA
}  // namespace minserve
