// A sequence of one row on the CPU, which is what a step has of each: state in, output and state
// out, in one pass over vectors of channels in their order.
//
// The numbers are formed as scan_cpu.h forms those of a chunk of one row, so not a bit differs: the
// output from the carry, the carry handed on from the chunk's aggregate.
#pragma once

#include "../cells/gates.h"
#include "args.h"

namespace minserve {
namespace MS_ISA {

struct Row {  // of one sequence; its slot of the state, and a run of channels
  std::int64_t index, sequence, slot, channel;
  int width;
};

template <template <class> class CellOf, class O, class T>
struct Step {
  using V = typename ComputeType<T>::type;
  using S = typename LanesOf<V>::scalar;
  using Cell = CellOf<V>;
  static constexpr int W = LanesOf<V>::width;

  template <class L>
  static MS_CELL V state(const void* rows, std::int64_t at, L lanes) {
    return rows ? load<V>(static_cast<const S*>(rows) + at, lanes) : splat<V>(0.0f);
  }

  template <class L>
  static MS_CELL Parameters<V, Cell::kParameters> parameters_of(const ScanArgs& args,
                                                                std::int64_t channel, L lanes) {
    Parameters<V, Cell::kParameters> all;
    if constexpr (Cell::kParameters > 0) {
      for (int n = 0; n < Cell::kParameters; ++n) {
        const float* const from = args.parameters[n];
        if constexpr (W == 1) {
          all.at[n] = from ? S(from[channel]) : S(0);
        } else {
          all.at[n] = from ? load<V>(from + channel, lanes) : splat<V>(0.0f);
        }
      }
    }
    return all;
  }

  template <class L>
  static MS_CELL void vector(const ScanArgs& args, const O& options, const Row& row,
                             std::int64_t channel, L lanes) {
    V in[Cell::kInputs], out[Cell::kOutputs];
#pragma GCC unroll 8
    for (int n = 0; n < Cell::kInputs; ++n) {
      const Stream& s = args.inputs[n];
      // There is no element before the only one: the state before it is h0.
      in[n] = n == Cell::kPrevious
                  ? state(args.h0, row.sequence * args.layout.channels + channel, lanes)
                  : load<V>(static_cast<const T*>(s.data) + row.index * s.stride + channel, lanes);
    }
    const Parameters<V, Cell::kParameters> parameters = parameters_of(args, channel, lanes);
    const V before = state(args.initial, row.slot * args.initial_stride + channel, lanes);
    const Affine<V> step = Cell::coefficients(options, in, parameters);
    const V after = fmadd(step.a, before, step.b);
    Cell::outputs(options, in, before, after, out);
#pragma GCC unroll 8
    for (int n = 0; n < Cell::kOutputs; ++n) {
      const Stream& s = args.outputs[n];
      store(static_cast<T*>(s.data) + row.index * s.stride + channel, out[n], lanes);
    }
    if (!args.last) return;
    // Differs from `after` where a is infinite and in the sign of zeros.
    const V carry = fmadd(step.a, before, fmadd(step.a, splat<V>(0.0f), step.b));
    store(static_cast<S*>(args.last) + row.slot * args.last_stride + channel, carry, lanes);
  }

  static void run(const ScanArgs& args, const O& options, const Row& row) {
    const std::int64_t end = row.channel + row.width;
    std::int64_t c = row.channel;
    for (; c + W <= end; c += W) vector(args, options, row, c, Full{});
    if (c < end) vector(args, options, row, c, Part{static_cast<int>(end - c)});
  }
};

}  // namespace MS_ISA
}  // namespace minserve
