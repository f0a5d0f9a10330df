// minGRU: z = sigma(k), h_t = (1 - z) h_{t-1} + z g(v), with 1 - z formed as sigma(-k); and its
// gradient. Source: "Were RNNs All We Needed?", arXiv 2410.01201.
#pragma once

#include "gates.h"

namespace minserve {
namespace MS_ISA {

// inputs: k, v; output: h
template <class V>
struct MinGruCell {
  static constexpr int kPreactivations = 2, kInputs = 2, kParameters = 0, kStates = 1;
  static constexpr int kOutputs = 1, kPrevious = -1;
  static constexpr bool kHasOptions = true;
  template <class O>
  static MS_CELL Affine<V> coefficients(const O& options, const V (&in)[kInputs],
                                        const Parameters<V, 0>& = {}) {
    const GruGates<V> gates = gru_gates(options, in[0], in[1]);
    return {gates.keep, gates.write * gates.candidate};
  }
  template <class O>
  static MS_CELL void outputs(const O&, const V (&)[kInputs], V, V after, V (&out)[kOutputs]) {
    out[0] = after;
  }
};

// Same device as LinearBackwardCell: q_t = f_t (dh_t + q_{t+1}) with f = 1 - z. The carry in is the
// gradient of the last state, the carry out that of h0. Gates are computed again rather than
// stored. inputs: k, v, dh, previous h; outputs: dk, dv
template <class V>
struct MinGruBackwardCell {
  static constexpr int kInputs = 4, kParameters = 0, kOutputs = 2, kPrevious = 3;
  static constexpr bool kHasOptions = true;
  template <class O>
  static MS_CELL Affine<V> coefficients(const O& options, const V (&in)[kInputs],
                                        const Parameters<V, 0>& = {}) {
    const V keep = gru_gates(options, in[0], in[1]).keep;
    return {keep, keep * in[2]};
  }
  template <class O>
  static MS_CELL void outputs(const O& options, const V (&in)[kInputs], V before, V,
                              V (&out)[kOutputs]) {
    const GruGates<V> gates = gru_gates(options, in[0], in[1]);
    const V grad = in[2] + before;
    out[0] = grad * (gates.write * gates.keep) * (gates.candidate - in[3]);
    out[1] = grad * gates.write * gates.slope;
  }
};

}  // namespace MS_ISA
}  // namespace minserve
