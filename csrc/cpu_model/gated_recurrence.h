// The cells of GRU and LSTM in a layer: what the finish of the product U h + c computes, one time
// step of all sequences after the other.
#pragma once

#include "../gated_rnn/cell.h"
#include "rows.h"

namespace minserve {
namespace MS_ISA {

template <class Fed, class Unit>
class GatedRecurrence {
 public:
  // out: rows of h of all tokens, which the next layer or the head reads.
  GatedRecurrence(const Work& work, std::int64_t l, char* out, std::int64_t stride)
      : work_(work),
        matrix_(work.layers[l].recurrent),
        hidden_(static_cast<float*>(work.cell) + l * work.cell_layer),
        memory_(work.memory ? work.memory + l * work.memory_layer : nullptr),
        normed_(l + 1 == work.plan->layers ? work.normed : nullptr),
        out_(out),
        stride_(stride) {}

  // Rows of tokens that nobody reads.
  void skip(Range panels) const {
    for (std::int64_t i = 0; i < work_.skipped_count; ++i) {
      for (std::int64_t row = work_.skipped[i].begin; row < work_.skipped[i].end; ++row) {
        for (std::int64_t panel = panels.begin; panel < panels.end; panel += Unit::kGates) {
          each_part(panel, [&](int, std::int64_t c, auto lanes) { put_zeros(row, c, lanes); });
        }
      }
    }
  }

  // Step t of each sequence, whose h is to be carried on to `next`.
  void begin(std::int64_t t, char* next) { t_ = t, next_ = next; }

  MS_CELL void operator()(std::int64_t r, std::int64_t panel, std::int64_t, const float* sums) {
    const GatedRun& run = work_.runs[r];
    const std::int64_t row = run.begin + t_;
    const Output out{matrix_, panel, sums};
    const float* const pre = work_.buffers.pre + (row * matrix_.panels() + panel) * kPanel;
    const bool goes_on = t_ + 1 < run.length;
    each_part(panel, [&](int part, std::int64_t c, auto lanes) {
      if (run.slot < 0) return put_zeros(row, c, lanes);
      VF in[Unit::kGates], of_h[Unit::kGates];
#pragma GCC unroll 4
      for (int gate = 0; gate < Unit::kGates; ++gate) {
        in[gate] = load<VF>(pre + gate * kPanel + part * kWidth, Full{});
        of_h[gate] = out.vector(gate, part);
      }
      Unit unit;
      unit.h = load<VF>(hidden_ + run.slot * work_.cell_slot + c, lanes);
      if constexpr (Unit::kGates == kLstmGates) {
        unit.c = load<VF>(memory_ + run.slot * work_.memory_slot + c, lanes);
      }
      unit.advance(in, of_h);
      store(hidden_ + run.slot * work_.cell_slot + c, unit.h, lanes);
      if constexpr (Unit::kGates == kLstmGates) {
        store(memory_ + run.slot * work_.memory_slot + c, unit.c, lanes);
      }
      Fed::put(out_ + row * stride_, c, unit.h);
      if (goes_on) Fed::put(next_ + r * stride_, c, unit.h);
      if (normed_) store(normed_ + row * work_.plan->width + c, unit.h, lanes);
    });
  }

 private:
  // f(part, unit, lanes) for the vectors of the units whose gates begin at a panel; lanes beyond
  // the last unit are none.
  template <class F>
  MS_CELL void each_part(std::int64_t panel, const F& f) const {
#pragma GCC unroll 4
    for (int part = 0; part < kParts; ++part) {
      const std::int64_t c = panel / Unit::kGates * kPanel + part * kWidth;
      const std::int64_t left = work_.plan->inner - c;
      if (left >= kWidth) {
        f(part, c, Full{});
      } else {
        f(part, c, Part{static_cast<int>(left < 0 ? 0 : left)});
      }
    }
  }
  template <class L>
  MS_CELL void put_zeros(std::int64_t row, std::int64_t c, L lanes) const {
    Fed::put(out_ + row * stride_, c, splat<VF>(0.0f));
    if (normed_) store(normed_ + row * work_.plan->width + c, splat<VF>(0.0f), lanes);
  }

  const Work& work_;
  const Matrix& matrix_;
  float* const hidden_;
  float* const memory_;
  float* const normed_;
  char* const out_;
  const std::int64_t stride_;
  std::int64_t t_ = 0;
  char* next_ = nullptr;
};

}  // namespace MS_ISA
}  // namespace minserve
