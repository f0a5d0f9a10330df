// Greedy sampling behind an argmax head: a warp takes the best of the bests of its row's parts.
#pragma once

#include "../core/reduce/argmax_key.cuh"
#include "warp_row.cuh"
#include "weights.cuh"

namespace minserve {
namespace cuda {

constexpr unsigned kArgmaxThreads = 128;

__global__ void __launch_bounds__(kArgmaxThreads)
    argmax_kernel(const __grid_constant__ SampleArgs args) {
  const std::int64_t r =
      static_cast<std::int64_t>(blockIdx.x) * (kArgmaxThreads / kWarp) + threadIdx.x / kWarp;
  pdl_launch_dependents();
  wait_for_previous_kernel();
  if (r >= args.rows) return;
  const WarpRow row(args, r);
  std::uint64_t key = 0;
#pragma unroll 4
  for (std::int64_t part = threadIdx.x % kWarp; part < args.parts; part += kWarp) {
    key = greater(key, args.best[r * args.parts + part]);
  }
  if (!args.is_active(r)) return;
  const ArgmaxKey best{across_warp(key, greater)};
  row.move_on(static_cast<std::int32_t>(best.is_finite() ? best.id() : kNotFinite));
}

}  // namespace cuda
}  // namespace minserve
