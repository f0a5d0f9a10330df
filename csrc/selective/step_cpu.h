// One token of the selective recurrence on the CPU, for a vector of channels.
//
// A channel's states lie side by side in memory, so a vector has states of one channel: nothing is
// transposed but the sums over states, of which a vector has those of kWidth channels.
#pragma once

#include "../cells/gates.h"
#include "../core/states_cpu.h"

namespace minserve {
namespace MS_ISA {

// What a token has for all channels: B and C, fp32 [states]. kVectors: so many whole vectors are
// the states, and stay in registers; 0: there are any number of states.
template <int kVectors>
class SelectiveToken {
 public:
  SelectiveToken(const float* B, const float* C, std::int64_t states)
      : B_(B), C_(C), states_(states) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      b_[v] = load<VF>(B + v * kWidth, Full{});
      c_[v] = load<VF>(C + v * kWidth, Full{});
    }
  }

  // h <- exp(dt A) h + dt x B of `count` channels; returns the sums over C h. A and h: [count,
  // states]; dt is behind softplus.
  MS_CELL VF advance(const float* A, float* h, VF dt, VF x, int count) const {
    alignas(64) float scaled[kWidth], write[kWidth];
    store(scaled, dt * splat<VF>(kLog2e), Full{});
    store(write, dt * x, Full{});
    VF sums[kWidth] = {};
    for (int i = 0; i < count; ++i) {
      const VF d = scaled[i] - VF{}, w = write[i] - VF{};
      const float* const a = A + i * states_;
      float* const own = h + i * states_;
      VF sum = splat<VF>(0.0f);
      if constexpr (kVectors > 0) {
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
          const VF after = next(a + v * kWidth, own + v * kWidth, d, w * b_[v], Full{});
          sum = v == 0 ? c_[v] * after : fmadd(c_[v], after, sum);
        }
      } else {
        const auto add = [&](std::int64_t n, auto lanes) {
          const VF after = next(a + n, own + n, d, w * load<VF>(B_ + n, lanes), lanes);
          sum = fmadd(load<VF>(C_ + n, lanes), after, sum);
        };
        std::int64_t n = 0;
        for (; n + kWidth <= states_; n += kWidth) add(n, Full{});
        if (n < states_) add(n, Part{static_cast<int>(states_ - n)});
      }
      sums[i] = sum;
    }
    return sums_of_each(sums);
  }

 private:
  // A vector of h, moved on.
  template <class L>
  static MS_CELL VF next(const float* A, float* h, VF d, VF write, L lanes) {
    const VF after = fmadd(exp2_of(d * load<VF>(A, lanes)), load<VF>(h, lanes), write);
    store(h, after, lanes);
    return after;
  }

  const float *B_, *C_;
  std::int64_t states_;
  VF b_[kVectors > 0 ? kVectors : 1], c_[kVectors > 0 ? kVectors : 1];
};

// f(SelectiveVectors<n>{}) with n as SelectiveToken takes it.
template <int kVectors>
struct SelectiveVectors {
  static constexpr int value = kVectors;
};
template <class F>
MS_CELL void with_states(std::int64_t states, const F& f) {
  constexpr int usual = 16 / kWidth;
  if (states == usual * kWidth) {
    f(SelectiveVectors<usual>{});
  } else {
    f(SelectiveVectors<0>{});
  }
}

}  // namespace MS_ISA
}  // namespace minserve
