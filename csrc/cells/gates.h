// Gates and candidates, written once for CPU vectors, scalars and CUDA threads.
//
// Every cell is h_t = a h_{t-1} + b with (a, b), its coefficients, from its gates. The exponentials
// are taken in base 2 and quotients share reciprocals where that is cheaper, because these are what
// costs. No gate is formed as one minus another: both keep their relative accuracy.
#pragma once

#include "../core/vec.h"

namespace minserve {
namespace MS_ISA {

template <class V>
struct Affine {
  V a, b;
};

// A cell is a struct of functions and of these numbers, all of one channel:
//   kPreactivations  columns of the pre-activations
//   kInputs          how many of them, from the first on, the recurrence reads
//   kParameters      fp32 numbers that no token changes, in vectors [channels]
//   kStates          numbers of state; kernels keep one
//   kOutputs         what the recurrence gives: of a forward cell h, of a backward cell gradients
//   kPrevious        which input is the state before, of a backward cell; -1: none
//   kHasOptions      whether it has those below
// coefficients() gives the step from inputs and parameters, outputs() the results from the states
// before and after it. Inputs of a backward cell are those of its forward cell, then gradients.
template <class V, int kCount>
struct Parameters {
  V at[kCount];
};
template <class V>
struct Parameters<V, 0> {};

// The backward cell of a cell that has none: its scans are not differentiable.
template <class V>
struct NoBackwardCell {};
template <class Cell>
constexpr bool kIsThere = true;
template <class V>
constexpr bool kIsThere<NoBackwardCell<V>> = false;

// Whether a cell reads all of its pre-activations, one state and nothing else, as kernels take for
// granted that have no place for parameters.
template <class Cell>
constexpr bool kIsPlain = Cell::kInputs == Cell::kPreactivations && Cell::kParameters == 0 &&
                          Cell::kStates == 1 && Cell::kOutputs == 1;

// The options of a cell: those of the paper's log-space form as constants, so that the inner loop
// of the usual kernel holds no branch on them, or any.
struct UsualOptions {
  static constexpr bool linear = false;
  static constexpr bool normalize = true;
};
struct AnyOptions {
  bool linear;
  bool normalize;
};

// Calls f with the options that the arguments of a call say; kAny: of a cell that has some.
template <bool kAny, class Args, class F>
inline void with_options(const Args& args, F f) {
  if constexpr (kAny) {
    if (args.linear_candidate || !args.normalize_gates) {
      return f(AnyOptions{args.linear_candidate, args.normalize_gates});
    }
  }
  f(UsualOptions{});
}

template <class V>
struct GruGates {
  V keep;       // 1 - z = sigma(-k)
  V write;      // z = sigma(k)
  V candidate;  // g(v)
  V slope;      // g'(v)
};

template <class V>
struct LstmGates {
  V forget;                     // f', or sigma(f)
  V input;                      // i', or sigma(i)
  V candidate;                  // g(v)
  V slope;                      // g'(v)
  V forget_slope, input_slope;  // sigma(-f), sigma(-i)
};

constexpr double kLog2e = 1.4426950408889634;

// 2^(x log2 e), held below 2^bound so that products of a few of them stay finite; NaN passes.
template <class V>
MS_CELL V exp_below(V x, float bound) {
  return exp2_of(minimum(x * splat<V>(kLog2e), splat<V>(bound)));
}

// g(v) = v + 0.5 for v >= 0, sigma(v) otherwise. sigma lies under v + 0.5 for v > 0 and above it
// for v < 0, so g is the larger of v + 0.5 and sigma(-|v|). Needs 1 / (1 + e^-|v|).
template <class V>
struct Candidate {
  V small;  // e^-|v|
  MS_CELL explicit Candidate(V v) : small(exp2_of(absolute(v) * splat<V>(-kLog2e))) {}
  MS_CELL V divisor() const { return small + 1.0f; }
  MS_CELL V value(V v, V inverse) const { return maximum(small * inverse, v + 0.5f); }
  MS_CELL V slope(V v, V inverse) const {
    return v < 0.0f ? small * inverse * inverse : splat<V>(1.0f);
  }
};

template <class O, class V>
MS_CELL GruGates<V> gru_gates(const O& options, V k, V v) {
  const V e = exp_below(k, 120.0f);
  const V divisor = e + 1.0f;
  if (options.linear) {
    const V keep = reciprocal(divisor);
    return {keep, e * keep, v, splat<V>(1.0f)};
  }
  const Candidate<V> g(v);
  V keep, inverse;
  reciprocals(divisor, g.divisor(), keep, inverse);
  return {keep, e * keep, g.value(v, inverse), g.slope(v, inverse)};
}

// sigma(log sigma(f) - log sigma(i)) = sigma(f) / (sigma(f) + sigma(i)), which with F = e^f and
// I = e^i is F (1 + I) / (F (1 + I) + I (1 + F)): every term is positive, nothing cancels. Where
// both are tiny only their ratio matters, so both are scaled up before they could vanish.
template <class O, class V>
MS_CELL LstmGates<V> lstm_gates(const O& options, V f, V i, V v) {
  const Candidate<V> g(options.linear ? splat<V>(0.0f) : v);
  if (!options.normalize) {
    const V F = exp_below(f, 40.0f), I = exp_below(i, 40.0f);
    const V df = F + 1.0f, di = I + 1.0f, dv = options.linear ? splat<V>(1.0f) : g.divisor();
    const V all = reciprocal(df * di * dv);
    const V not_f = all * (di * dv), not_i = all * (df * dv), inverse = all * (df * di);
    return {F * not_f,
            I * not_i,
            options.linear ? v : g.value(v, inverse),
            options.linear ? splat<V>(1.0f) : g.slope(v, inverse),
            not_f,
            not_i};
  }
  const V xf = f * splat<V>(kLog2e), xi = i * splat<V>(kLog2e);
  const V shift = minimum(maximum(xf, xi) + 50.0f, splat<V>(0.0f));
  const V F = exp2_of(minimum(xf - shift, splat<V>(60.0f)));
  const V I = exp2_of(minimum(xi - shift, splat<V>(60.0f)));
  const V forget = fmadd(F, I, F), input = fmadd(I, F, I);
  const V sum = forget + input;
  V scale, inverse = splat<V>(1.0f);
  if (options.linear) {
    scale = reciprocal(sum);
  } else {
    reciprocals(sum, g.divisor(), scale, inverse);
  }
  return {forget * scale,
          input * scale,
          options.linear ? v : g.value(v, inverse),
          options.linear ? splat<V>(1.0f) : g.slope(v, inverse),
          reciprocal(exp_below(f, 120.0f) + 1.0f),
          reciprocal(exp_below(i, 120.0f) + 1.0f)};
}

// The state after one step of a plain cell, from its pre-activations and the state before.
template <template <class> class CellOf, class O, class V>
MS_CELL V step_cell(const O& options, const V (&in)[CellOf<V>::kInputs], V before) {
  static_assert(kIsPlain<CellOf<V>>);
  const Affine<V> step = CellOf<V>::coefficients(options, in);
  return fmadd(step.a, before, step.b);
}

}  // namespace MS_ISA
}  // namespace minserve
