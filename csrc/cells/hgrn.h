// HGRN: f' = l + (1 - l) sigma(f), h_t = f' h_{t-1} + (1 - f') silu(i), with a lower bound l of
// each channel and 1 - f' formed as (1 - l) sigma(-f). Source: "Hierarchically Gated Recurrent
// Neural Network for Sequence Modeling", arXiv 2311.04823. Its gradient is composed of torch's
// operators and the linear scan's (engine/ops/scan.py).
#pragma once

#include "gates.h"

namespace minserve {
namespace MS_ISA {

// inputs: i, f; what follows them is the output gate g, which comes after the recurrence; output: h
template <class V>
struct HgrnCell {
  static constexpr int kPreactivations = 3, kInputs = 2, kParameters = 1, kStates = 1;
  static constexpr int kOutputs = 1, kPrevious = -1;
  static constexpr bool kHasOptions = false;
  template <class O>
  static MS_CELL Affine<V> coefficients(const O&, const V (&in)[kInputs],
                                        const Parameters<V, kParameters>& parameters) {
    const V i = in[0], f = in[1], bound = parameters.at[0], rest = splat<V>(1.0) - bound;
    // Of |i| and |f|, so that neither exponential nor the product of the divisors overflows.
    const V small_i = exp2_of(absolute(i) * splat<V>(-kLog2e));
    const V small_f = exp2_of(absolute(f) * splat<V>(-kLog2e));
    V over_i, over_f;
    reciprocals(small_i + 1.0f, small_f + 1.0f, over_i, over_f);
    const V silu = i * (i < 0.0f ? small_i * over_i : over_i);
    const V less = small_f * over_f;  // sigma(-|f|), beside sigma(|f|)
    const V keep = f < 0.0f ? less : over_f, write = f < 0.0f ? over_f : less;
    return {fmadd(rest, keep, bound), rest * write * silu};
  }
  template <class O>
  static MS_CELL void outputs(const O&, const V (&)[kInputs], V, V after, V (&out)[kOutputs]) {
    out[0] = after;
  }
};

}  // namespace MS_ISA
}  // namespace minserve
