// Rows of the embedding table, prepared for the first layer: x, x times its norm's weight, and the
// sums of squares that this norm needs.
#pragma once

#include "../core/launch.cuh"
#include "epilogue.cuh"

namespace minserve {
namespace cuda {

__global__ void __launch_bounds__(kThreads) embed_kernel(const __grid_constant__ EmbedArgs given) {
  pdl_launch_dependents();
  const std::int64_t token = blockIdx.x;
  const std::int64_t channel =
      (blockIdx.y * static_cast<std::int64_t>(kThreads) + threadIdx.x) * kQuad;
  wait_for_previous_kernel();
  if (channel >= given.channels) return;
  const std::int64_t id = given.ids[token];
  float y[kQuad] = {};
  if (id >= 0 && id < given.vocabulary) {
    Quad<bf16> row;
    row.load(static_cast<const bf16*>(given.table) + id * given.channels + channel);
#pragma unroll
    for (int i = 0; i < kQuad; ++i) y[i] = row[i];
  }
  GemmArgs args;
  args.tokens = given.tokens, args.channels = given.channels, args.x = given.x;
  args.scaled = given.scaled, args.squares_out = given.squares;
  const auto* norm_weight = static_cast<const bf16*>(given.norm_weight);
  const QuadPosition at{static_cast<int>(token), static_cast<int>(channel), 0, 0};
  write_residual(args, at, norm_weight ? norm_weight + channel : nullptr, nullptr, y);
}

}  // namespace cuda
}  // namespace minserve
