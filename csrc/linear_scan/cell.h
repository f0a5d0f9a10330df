// h_t = a_t h_{t-1} + b_t with a and b given, and its gradient.
#pragma once

#include "../common/activations.h"
#include "../common/scan_at.h"

namespace minserve {
namespace MS_ISA {

template <class T>
struct LinearCell {
  using V = typename ComputeType<T>::type;
  struct Item {
    V a, b;
  };
  const T* a;
  const T* b;
  T* out;
  std::int64_t channels;

  MS_CELL explicit LinearCell(const ScanArgs& args)
      : a(static_cast<const T*>(args.a)),
        b(static_cast<const T*>(args.b)),
        out(static_cast<T*>(args.out)),
        channels(args.layout.channels) {}

  template <class L>
  MS_CELL Item load(const At& at, L lanes) const {
    const std::int64_t i = at.row * channels + at.channel;
    return {MS_ISA::load<V>(a + i, lanes), MS_ISA::load<V>(b + i, lanes)};
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

// With q_t = a_t g_t, where g_t is the whole gradient of h_t, the backward recurrence has the form
// of the forward one at the same index: q_t = a_t q_{t+1} + a_t dh_t, g_t = dh_t + q_{t+1}. Its
// carry out is the gradient of h0. It runs against the direction of the forward scan.
template <class T>
struct LinearBackwardCell {
  using V = typename ComputeType<T>::type;
  using S = typename LanesOf<V>::scalar;
  struct Item {
    V a, b, grad;
  };
  const T* a;
  const T* h;
  const T* grad_h;
  const S* h0;
  T* grad_a;
  T* grad_b;
  std::int64_t channels;
  bool reverse;

  MS_CELL explicit LinearBackwardCell(const ScanArgs& args)
      : a(static_cast<const T*>(args.a)),
        h(static_cast<const T*>(args.h)),
        grad_h(static_cast<const T*>(args.grad_h)),
        h0(static_cast<const S*>(args.h0)),
        grad_a(static_cast<T*>(args.out)),
        grad_b(static_cast<T*>(args.out_second)),
        channels(args.layout.channels),
        reverse(args.layout.reverse) {}

  template <class L>
  MS_CELL Item load(const At& at, L lanes) const {
    const std::int64_t i = at.row * channels + at.channel;
    const V coefficient = MS_ISA::load<V>(a + i, lanes);
    const V grad = MS_ISA::load<V>(grad_h + i, lanes);
    return {coefficient, coefficient * grad, grad};
  }
  template <class L>
  MS_CELL void emit(const At& at, const Item& item, V before, V, L lanes) const {
    const std::int64_t i = at.row * channels + at.channel;
    const V grad = item.grad + before;
    const V previous = previous_state<V>(h, h0, at, channels, reverse, lanes);
    store(grad_b + i, grad, lanes);
    store(grad_a + i, grad * previous, lanes);
  }
  template <class L>
  MS_CELL void zero(const At& at, L lanes) const {
    const std::int64_t i = at.row * channels + at.channel;
    store(grad_a + i, splat<V>(0.0f), lanes);
    store(grad_b + i, splat<V>(0.0f), lanes);
  }
};

}  // namespace MS_ISA
}  // namespace minserve
