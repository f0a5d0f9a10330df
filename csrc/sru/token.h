// One token of the simple recurrent unit and its gradient, for CPU vectors and CUDA threads.
//
// Source: "Simple Recurrent Units for Highly Parallelizable Recurrence", arXiv 1709.02755. With
// e = exp(-a) of a gate's pre-activation a, the gate is 1 / (1 + e) and one minus it is e times
// that, so f c + (1 - f) u = f (c + e u): one product behind the reciprocal, and neither share is
// formed as one minus the other.
#pragma once

#include "../cells/gates.h"

namespace minserve {
namespace MS_ISA {

// Beyond it a gate is 2^-60, so that e u stays finite for any u below 2^67.
constexpr float kSruBound = 60.0f;

// A channel's vectors, times -log2(e): of weight_c, then of bias.
template <class V>
struct SruChannel {
  V forget_c, reset_c, forget, reset;
};

// exp(-a) of the gate's part of u, the gate's bias and what it sees of c.
template <class V>
MS_CELL V sru_exponential(V u, V bias, V of_c, V c) {
  const V x = fmadd(of_c, c, fmadd(u, splat<V>(-kLog2e), bias));
  return exp2_of(minimum(x, splat<V>(kSruBound)));
}

// tanh, accurate relative to itself: of small numbers a polynomial, which 1 - e^-2|x| is not.
template <class V>
MS_CELL V sru_tanh(V x) {
  const V size = absolute(x), square = x * x;
  const V small = exp2_of(size * splat<V>(-2 * kLog2e));
  const V large = (splat<V>(1.0f) - small) * reciprocal(small + 1.0f);
  V p = splat<V>(2.1869489e-2f);  // 62 / 2835
  p = fmadd(p, square, splat<V>(-5.3968254e-2f));
  p = fmadd(p, square, splat<V>(0.13333333f));
  p = fmadd(p, square, splat<V>(-0.33333333f));
  const V near = fmadd(p * square, x, x), far = x < 0.0f ? -large : large;
  return size < 0.3f ? near : far;
}
template <bool kTanh, class V>
MS_CELL V sru_activation(V c) {
  if constexpr (kTanh) return sru_tanh(c);
  return c;
}

// h = r g(c) + (1 - r) x', or r g(c).
template <bool kHighway, class V>
MS_CELL V sru_output(V e, V over, V g, V x) {
  if constexpr (kHighway) return over * fmadd(e, x, g);
  return over * g;
}

// The token: c is that of the token before, then its own; returns h. `x` is scaled.
template <bool kHighway, bool kTanh, class V>
MS_CELL V sru_token(const SruChannel<V>& channel, V u0, V u1, V u2, V x, V& c) {
  const V e = sru_exponential(u1, channel.forget, channel.forget_c, c);
  const V e_reset = sru_exponential(u2, channel.reset, channel.reset_c, c);
  V over, over_reset;
  reciprocals(e + 1.0f, e_reset + 1.0f, over, over_reset);
  c = over * fmadd(e, u0, c);
  return sru_output<kHighway>(e_reset, over_reset, sru_activation<kTanh>(c), x);
}

// What the gradient of a token leaves: of u, of x', and what is to be added up for the vectors.
template <class V>
struct SruTokenGradient {
  V u0, u1, u2, x;
};
// The sums over tokens of a channel's gradients: of weight_c, then of bias.
template <class V>
struct SruSums {
  V forget_c, reset_c, forget, reset;
};

// `c` is the token's own, `before` that of the token before; `carry` is the gradient of c from the
// tokens behind, and becomes that of `before`. weight_c is not scaled here.
template <bool kHighway, bool kTanh, class V>
MS_CELL SruTokenGradient<V> sru_token_gradient(const SruChannel<V>& channel, V weight_forget,
                                               V weight_reset, V u0, V u1, V u2, V x, V before, V c,
                                               V grad_h, V& carry, SruSums<V>& sums) {
  const V e = sru_exponential(u1, channel.forget, channel.forget_c, before);
  const V e_reset = sru_exponential(u2, channel.reset, channel.reset_c, before);
  V f, r;
  reciprocals(e + 1.0f, e_reset + 1.0f, f, r);
  const V g = sru_activation<kTanh>(c), not_f = e * f, not_r = e_reset * r;
  V of_g = grad_h * r;
  if constexpr (kTanh) of_g = of_g * (splat<V>(1.0f) - g * g);
  V gap = g;
  if constexpr (kHighway) gap = g - x;
  SruTokenGradient<V> out;
  out.u2 = grad_h * gap * (r * not_r);
  const V of_c = carry + of_g;
  out.u1 = of_c * (before - u0) * (f * not_f);
  out.u0 = of_c * not_f;
  out.x = grad_h * not_r;
  carry = fmadd(of_c, f, fmadd(out.u1, weight_forget, out.u2 * weight_reset));
  sums.forget_c = fmadd(out.u1, before, sums.forget_c);
  sums.reset_c = fmadd(out.u2, before, sums.reset_c);
  sums.forget = sums.forget + out.u1;
  sums.reset = sums.reset + out.u2;
  return out;
}

}  // namespace MS_ISA
}  // namespace minserve
