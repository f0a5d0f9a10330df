// One step of the convolution: one token per sequence, the carried inputs moved on by one.
//
// A thread takes kVec neighbouring channels of kRows rows. All that does not depend on the rows'
// slots is on its way before the slots are known; then the carried inputs are read. The thread that
// reads them is the one that moves them on.
#pragma once

#include "../core/row_grid.cuh"
#include "window.cuh"

namespace minserve {
namespace cuda {

// Eight blocks a multiprocessor leave the registers for all loads to be on their way at once.
template <class T, int kTaps, bool kSilu, int kRows>
__global__ void __launch_bounds__(kThreads, 8)
    conv_step_kernel(const __grid_constant__ ConvArgs args) {
  const Layout& lay = args.layout;
  const std::int64_t first = row_group() * kRows, c = thread_of_group() * kVec;
  pdl_launch_dependents();
  wait_for_previous_kernel();
  if (first >= lay.tokens || c >= lay.channels) return;

  const auto exists = [&](int r) { return r == 0 || first + r < lay.tokens; };
  std::int64_t slot[kRows];
  Channels<T, kVec> x[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    slot[r] = -1;
    if (exists(r)) slot[r] = lay.slots[first + r];
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (exists(r)) {
      x[r].load(static_cast<const T*>(args.x.data) + (first + r) * args.x.stride + c);
    }
  }
  Filter<T, kTaps, kSilu> filter;
  filter.load(args, c);

  Channels<float, kVec> before[kRows][kTaps - 1];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (slot[r] >= lay.num_slots) slot[r] = -1;
    if (slot[r] >= 0) {
      const float* from = args.state + slot[r] * args.slot_stride + c;
#pragma unroll
      for (int k = 0; k < kTaps - 1; ++k) before[r][k].load(from + k * args.tap_stride);
    }
  }

#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    // Padding is computed too and then dropped: were x and the weights of no use to it, the
    // compiler would not read them before it knew.
    float current[kVec], y[kVec];
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      current[v] = x[r][v];
      y[v] = filter.output(v, before[r], current[v]);
      y[v] = slot[r] >= 0 ? y[v] : 0.0f;
    }
    if (slot[r] >= 0) {
      float* to = args.state + slot[r] * args.slot_stride + c;
#pragma unroll
      for (int k = 0; k < kTaps - 2; ++k) before[r][k + 1].store(to + k * args.tap_stride);
      Channels<float, kVec> newest;
      newest.set(current);
      newest.store(to + (kTaps - 2) * args.tap_stride);
    }
    Channels<T, kVec> out;
    out.set(y);
    if (exists(r)) {
      out.store(static_cast<T*>(args.out) + (first + r) * lay.channels + c);
    }
  }
}

}  // namespace cuda
}  // namespace minserve
