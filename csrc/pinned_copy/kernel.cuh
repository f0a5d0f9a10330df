// Words from or to memory of the host that the device sees: neighbouring threads have neighbouring
// words, which cross the bus together.
#pragma once

#include "../arch/ptx.cuh"
#include "pinned_copy.h"

namespace minserve {
namespace cuda {

constexpr unsigned kCopyThreads = 256;

__global__ void __launch_bounds__(kCopyThreads)
    copy_words_kernel(const __grid_constant__ CopyArgs args) {
  pdl_launch_dependents();
  wait_for_previous_kernel();
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * kCopyThreads;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kCopyThreads + threadIdx.x;
       i < args.count; i += stride) {
    args.to[i] = args.source[i];
    if (i >= args.first_zero && i - args.first_zero < args.zeros) args.source[i] = 0;
  }
}

}  // namespace cuda
}  // namespace minserve
