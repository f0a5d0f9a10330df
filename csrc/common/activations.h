// Gates and candidates, written once for vectors, scalars and CUDA threads.
#pragma once

#include "vec.h"

namespace minserve {
namespace MS_ISA {

template <class V>
struct Pair {
  V first;
  V second;
};

// sigma(x) and sigma(-x) from one exponential; neither is formed as 1 - the other, so both keep
// their relative accuracy in the tails.
template <class V>
MS_CELL Pair<V> sigmoid_both(V x) {
  V e = exp_neg(x < 0.0f ? x : -x);
  V large = reciprocal(1.0f + e);
  V small = e * large;
  return {x < 0.0f ? small : large, x < 0.0f ? large : small};
}

// The candidate g(x) = x + 0.5 for x >= 0, sigma(x) otherwise; or x itself.
template <class V>
MS_CELL V candidate(V x, bool linear) {
  if (linear) return x;
  return x < 0.0f ? sigmoid_both(x).first : x + 0.5f;
}

template <class V>
MS_CELL V candidate_slope(V x, bool linear) {
  if (linear) return splat<V>(1.0f);
  Pair<V> s = sigmoid_both(x);
  return x < 0.0f ? s.first * s.second : splat<V>(1.0f);
}

// minLSTM's gates. sigma(log sigma(f) - log sigma(i)) is sigma(f) / (sigma(f) + sigma(i)), which is
// (1 + e^-i) / ((1 + e^-i) + (1 + e^-f)); scaled by e^-m with m = max(0, -f, -i) no exponential
// overflows, the divisor stays in [1, 4] and every term is positive: nothing cancels.
template <class V>
MS_CELL Pair<V> lstm_gates(V f, V i, bool normalize) {
  if (!normalize) return {sigmoid_both(f).first, sigmoid_both(i).first};
  V m = f < i ? -f : -i;
  m = m < 0.0f ? splat<V>(0.0f) : m;
  V one = exp_neg(-m);
  V forget = one + exp_neg(-i - m);
  V input = one + exp_neg(-f - m);
  V scale = reciprocal(forget + input);
  return {forget * scale, input * scale};
}

}  // namespace MS_ISA
}  // namespace minserve
