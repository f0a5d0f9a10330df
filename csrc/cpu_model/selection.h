// The recurrence of Mamba in a layer: what the finish of its products computes, from row to row of
// a sequence. A thread of the team has all rows of its channels, one after the other.
//
// fp32 states are in their row of the state all the time, which a group of panels keeps in the
// first-level cache. They go on token by token, so a prompt may be split anywhere. bfloat16 ones
// are widened at the first row of a sequence and rounded at its last.
#pragma once

#include "../cells/softplus_cpu.h"
#include "../selective/step_cpu.h"
#include "recurrence.h"

namespace minserve {
namespace MS_ISA {

// Of the products x | z of a layer: u = silu(conv(x)), which the next product reads, and silu(z).
template <class Fed>
class SelectiveInputs {
 public:
  SelectiveInputs(const Work& work, std::int64_t l, std::int64_t first)
      : work_(work),
        layer_(work.layers[l]),
        l_(l),
        u_stride_(fed_row_bytes(work.plan->inner, sizeof(typename Fed::element))),
        first_(first),
        sequences_(work.layout, first) {}

  MS_CELL void operator()(std::int64_t row, std::int64_t panel, std::int64_t panels,
                          const float* sums) {
    if (row == first_) sequences_ = Sequences(work_.layout, first_);
    const Sequence at = sequences_.of(row);
    const Output out{layer_.gates, panel, sums};
    const bool first = row == at.begin, last = row + 1 == at.end;
    char* const u = work_.buffers.h + row * u_stride_;
    float* const gate = work_.buffers.gate + row * up_to(work_.plan->inner, kPanel);
    Window* window = windows_;
    for (std::int64_t p = 0; p < panels; p += 2) {
#pragma GCC unroll 4
      for (int part = 0; part < kParts; ++part, ++window) {
        const std::int64_t c = (panel + p) / 2 * kPanel + part * kWidth;
        const std::int64_t left = layer_.gates.outputs - c;
        if (at.slot < 0 || left <= 0) {
          Fed::put(u, c, splat<VF>(0.0f));
          continue;
        }
        const VF x = convolve_next(*work_.plan, layer_.gate_convs[0], work_.gate_convs[0],
                                   out.vector(p, part), *window, first, last, l_, at.slot, c, left);
        Fed::put(u, c, silu(x));
        store(gate + c, silu(out.vector(p + 1, part)), Full{});
      }
    }
  }

 private:
  const Work& work_;
  const LayerPlan& layer_;
  const std::int64_t l_, u_stride_, first_;
  Sequences sequences_;
  Window windows_[kMostPanels / 2 * kParts];
};

// Of the products dt of a layer, whose bias they have: the recurrence, D and the gate. y takes the
// place of u. `selected`: rows of B | C, `stride` bytes apart; `wide`: room for the states of a
// group of panels, where they are bfloat16, else null.
template <int kVectors, class Fed>
class SelectiveRecurrence {
 public:
  SelectiveRecurrence(const Work& work, std::int64_t l, std::int64_t first, const char* selected,
                      std::int64_t stride, float* wide)
      : work_(work),
        layer_(work.layers[l]),
        states_(work.plan->states),
        l_(l),
        y_stride_(fed_row_bytes(work.plan->inner, sizeof(typename Fed::element))),
        selected_(selected),
        stride_(stride),
        wide_(wide),
        first_(first),
        sequences_(work.layout, first) {}

  MS_CELL void operator()(std::int64_t row, std::int64_t panel, std::int64_t panels,
                          const float* sums) {
    if (row == first_) sequences_ = Sequences(work_.layout, first_);
    const Sequence at = sequences_.of(row);
    const Output out{layer_.dt, panel, sums};
    char* const y = work_.buffers.h + row * y_stride_;
    const float* const gate = work_.buffers.gate + row * up_to(work_.plan->inner, kPanel);
    const float* const b = reinterpret_cast<const float*>(selected_ + row * stride_);
    const SelectiveToken<kVectors> token(b, b + states_, states_);
    const std::int64_t state = l_ * work_.cell_layer + at.slot * work_.cell_slot;
    for (std::int64_t p = 0; p < panels; ++p) {
#pragma GCC unroll 4
      for (int part = 0; part < kParts; ++part) {
        const std::int64_t c = (panel + p) * kPanel + part * kWidth;
        const std::int64_t left = layer_.dt.outputs - c;
        if (at.slot < 0 || left <= 0) {
          Fed::put(y, c, splat<VF>(0.0f));
          continue;
        }
        const VF u = load<VF>(reinterpret_cast<const typename Fed::element*>(y) + c, Full{});
        const VF dt = softplus(out.vector(p, part));
        const int count = left < kWidth ? static_cast<int>(left) : kWidth;
        float* h;
        bf16* kept = nullptr;
        if (work_.half_cell) {
          kept = static_cast<bf16*>(work_.cell) + state + c * states_;
          h = wide_ + (p * kPanel + part * kWidth) * states_;
          if (row == at.begin) copy_states(kept, h, count * states_);
        } else {
          h = static_cast<float*>(work_.cell) + state + c * states_;
        }
        const VF sum = token.advance(layer_.A + c * states_, h, dt, u, count);
        if (kept && row + 1 == at.end) copy_states(h, kept, count * states_);
        const VF open = fmadd(load<VF>(layer_.D + c, Full{}), u, sum);
        Fed::put(y, c, open * load<VF>(gate + c, Full{}));
      }
    }
  }

 private:
  const Work& work_;
  const LayerPlan& layer_;
  const std::int64_t states_, l_, y_stride_;
  const char* const selected_;
  const std::int64_t stride_;
  float* const wide_;
  const std::int64_t first_;
  Sequences sequences_;
};

}  // namespace MS_ISA
}  // namespace minserve
