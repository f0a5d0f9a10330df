// Words go to memory of the host that the device sees: neighbouring threads write neighbouring
// words, which cross the bus together.
#pragma once

#include "../common/device.cuh"
#include "fetch.h"

namespace minserve {
namespace cuda {

constexpr unsigned kFetchThreads = 256;

__global__ void __launch_bounds__(kFetchThreads)
    fetch_kernel(const __grid_constant__ FetchArgs args) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * kFetchThreads;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kFetchThreads + threadIdx.x;
       i < args.count; i += stride) {
    args.host[i] = args.words[i];
    if (i >= args.first_zero && i - args.first_zero < args.zeros) args.words[i] = 0;
  }
}

}  // namespace cuda
}  // namespace minserve
