// h_t = a_t h_{t-1} + b_t with a and b given, and its gradient.
#pragma once

#include "gates.h"

namespace minserve {
namespace MS_ISA {

// inputs: a, b; output: h
template <class V>
struct LinearCell {
  static constexpr int kPreactivations = 2, kInputs = 2, kParameters = 0, kStates = 1;
  static constexpr int kOutputs = 1, kPrevious = -1;
  static constexpr bool kHasOptions = false;
  template <class O>
  static MS_CELL Affine<V> coefficients(const O&, const V (&in)[kInputs],
                                        const Parameters<V, 0>& = {}) {
    return {in[0], in[1]};
  }
  template <class O>
  static MS_CELL void outputs(const O&, const V (&)[kInputs], V, V after, V (&out)[kOutputs]) {
    out[0] = after;
  }
};

// With q_t = a_t g_t, where g_t is the whole gradient of h_t, the backward recurrence has the form
// of the forward one at the same index: q_t = a_t q_{t+1} + a_t dh_t, g_t = dh_t + q_{t+1}. Its
// carry out is the gradient of h0. It runs against the direction of the forward scan.
// inputs: a, dh, previous h; outputs: da, db
template <class V>
struct LinearBackwardCell {
  static constexpr int kInputs = 3, kParameters = 0, kOutputs = 2, kPrevious = 2;
  static constexpr bool kHasOptions = false;
  template <class O>
  static MS_CELL Affine<V> coefficients(const O&, const V (&in)[kInputs],
                                        const Parameters<V, 0>& = {}) {
    return {in[0], in[0] * in[1]};
  }
  template <class O>
  static MS_CELL void outputs(const O&, const V (&in)[kInputs], V before, V, V (&out)[kOutputs]) {
    const V grad = in[1] + before;
    out[0] = grad * in[2];
    out[1] = grad;
  }
};

}  // namespace MS_ISA
}  // namespace minserve
