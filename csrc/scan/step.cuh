// One step of every row of a batch: as many tokens as sequences, so nothing is scanned.
//
// A thread takes neighbouring channels of one row. All that does not depend on the row's slot is on
// its way before the slot is known; then the state is read, and output and state are written.
#pragma once

#include "../core/vector_access.cuh"
#include "../cells/gates.h"
#include "../core/launch.cuh"
#include "args.h"
#include "parameters.cuh"

namespace minserve {
namespace cuda {

// Eight blocks a multiprocessor leave the registers for all loads to be on their way at once.
template <template <class> class CellOf, class O, class T, int kVec>
__global__ void __launch_bounds__(kThreads, 8)
    step_kernel(const __grid_constant__ ScanArgs args, const O options) {
  using V = typename ComputeType<T>::type;
  using Cell = CellOf<V>;
  static_assert(Cell::kOutputs == 1, "what a forward cell puts out is h");
  const Layout& lay = args.layout;
  const std::int64_t row = row_group(), channel = thread_of_group() * kVec;
  pdl_launch_dependents();
  wait_for_previous_kernel();
  if (row >= lay.tokens || channel >= lay.channels) return;
  // Layout::slot() in two halves, so that only the second waits.
  std::int64_t slot = row;
  if (lay.slots) slot = lay.slots[row];
  Channels<T, kVec> in[Cell::kInputs];
#pragma unroll
  for (int n = 0; n < Cell::kInputs; ++n) {
    in[n].load(static_cast<const T*>(args.inputs[n].data) + row * args.inputs[n].stride + channel);
  }
  ChannelParameters<Cell, V, kVec> parameters;
  parameters.template load<true>(args, channel, kVec);
  const bool real = !lay.slots || (slot >= 0 && slot < lay.num_slots);
  Channels<V, kVec> state;
  if (real && args.initial) {
    state.load(static_cast<const V*>(args.initial) + slot * args.initial_stride + channel);
  }
  // Padding is computed too and then dropped: were the inputs of no use to it, the compiler would
  // not read them before it knew.
  V h[kVec];
#pragma unroll
  for (int v = 0; v < kVec; ++v) {
    V element[Cell::kInputs];
#pragma unroll
    for (int n = 0; n < Cell::kInputs; ++n) element[n] = in[n][v];
    const Affine<V> step = Cell::coefficients(options, element, parameters[v]);
    h[v] = fmadd(step.a, state[v], step.b);
  }
  if (real && args.last) {
    state.set(h);
    state.store(static_cast<V*>(args.last) + slot * args.last_stride + channel);
  }
#pragma unroll
  for (int v = 0; v < kVec; ++v) h[v] = real ? h[v] : V(0);
  Channels<T, kVec> out;
  out.set(h);
  out.store(static_cast<T*>(args.outputs[0].data) + row * args.outputs[0].stride + channel);
}

// Up to here threads run all at once, and what takes time is how much one of them has to do.
constexpr long long kFewThreads = 1 << 16;

template <template <class> class CellOf, class O, class T, int kVec>
void launch_step_of(const ScanArgs& args, O options, cudaStream_t stream) {
  const Grid grid = row_grid(args.layout.tokens, (args.layout.channels + kVec - 1) / kVec);
  launch_early<&step_kernel<CellOf, O, T, kVec>>(grid, stream, "step", args, options);
}

template <template <class> class CellOf, class O, class T>
void launch_step(const ScanArgs& args, O options, cudaStream_t stream) {
  constexpr int kWide = 16 / static_cast<int>(sizeof(T)), kNarrow = sizeof(T) == 2 ? 2 : 1;
  if (!args.aligned_state) return launch_step_of<CellOf, O, T, 1>(args, options, stream);
  if (args.layout.tokens * args.layout.channels <= kFewThreads * kNarrow) {
    return launch_step_of<CellOf, O, T, kNarrow>(args, options, stream);
  }
  launch_step_of<CellOf, O, T, kWide>(args, options, stream);
}

}  // namespace cuda
}  // namespace minserve
