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

// f(lanes) for a vector of which `left` channels are there.
template <class F>
MS_CELL void with_lanes(std::int64_t left, const F& f) {
  if (left >= kWidth) {
    f(Full{});
  } else {
    f(Part{static_cast<int>(left)});
  }
}

// What a convolution of inputs of the recurrence has read before, the newest last.
struct Window {
  VF inputs[kMostGateTaps - 1];
};

// The convolution of `in`, channels from c on of which `left` are there; the window goes on, and so
// do the carried inputs where the row is the first or the last of its sequence.
MS_CELL VF convolve_next(const Plan& plan, const Convolution& conv, const Windows& carried, VF in,
                         Window& window, bool first, bool last, std::int64_t l, std::int64_t slot,
                         std::int64_t c, std::int64_t left) {
  const std::int64_t kept = plan.gate_taps - 1, columns = up_to(conv.channels, kPanel);
  VF* const inputs = window.inputs;
  float* const state = carried.at(l, slot) + c;
  if (first) {
    with_lanes(left, [&](auto lanes) {
      for (std::int64_t k = 0; k < kept; ++k) inputs[k] = load<VF>(state + k * carried.tap, lanes);
    });
  }
  VF sum = conv.bias ? load<VF>(conv.bias + c, Full{}) : splat<VF>(0.0f);
  for (std::int64_t k = 0; k < kept; ++k) {
    sum = fmadd(load<VF>(conv.taps + k * columns + c, Full{}), inputs[k], sum);
  }
  sum = fmadd(load<VF>(conv.taps + kept * columns + c, Full{}), in, sum);
  for (std::int64_t k = 0; k + 1 < kept; ++k) inputs[k] = inputs[k + 1];
  inputs[kept - 1] = in;
  if (last) {
    with_lanes(left, [&](auto lanes) {
      for (std::int64_t k = 0; k < kept; ++k) store(state + k * carried.tap, inputs[k], lanes);
    });
  }
  return sum;
}

// The recurrence of one layer, for runs of panels; each run has its rows from `first` on.
//
// A cell with an output gate g gives h * silu(g) * weight, as long as sums of h * h: RMSNorm's
// other factor is the same for all channels of a row, so the next product takes it (h_scales() in
// cpu.cpp), and no thread waits for the others' channels.
template <class Cell, class O, class Fed>
class Recurrence {
 public:
  Recurrence(const O& options, const Work& work, std::int64_t l, std::int64_t first)
      : options_(options),
        work_(work),
        layer_(work.layers[l]),
        l_(l),
        state_(static_cast<float*>(work.cell) + l * work.cell_layer),
        h_stride_(fed_row_bytes(work.plan->inner, sizeof(typename Fed::element))),
        first_(first),
        sequences_(work.layout, first) {}

  MS_CELL void operator()(std::int64_t row, std::int64_t panel, std::int64_t panels,
                          const float* sums) {
    if (row == first_) sequences_ = Sequences(work_.layout, first_);
    const Sequence at = sequences_.of(row);
    const Output out{layer_.gates, panel, sums};
    const std::int64_t position = row - at.begin;
    const When when = {position == 0, position % kScanChunk == 0, row + 1 == at.end};
    char* const h = work_.buffers.h + row * h_stride_;
    float* const state = state_ + (at.slot < 0 ? 0 : at.slot) * work_.cell_slot;
    Lane* lane = lanes_;
    for (std::int64_t p = 0; p < panels; p += Cell::kPreactivations) {
      const std::int64_t of_inner = (panel + p) / Cell::kPreactivations;
      [[maybe_unused]] VF squares = splat<VF>(0.0f);
#pragma GCC unroll 4
      for (int part = 0; part < kParts; ++part, ++lane) {
        const std::int64_t c = of_inner * kPanel + part * kWidth, left = layer_.gates.outputs - c;
        if (at.slot < 0 || left <= 0) {
          Fed::put(h, c, splat<VF>(0.0f));
          continue;
        }
        VF in[Cell::kInputs];
#pragma GCC unroll 4
        for (int n = 0; n < Cell::kInputs; ++n) in[n] = out.vector(p + n, part);
        if constexpr (kGated) {
          if (work_.plan->gate_taps) {
            convolve_inputs(in, windows_[lane - lanes_], when, at.slot, c, left);
          }
        }
        const Affine<VF> step = coefficients(in, c);
        VF after;
        with_lanes(left, [&](auto lanes) { after = advance(*lane, step, when, state + c, lanes); });
        if constexpr (kGated) {
          squares = fmadd(after, after, squares);
          const VF weight = load<VF>(layer_.output_norm + c, Full{});
          Fed::put(h, c, after * weight * silu(out.vector(p + Cell::kInputs, part)));
        } else {
          Fed::put(h, c, after);
        }
      }
      if constexpr (kGated) {
        work_.buffers.squares[row * ((layer_.gates.outputs + kPanel - 1) / kPanel) + of_inner] =
            sum_of(squares);
      }
    }
  }

