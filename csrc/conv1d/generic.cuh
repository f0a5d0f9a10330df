// The convolution for any number of taps and tensors of any alignment: one channel per thread.
#pragma once

#include "../core/row_grid.cuh"
#include "../cells/silu.cuh"
#include "args.h"

namespace minserve {
namespace cuda {

constexpr int kAnyRun = 16;  // token rows per thread

template <class T>
__device__ __forceinline__ void output_one(const ConvArgs& args, std::int64_t row,
                                           std::int64_t begin, std::int64_t slot, std::int64_t c) {
  const std::int64_t channels = args.layout.channels, taps = args.taps;
  const T* x = static_cast<const T*>(args.x.data);
  const T* weight = static_cast<const T*>(args.weight) + c * taps;
  float sum = args.bias ? to_lane(static_cast<const T*>(args.bias)[c]) : 0.0f;
  for (std::int64_t k = 0; k < taps; ++k) {
    const std::int64_t from = row - (taps - 1) + k;
    // Before the sequence: the carried inputs, of which the newest has index taps - 2.
    const float input =
        from >= begin
            ? to_lane(x[from * args.x.stride + c])
            : args.state[slot * args.slot_stride + (taps - 1 + from - begin) * args.tap_stride + c];
    sum = fmadd(to_lane(weight[k]), input, sum);
  }
  from_lane(static_cast<T*>(args.out) + row * channels + c, args.silu ? silu(sum) : sum);
}

template <class T>
__device__ __forceinline__ void keep_one(const ConvArgs& args, std::int64_t begin, std::int64_t end,
                                         std::int64_t slot, std::int64_t c) {
  if (begin == end) return;
  float* rows = args.state + slot * args.slot_stride + c;
  // Ascending, so that a short sequence moves old rows down before they are overwritten.
  for (std::int64_t k = 0; k < args.taps - 1; ++k) {
    const std::int64_t from = end - (args.taps - 1) + k;
    rows[k * args.tap_stride] =
        from >= begin ? to_lane(static_cast<const T*>(args.x.data)[from * args.x.stride + c])
                      : rows[(args.taps - 1 + from - begin) * args.tap_stride];
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) any_scan_kernel(const __grid_constant__ ConvArgs args) {
  const Layout& lay = args.layout;
  const std::int64_t c = static_cast<std::int64_t>(blockIdx.y) * kThreads + threadIdx.x;
  if (c >= lay.channels) return;
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * kAnyRun;
  const std::int64_t last = first + kAnyRun < lay.tokens ? first + kAnyRun : lay.tokens;
  std::int64_t low = 0, high = lay.sequences;  // the last sequence that begins at or before first
  while (low < high) {
    const std::int64_t middle = (low + high + 1) / 2;
    if (lay.begin(middle) <= first) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  std::int64_t s = low, begin = lay.begin(s), end = lay.end(s), slot = lay.slot(s);
  for (std::int64_t row = first; row < last; ++row) {
    while (s < lay.sequences && row >= end) {
      ++s;
      begin = lay.begin(s);
      end = lay.end(s);
      slot = lay.slot(s);
    }
    if (slot < 0) {
      from_lane(static_cast<T*>(args.out) + row * lay.channels + c, 0.0f);
    } else {
      // Only bad indices put begin beyond the row.
      output_one<T>(args, row, begin < row ? begin : row, slot, c);
    }
  }
}

// After any_scan_kernel on the same stream: it reads the old state.
template <class T>
__global__ void __launch_bounds__(kThreads) any_keep_kernel(const __grid_constant__ ConvArgs args) {
  const Layout& lay = args.layout;
  const std::int64_t s = blockIdx.x,
                     c = static_cast<std::int64_t>(blockIdx.y) * kThreads + threadIdx.x;
  const std::int64_t slot = lay.slot(s);
  if (c >= lay.channels || slot < 0) return;
  keep_one<T>(args, lay.begin(s), lay.end(s), slot, c);
}

// One token per sequence: the thread that reads a state row is the one that moves it on.
template <class T>
__global__ void __launch_bounds__(kThreads) any_step_kernel(const __grid_constant__ ConvArgs args) {
  const Layout& lay = args.layout;
  const std::int64_t row = blockIdx.x,
                     c = static_cast<std::int64_t>(blockIdx.y) * kThreads + threadIdx.x;
  if (c >= lay.channels) return;
  const std::int64_t slot = lay.slot(row);
  if (slot < 0) {
    from_lane(static_cast<T*>(args.out) + row * lay.channels + c, 0.0f);
    return;
  }
  output_one<T>(args, row, row, slot, c);
  keep_one<T>(args, row, row + 1, slot, c);
}

}  // namespace cuda
}  // namespace minserve
