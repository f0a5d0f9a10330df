// minLSTM: h_t = f' h_{t-1} + i' g(v), with gates normalised to f' + i' = 1 or plain sigmoids; and
// its gradient. Source: "Were RNNs All We Needed?", arXiv 2410.01201. pre holds [f | i | v] per
// token.
#pragma once

#include "../common/activations.h"
#include "../common/scan_at.h"

namespace minserve {
namespace MS_ISA {

template <class T>
struct MinLstmCell {
  using V = typename ComputeType<T>::type;
  struct Item {
    V a, b;
  };
  const T* pre;
  T* out;
  std::int64_t channels;
  bool linear, normalize;

  MS_CELL explicit MinLstmCell(const ScanArgs& args)
      : pre(static_cast<const T*>(args.pre)),
        out(static_cast<T*>(args.out)),
        channels(args.layout.channels),
        linear(args.linear_candidate),
        normalize(args.normalize_gates) {}

  template <class L>
  MS_CELL Item load(const At& at, L lanes) const {
    const T* p = pre + at.row * 3 * channels + at.channel;
    const Pair<V> gates =
        lstm_gates(MS_ISA::load<V>(p, lanes), MS_ISA::load<V>(p + channels, lanes), normalize);
    const V g = candidate(MS_ISA::load<V>(p + 2 * channels, lanes), linear);
    return {gates.first, gates.second * g};
  }
  template <class L>
  MS_CELL void emit(const At& at, const Item&, V, V after, L lanes) const {
    store(out + at.row * channels + at.channel, after, lanes);
  }
  template <class L>
  MS_CELL void zero(const At& at, L lanes) const {
    store(out + at.row * channels + at.channel, splat<V>(0.0f), lanes);
  }
};

// As MinGruBackwardCell. Normalised: with d = log sigma(f) - log sigma(i), f' = sigma(d), so
// dh/dd = f' i' (h_{t-1} - g), dd/df = sigma(-f), dd/di = -sigma(-i).
template <class T>
struct MinLstmBackwardCell {
  using V = typename ComputeType<T>::type;
  using S = typename LanesOf<V>::scalar;
  struct Item {
    V a, b, grad;
    V input;  // i'
    V g, slope;
    V forget_slope, input_slope;  // sigma(-f), sigma(-i)
  };
  const T* pre;
  const T* h;
  const T* grad_h;
  const S* h0;
  T* grad_pre;
  std::int64_t channels;
  bool linear, normalize;

  MS_CELL explicit MinLstmBackwardCell(const ScanArgs& args)
      : pre(static_cast<const T*>(args.pre)),
        h(static_cast<const T*>(args.h)),
        grad_h(static_cast<const T*>(args.grad_h)),
        h0(static_cast<const S*>(args.h0)),
        grad_pre(static_cast<T*>(args.out)),
        channels(args.layout.channels),
        linear(args.linear_candidate),
        normalize(args.normalize_gates) {}

  template <class L>
  MS_CELL Item load(const At& at, L lanes) const {
    const T* p = pre + at.row * 3 * channels + at.channel;
    const V f = MS_ISA::load<V>(p, lanes);
    const V i = MS_ISA::load<V>(p + channels, lanes);
    const V v = MS_ISA::load<V>(p + 2 * channels, lanes);
    const V grad = MS_ISA::load<V>(grad_h + at.row * channels + at.channel, lanes);
    const Pair<V> gates = lstm_gates(f, i, normalize);
    return {gates.first,
            gates.first * grad,
            grad,
            gates.second,
            candidate(v, linear),
            candidate_slope(v, linear),
            sigmoid_both(f).second,
            sigmoid_both(i).second};
  }
  template <class L>
  MS_CELL void emit(const At& at, const Item& item, V before, V, L lanes) const {
    const V grad = item.grad + before;
    const V previous = previous_state<V>(h, h0, at, channels, true, lanes);
    V grad_forget, grad_input;
    if (normalize) {
      const V common = grad * (item.a * item.input) * (previous - item.g);
      grad_forget = common * item.forget_slope;
      grad_input = -common * item.input_slope;
    } else {
      grad_forget = grad * previous * (item.a * item.forget_slope);
      grad_input = grad * item.g * (item.input * item.input_slope);
    }
    T* p = grad_pre + at.row * 3 * channels + at.channel;
    store(p, grad_forget, lanes);
    store(p + channels, grad_input, lanes);
    store(p + 2 * channels, grad * item.input * item.slope, lanes);
  }
  template <class L>
  MS_CELL void zero(const At& at, L lanes) const {
    T* p = grad_pre + at.row * 3 * channels + at.channel;
    for (int gate = 0; gate < 3; ++gate) store(p + gate * channels, splat<V>(0.0f), lanes);
  }
};

}  // namespace MS_ISA
}  // namespace minserve