 private:
  static constexpr bool kGated = Cell::kPreactivations > Cell::kInputs;
  static_assert(!kGated || Cell::kInputs == kGatedInputs);
  static_assert(Cell::kParameters <= 1 && Cell::kStates == 1 && Cell::kOutputs == 1);

  struct When {
    bool first, begins, last;  // of its sequence; of a chunk
  };
  struct Lane {  // since the chunk's start
    VF carry, h, a, b;
  };
  static constexpr int kLanes = kMostPanels / Cell::kPreactivations * kParts;

  MS_CELL Affine<VF> coefficients(const VF (&in)[Cell::kInputs], std::int64_t c) const {
    if constexpr (Cell::kParameters > 0) {
      return Cell::coefficients(options_, in, {{load<VF>(layer_.parameter + c, Full{})}});
    } else {
      return Cell::coefficients(options_, in);
    }
  }

  // in <- the convolutions of in.
  MS_CELL void convolve_inputs(VF (&in)[Cell::kInputs], Window (&windows)[Cell::kInputs],
                               const When& when, std::int64_t slot, std::int64_t c,
                               std::int64_t left) const {
#pragma GCC unroll 2
    for (int n = 0; n < Cell::kInputs; ++n) {
      in[n] = convolve_next(*work_.plan, layer_.gate_convs[n], work_.gate_convs[n], in[n],
                            windows[n], when.first, when.last, l_, slot, c, left);
    }
  }

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
  const Work& work_;
  const LayerPlan& layer_;
  const std::int64_t l_;
  float* const state_;
  const std::int64_t h_stride_, first_;
  Sequences sequences_;
  Lane lanes_[kLanes];
  Window windows_[kGated ? kLanes : 1][Cell::kInputs];
};

// Channels [begin, end) of the depthwise convolution of a sequence, given to put(row, channel,
// vector); its carried inputs move on. x: [rows, width]; state: [taps - 1, width], rows tap_stride
// apart.
template <class F>
void convolve(const Plan& plan, const Convolution& conv, const Sequence& at, const float* x,
              float* state, std::int64_t tap_stride, std::int64_t begin, std::int64_t end,
              const F& put) {
  const std::int64_t columns = up_to(conv.channels, kPanel), kept = plan.taps - 1;
  const auto input = [&](std::int64_t row, std::int64_t c, auto lanes) {
    // Before the sequence: the carried ones, of which the newest is the last.
    return row >= at.begin ? load<VF>(x + row * plan.width + c, lanes)
                           : load<VF>(state + (kept + row - at.begin) * tap_stride + c, lanes);
  };
  for (std::int64_t row = at.begin; row < at.end; ++row) {
    each_vector(begin, end, [&](std::int64_t c, auto lanes) {
      VF sum = conv.bias ? load<VF>(conv.bias + c, lanes) : splat<VF>(0.0f);
      for (std::int64_t k = 0; k <= kept; ++k) {
        sum = fmadd(load<VF>(conv.taps + k * columns + c, lanes), input(row - kept + k, c, lanes),
                    sum);
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
