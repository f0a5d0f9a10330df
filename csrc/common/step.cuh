// One step of every row of a batch: as many tokens as sequences, so nothing is scanned.
//
// A thread takes 16 bytes of channels of one row, reads the state, writes the output and the state.
#pragma once

#include "copies.cuh"
#include "gates.h"
#include "launch.cuh"

namespace minserve {
namespace cuda {

template <template <class> class CellOf, class O, class T>
__global__ void __launch_bounds__(kThreads)
    step_kernel(const __grid_constant__ ScanArgs args, const O options) {
  using V = typename ComputeType<T>::type;
  using Cell = CellOf<V>;
  constexpr int kVec = 16 / static_cast<int>(sizeof(T));
  const Layout& lay = args.layout;
  const std::int64_t row = blockIdx.x;
  const std::int64_t channel =
      (static_cast<std::int64_t>(blockIdx.y) * kThreads + threadIdx.x) * kVec;
  if (channel >= lay.channels) return;
  const int real = lay.channels - channel < kVec ? static_cast<int>(lay.channels - channel) : kVec;
  const std::int64_t slot = lay.slot(row);
  V h[kVec] = {};
  if (slot >= 0) {
    V in[Cell::kInputs][kVec];
#pragma unroll
    for (int n = 0; n < Cell::kInputs; ++n) {
      const T* p =
          static_cast<const T*>(args.inputs[n].data) + row * args.inputs[n].stride + channel;
      unpack(load_pack(p, args.aligned, real), in[n], T{});
    }
    const V* initial = static_cast<const V*>(args.initial);
    if (initial) {
      initial += slot * args.initial_stride + channel;
      if (args.aligned_state) {
        load_values(initial, h);
      } else {
#pragma unroll
        for (int v = 0; v < kVec; ++v) {
          if (v < real) h[v] = initial[v];
        }
      }
    }
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      V element[Cell::kInputs];
#pragma unroll
      for (int n = 0; n < Cell::kInputs; ++n) element[n] = in[n][v];
      const Affine<V> step = Cell::affine(options, element);
      h[v] = fmadd(step.a, h[v], step.b);
    }
    V* last = static_cast<V*>(args.last);
    if (last) {
      last += slot * args.last_stride + channel;
      if (args.aligned_state) {
        store_values(last, h);
      } else {
#pragma unroll
        for (int v = 0; v < kVec; ++v) {
          if (v < real) last[v] = h[v];
        }
      }
    }
  }
  T* out = static_cast<T*>(args.outputs[0].data) + row * args.outputs[0].stride + channel;
  store_pack(out, pack(h, T{}), args.aligned, real);
}

template <template <class> class CellOf, class O, class T>
void launch_step(const ScanArgs& args, O options, cudaStream_t stream) {
  constexpr int kVec = 16 / static_cast<int>(sizeof(T));
  const Layout& lay = args.layout;
  step_kernel<CellOf, O, T>
      <<<grid_of(lay.tokens, (lay.channels + kVec - 1) / kVec), kThreads, 0, stream>>>(args,
                                                                                       options);
  check(cudaGetLastError(), "step");
}

}  // namespace cuda
}  // namespace minserve
