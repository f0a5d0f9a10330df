// minLSTM: h_t = f' h_{t-1} + i' g(v), with gates normalised to f' + i' = 1 or plain sigmoids; and
// its gradient. Source: "Were RNNs All We Needed?", arXiv 2410.01201.
#pragma once

#include "gates.h"

namespace minserve {
namespace MS_ISA {

// inputs: f, i, v; output: h
template <class V>
struct MinLstmCell {
  static constexpr int kPreactivations = 3, kInputs = 3, kParameters = 0, kStates = 1;
  static constexpr int kOutputs = 1, kPrevious = -1;
  static constexpr bool kHasOptions = true;
  template <class O>
  static MS_CELL Affine<V> coefficients(const O& options, const V (&in)[kInputs],
                                        const Parameters<V, 0>& = {}) {
    const LstmGates<V> gates = lstm_gates(options, in[0], in[1], in[2]);
    return {gates.forget, gates.input * gates.candidate};
  }
  template <class O>
  static MS_CELL void outputs(const O&, const V (&)[kInputs], V, V after, V (&out)[kOutputs]) {
    out[0] = after;
  }
};

// As MinGruBackwardCell. Normalised: with d = log sigma(f) - log sigma(i), f' = sigma(d), so
// dh/dd = f' i' (h_{t-1} - g), dd/df = sigma(-f), dd/di = -sigma(-i).
// inputs: f, i, v, dh, previous h; outputs: df, di, dv
template <class V>
struct MinLstmBackwardCell {
  static constexpr int kInputs = 5, kParameters = 0, kOutputs = 3, kPrevious = 4;
  static constexpr bool kHasOptions = true;
  template <class O>
  static MS_CELL Affine<V> coefficients(const O& options, const V (&in)[kInputs],
                                        const Parameters<V, 0>& = {}) {
    const V forget = lstm_gates(options, in[0], in[1], in[2]).forget;
    return {forget, forget * in[3]};
  }
  template <class O>
  static MS_CELL void outputs(const O& options, const V (&in)[kInputs], V before, V,
                              V (&out)[kOutputs]) {
    const LstmGates<V> gates = lstm_gates(options, in[0], in[1], in[2]);
    const V grad = in[3] + before;
    if (options.normalize) {
      const V common = grad * (gates.forget * gates.input) * (in[4] - gates.candidate);
      out[0] = common * gates.forget_slope;
      out[1] = -common * gates.input_slope;
    } else {
      out[0] = grad * in[4] * (gates.forget * gates.forget_slope);
      out[1] = grad * gates.candidate * (gates.input * gates.input_slope);
    }
    out[2] = grad * gates.input * gates.slope;
  }
};

}  // namespace MS_ISA
}  // namespace minserve
