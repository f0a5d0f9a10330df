// The recurrence and the convolution, which go from row to row of a sequence. A step has sequences
// of one row each, a prefill has packed ones; both take the same code.
//
// The recurrence adds up as the scan of scan/scan_cpu.h does: within a chunk h goes on from the
// carry, and the carry to the next chunk is formed from the chunk's A and B. A thread of the team
// has all rows of its channels, one after the other, while they come from the product.
#pragma once

#include "../cells/dispatch.h"
#include "rows.h"

namespace minserve {
namespace MS_ISA {

// A sequence's rows, and its row of the state; -1: what is read leaves none and gives zeros.
struct Sequence {
  std::int64_t begin, end, slot;
};
inline Sequence sequence_of(const Layout& layout, std::int64_t s) {
  return {layout.begin(s), layout.end(s), layout.slot(s)};
}

// Which sequence rows are of that are asked for in rising order. Those behind the last sequence are
// padding.
class Sequences {
 public:
  Sequences(const Layout& layout, std::int64_t row)
      : layout_(&layout), next_(layout.cu_seqlens ? 0 : row / layout.time) {}

  MS_CELL const Sequence& of(std::int64_t row) {
    while (row >= now_.end) now_ = sequence_of(*layout_, next_++);
    return now_;
  }

 private:
  const Layout* layout_;
  std::int64_t next_;
  Sequence now_ = {0, 0, -1};
};

// The recurrence of one layer, for runs of panels; each run has its rows from `first` on.
template <class Cell, class O, class Fed>
class Recurrence {
 public:
  static_assert(kIsPlain<Cell>);
  // state: [slots, inner], rows `slot_stride` apart; h: rows `h_stride` bytes apart.
  Recurrence(const O& options, const Matrix& gates, const Layout& layout, float* state,
             std::int64_t slot_stride, char* h, std::int64_t h_stride, std::int64_t first)
      : options_(options),
        gates_(gates),
        layout_(layout),
        state_(state),
        slot_stride_(slot_stride),
        h_(h),
        h_stride_(h_stride),
        first_(first),
        sequences_(layout, first) {}

  MS_CELL void operator()(std::int64_t row, std::int64_t panel, std::int64_t panels,
                          const float* sums) {
    if (row == first_) sequences_ = Sequences(layout_, first_);
    const Sequence at = sequences_.of(row);
    const Output out{gates_, panel, sums};
    const std::int64_t position = row - at.begin;
    const When when = {position == 0, position % kScanChunk == 0, row + 1 == at.end};
    char* const h = h_ + row * h_stride_;
    float* const state = state_ + (at.slot < 0 ? 0 : at.slot) * slot_stride_;
    Lane* lane = lanes_;
    for (std::int64_t p = 0; p < panels; p += Cell::kInputs) {
      const std::int64_t channel = (panel + p) / Cell::kInputs * kPanel;
#pragma GCC unroll 4
      for (int part = 0; part < kParts; ++part, ++lane) {
        const std::int64_t c = channel + part * kWidth, left = gates_.outputs - c;
        if (at.slot < 0 || left <= 0) {
          Fed::put(h, c, splat<VF>(0.0f));
          continue;
        }
        VF in[Cell::kInputs];
#pragma GCC unroll 4
        for (int n = 0; n < Cell::kInputs; ++n) in[n] = out.vector(p + n, part);
        const Affine<VF> step = Cell::coefficients(options_, in);
        if (left >= kWidth) {
          Fed::put(h, c, advance(*lane, step, when, state + c, Full{}));
        } else {
          Fed::put(h, c, advance(*lane, step, when, state + c, Part{static_cast<int>(left)}));
        }
      }
    }
  }

 private:
  struct When {
    bool first, begins, last;  // of its sequence; of a chunk
  };
  struct Lane {  // since the chunk's start
    VF carry, h, a, b;
  };

  template <class L>
  static MS_CELL VF advance(Lane& lane, const Affine<VF>& step, const When& when, float* state,
                            L lanes) {
    if (when.begins) {
      lane.carry = when.first ? load<VF>(state, lanes) : fmadd(lane.a, lane.carry, lane.b);
      lane.h = lane.carry;
      lane.a = splat<VF>(1.0f);
      lane.b = splat<VF>(0.0f);
    }
    lane.b = fmadd(step.a, lane.b, step.b);
    lane.a = step.a * lane.a;
    lane.h = fmadd(step.a, lane.h, step.b);
    if (when.last) store(state, fmadd(lane.a, lane.carry, lane.b), lanes);
    return lane.h;
  }

  const O& options_;
  const Matrix& gates_;
  const Layout& layout_;
  float* const state_;
  const std::int64_t slot_stride_;
  char* const h_;
  const std::int64_t h_stride_, first_;
  Sequences sequences_;
  Lane lanes_[kMostPanels / Cell::kInputs * kParts];
};

// Channels [begin, end) of the depthwise convolution of a sequence, given to put(row, channel,
// vector); its carried inputs move on. x: [rows, width]; state: [taps - 1, width], rows tap_stride
// apart.
template <class F>
void convolve(const Plan& plan, const LayerPlan& layer, const Sequence& at, const float* x,
              float* state, std::int64_t tap_stride, std::int64_t begin, std::int64_t end,
              const F& put) {
  const std::int64_t columns = up_to(plan.width, kPanel), kept = plan.taps - 1;
  const auto input = [&](std::int64_t row, std::int64_t c, auto lanes) {
    // Before the sequence: the carried ones, of which the newest is the last.
    return row >= at.begin ? load<VF>(x + row * plan.width + c, lanes)
                           : load<VF>(state + (kept + row - at.begin) * tap_stride + c, lanes);
  };
  for (std::int64_t row = at.begin; row < at.end; ++row) {
    each_vector(begin, end, [&](std::int64_t c, auto lanes) {
      VF sum = layer.conv_bias ? load<VF>(layer.conv_bias + c, lanes) : splat<VF>(0.0f);
      for (std::int64_t k = 0; k <= kept; ++k) {
        sum = fmadd(load<VF>(layer.conv_taps + k * columns + c, lanes),
                    input(row - kept + k, c, lanes), sum);
      }
      put(row, c, sum);
    });
  }
  // Ascending, so that a short sequence moves old ones down before they are overwritten.
  for (std::int64_t k = 0; k < kept && at.begin < at.end; ++k) {
    each_vector(begin, end, [&](std::int64_t c, auto lanes) {
      store(state + k * tap_stride + c, input(at.end - kept + k, c, lanes), lanes);
    });
  }
}

}  // namespace MS_ISA
}  // namespace minserve
