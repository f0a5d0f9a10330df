// minGRU: z = sigma(k), h_t = (1 - z) h_{t-1} + z g(v), with 1 - z formed as sigma(-k); and its
// gradient. Source: "Were RNNs All We Needed?", arXiv 2410.01201. pre holds [k | v] per token.
#pragma once

#include "../common/activations.h"
#include "../common/scan_at.h"

namespace minserve {
namespace MS_ISA {

template <class T>
struct MinGruCell {
  using V = typename ComputeType<T>::type;
  struct Item {
    V a, b;
  };
  const T* pre;
  T* out;
  std::int64_t channels;
  bool linear;

  MS_CELL explicit MinGruCell(const ScanArgs& args)
      : pre(static_cast<const T*>(args.pre)),
        out(static_cast<T*>(args.out)),
        channels(args.layout.channels),
        linear(args.linear_candidate) {}

  template <class L>
  MS_CELL Item load(const At& at, L lanes) const {
    const T* p = pre + at.row * 2 * channels + at.channel;
    const Pair<V> z = sigmoid_both(MS_ISA::load<V>(p, lanes));
    const V g = candidate(MS_ISA::load<V>(p + channels, lanes), linear);
    return {z.second, z.first * g};
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

// Same device as LinearBackwardCell: q_t = f_t (dh_t + q_{t+1}) with f = 1 - z. The carry in is the
// gradient of the last state, the carry out that of h0. Gates are computed again rather than
// stored.
template <class T>
struct MinGruBackwardCell {
  using V = typename ComputeType<T>::type;
  using S = typename LanesOf<V>::scalar;
  struct Item {
    V a, b, grad, z, g, slope;
  };
  const T* pre;
  const T* h;
  const T* grad_h;
  const S* h0;
  T* grad_pre;
  std::int64_t channels;
  bool linear;

  MS_CELL explicit MinGruBackwardCell(const ScanArgs& args)
      : pre(static_cast<const T*>(args.pre)),
        h(static_cast<const T*>(args.h)),
        grad_h(static_cast<const T*>(args.grad_h)),
        h0(static_cast<const S*>(args.h0)),
        grad_pre(static_cast<T*>(args.out)),
        channels(args.layout.channels),
        linear(args.linear_candidate) {}

  template <class L>
  MS_CELL Item load(const At& at, L lanes) const {
    const T* p = pre + at.row * 2 * channels + at.channel;
    const Pair<V> z = sigmoid_both(MS_ISA::load<V>(p, lanes));
    const V v = MS_ISA::load<V>(p + channels, lanes);
    const V grad = MS_ISA::load<V>(grad_h + at.row * channels + at.channel, lanes);
    return {z.second, z.second * grad,      grad,
            z.first,  candidate(v, linear), candidate_slope(v, linear)};
  }
  template <class L>
  MS_CELL void emit(const At& at, const Item& item, V before, V, L lanes) const {
    const V grad = item.grad + before;
    const V previous = previous_state<V>(h, h0, at, channels, true, lanes);
    T* p = grad_pre + at.row * 2 * channels + at.channel;
    store(p, grad * (item.z * item.a) * (item.g - previous), lanes);
    store(p + channels, grad * item.z * item.slope, lanes);
  }
  template <class L>
  MS_CELL void zero(const At& at, L lanes) const {
    T* p = grad_pre + at.row * 2 * channels + at.channel;
    store(p, splat<V>(0.0f), lanes);
    store(p + channels, splat<V>(0.0f), lanes);
  }
};

}  // namespace MS_ISA
}  // namespace minserve
