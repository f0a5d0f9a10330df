// The launches of the convolution's kernels.
#pragma once

#include "../core/launch.cuh"
#include "generic.cuh"
#include "scan.cuh"
#include "step.cuh"

namespace minserve {
namespace cuda {

template <class T>
void launch_any(const ConvArgs& args, cudaStream_t stream) {
  const Layout& lay = args.layout;
  if (!lay.cu_seqlens) {
    any_step_kernel<T><<<grid_of(lay.tokens, lay.channels), kThreads, 0, stream>>>(args);
    return check(cudaGetLastError(), "convolution step");
  }
  if (lay.tokens > 0) {
    any_scan_kernel<T>
        <<<grid_of((lay.tokens + kAnyRun - 1) / kAnyRun, lay.channels), kThreads, 0, stream>>>(
            args);
    check(cudaGetLastError(), "convolution");
  }
  if (lay.sequences > 0) {
    any_keep_kernel<T><<<grid_of(lay.sequences, lay.channels), kThreads, 0, stream>>>(args);
    check(cudaGetLastError(), "convolution state");
  }
}

template <class T, int kTaps, bool kSilu>
void launch_conv_scan(const ConvArgs& args, cudaStream_t stream) {
  const Layout& lay = args.layout;
  const long long per_row = lay.channels / kVec;
  if (lay.tokens > 0) {
    const int run = run_of(lay);
    launch_early<&conv_scan_kernel<T, kTaps, kSilu>>(
        row_grid((lay.tokens + run - 1) / run, per_row), stream, "convolution", args, run);
  }
  if (lay.sequences > 0) {
    launch_early<&conv_keep_kernel<T, kTaps>>(row_grid(lay.sequences, per_row), stream,
                                              "convolution state", args);
  }
}

// From here on threads are many enough to take two rows, for which weights are read once.
constexpr long long kManyThreads = 1 << 19;

template <class T, int kTaps, bool kSilu>
void launch_conv_step(const ConvArgs& args, cudaStream_t stream) {
  const Layout& lay = args.layout;
  const long long per_row = lay.channels / kVec;
  if (lay.tokens * per_row < kManyThreads) {
    launch_early<&conv_step_kernel<T, kTaps, kSilu, 1>>(row_grid(lay.tokens, per_row), stream,
                                                        "convolution step", args);
  } else {
    launch_early<&conv_step_kernel<T, kTaps, kSilu, 2>>(row_grid((lay.tokens + 1) / 2, per_row),
                                                        stream, "convolution step", args);
  }
}

}  // namespace cuda
}  // namespace minserve
