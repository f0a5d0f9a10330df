// One step of GRU or LSTM for every row of a batch, from products that are there already: a thread
// has kVec neighbouring units of a row.
#pragma once

#include "../arch/ptx.cuh"
#include "../core/row_grid.cuh"
#include "../core/vector_access.cuh"
#include "unit.cuh"

namespace minserve {
namespace cuda {

template <int kVec>
struct StateVector {
  Channels<float, kVec> h, c;

  __device__ __forceinline__ void load(const GatedRnnArgs& args, std::int64_t slot,
                                       std::int64_t at) {
    h.load(args.hidden.data + slot * args.hidden.stride + at);
    if (args.is_lstm()) c.load(args.cell.data + slot * args.cell.stride + at);
  }
  __device__ __forceinline__ void store(const GatedRnnArgs& args, std::int64_t slot,
                                        std::int64_t at) const {
    h.store(args.hidden.data + slot * args.hidden.stride + at);
    if (args.is_lstm()) c.store(args.cell.data + slot * args.cell.stride + at);
  }
};
template <int kVec>
__device__ __forceinline__ void take(GruUnit<float>& unit, const StateVector<kVec>& from, int i) {
  unit.h = from.h[i];
}
template <int kVec>
__device__ __forceinline__ void take(LstmUnit<float>& unit, const StateVector<kVec>& from, int i) {
  unit.h = from.h[i], unit.c = from.c[i];
}
__device__ __forceinline__ void give(const GruUnit<float>& unit, float& h, float&) {
  h = unit.h;
}
__device__ __forceinline__ void give(const LstmUnit<float>& unit, float& h, float& c) {
  h = unit.h, c = unit.c;
}

template <class T, class Unit, int kVec>
__global__ void __launch_bounds__(kThreads)
    gated_step_kernel(const __grid_constant__ GatedRnnArgs args) {
  constexpr int kGates = Unit::kGates;
  const std::int64_t row = row_group(), c = thread_of_group() * kVec, units = args.layout.channels;
  wait_for_previous_kernel();
  if (row >= args.layout.tokens || c >= units) return;
  const std::int64_t slot = args.layout.slot(row);
  Channels<T, kVec> out;
  if (slot >= 0) {
    const T* const pre = static_cast<const T*>(args.pre.data) + row * args.pre.stride + c;
    const T* const recurrent =
        static_cast<const T*>(args.recurrent.data) + row * args.recurrent.stride + c;
    Channels<T, kVec> in[kGates], of_h[kGates];
    StateVector<kVec> state;
#pragma unroll
    for (int gate = 0; gate < kGates; ++gate) {
      in[gate].load(pre + gate * units);
      of_h[gate].load(recurrent + gate * units);
    }
    state.load(args, slot, c);
    float h[kVec], cell[kVec] = {};
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      float x[kGates], y[kGates];
#pragma unroll
      for (int gate = 0; gate < kGates; ++gate) x[gate] = in[gate][i], y[gate] = of_h[gate][i];
      Unit unit;
      take(unit, state, i);
      unit.advance(x, y);
      give(unit, h[i], cell[i]);
    }
    state.h.set(h);
    state.c.set(cell);
    state.store(args, slot, c);
    out.set(h);
  }
  out.store(static_cast<T*>(args.h.data) + row * args.h.stride + c);
}

// Whether all rows are aligned for kVec units at once.
template <class T, int kVec>
inline bool steps_in_vectors(const GatedRnnArgs& args) {
  const auto streams = [&](const Stream& s) { return lie_aligned<T, kVec>(s.data, s.stride); };
  const auto states = [&](const StateRows& s) {
    return lie_aligned<float, kVec>(s.data, s.stride);
  };
  return args.layout.channels % kVec == 0 && streams(args.pre) && streams(args.recurrent) &&
         streams(args.h) && states(args.hidden) && (!args.is_lstm() || states(args.cell));
}

template <int kVec>
inline Grid gated_step_grid(const Layout& layout) {
  return row_grid(layout.tokens, (layout.channels + kVec - 1) / kVec);
}

}  // namespace cuda
}  // namespace minserve
