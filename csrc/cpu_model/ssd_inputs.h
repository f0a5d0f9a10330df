// What a layer of Mamba-2 computes around its recurrence, which is that of csrc/ssd.
#pragma once

#include "recurrence.h"

namespace minserve {
namespace MS_ISA {

// Of the products z | x B C | dt of a layer: silu(z), silu(conv(x B C)), and dt as it is, from row
// to row of a sequence. A thread of the team has all rows of its channels, one after the other.
class SsdInputs {
 public:
  SsdInputs(const Work& work, std::int64_t l, std::int64_t first)
      : work_(work),
        layer_(work.layers[l]),
        l_(l),
        gates_(up_to(work.plan->inner, kPanel)),
        columns_(ssd_columns(*work.plan)),
        first_(first),
        sequences_(work.layout, first) {}

  MS_CELL void operator()(std::int64_t row, std::int64_t panel, std::int64_t panels,
                          const float* sums) {
    if (row == first_) sequences_ = Sequences(work_.layout, first_);
    const Sequence at = sequences_.of(row);
    const Output out{layer_.gates, panel, sums};
    const Convolution& conv = layer_.gate_convs[0];
    const bool first = row == at.begin, last = row + 1 == at.end;
    float* const gate = work_.buffers.gate + row * gates_;
    float* const inputs = work_.buffers.ssd + row * columns_;
    for (std::int64_t p = 0; p < panels; ++p) {
#pragma GCC unroll 4
      for (int part = 0; part < kParts; ++part) {
        const VF v = out.vector(p, part);
        const std::int64_t column = (panel + p) * kPanel + part * kWidth, c = column - gates_;
        const std::int64_t left = conv.channels - c;
        if (c < 0) {
          store(gate + column, silu(v), Full{});
        } else if (c >= up_to(conv.channels, kPanel)) {
          store(inputs + c, v, Full{});
        } else if (at.slot >= 0 && left > 0) {
          const VF x =
              convolve_next(*work_.plan, conv, work_.gate_convs[0], v, windows_[p * kParts + part],
                            first, last, l_, at.slot, c, left);
          store(inputs + c, silu(x), Full{});
        }
      }
    }
  }

 private:
  const Work& work_;
  const LayerPlan& layer_;
  const std::int64_t l_, gates_, columns_, first_;
  Sequences sequences_;
  Window windows_[kMostPanels * kParts];
};

// The recurrence of a layer. y takes the place of x.
inline SsdArgs ssd_args(const Work& work, std::int64_t l) {
  const Plan& plan = *work.plan;
  const LayerPlan& layer = work.layers[l];
  const std::int64_t columns = ssd_columns(plan);
  const auto stream = [&](std::int64_t first) { return Stream{work.buffers.ssd + first, columns}; };
  SsdArgs args;
  args.layout = work.layout;
  args.heads = plan.heads;
  args.head_dim = plan.head_dim;
  args.groups = plan.groups;
  args.states = plan.states;
  args.x = args.y = stream(0);
  args.B = stream(plan.inner);
  args.C = stream(plan.inner + plan.groups * plan.states);
  args.dt = stream(up_to(ssd_convolved(plan), kPanel));
  args.A = layer.A;
  args.D = {layer.D, true};
  args.dt_bias = {layer.dt_bias, true};
  args.least_dt = plan.least_dt;
  args.most_dt = plan.most_dt;
  const std::int64_t state = l * work.cell_layer;
  args.slot_stride = work.cell_slot;
  args.half_state = work.half_cell;
  if (work.half_cell) {
    args.state = static_cast<bf16*>(work.cell) + state;
  } else {
    args.state = static_cast<float*>(work.cell) + state;
  }
  return args;
}

}  // namespace MS_ISA
}  // namespace minserve
