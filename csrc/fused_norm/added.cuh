// The norm between two layers whose residual stream may be wider than the products' types: it adds
// the product before to the stream, and gives the next product its input.
#pragma once

#include "kernel.cuh"

namespace minserve {
namespace cuda {

// X: the stream's type. A block has a row, of which each thread adds and norms the same vectors.
template <class X>
__global__ void __launch_bounds__(kMostThreads)
    added_rms_norm_kernel(const __grid_constant__ AddedNormArgs args) {
  using Numbers = Channels<X, kVector>;
  extern __shared__ uint4 memory[];
  Block block(*reinterpret_cast<Block::Shared*>(memory));
  const std::int64_t row = blockIdx.x;
  X* const x = static_cast<X*>(args.x) + row * args.width;
  const bf16* const y = args.y ? args.y + row * args.width : nullptr;
  pdl_launch_dependents();
  wait_for_previous_kernel();
  Vector weight;
  if (first_vector() < args.width) weight.load(args.weight + first_vector());
  Numbers first;
  float sum = 0.0f;
  for (std::int64_t at = first_vector(); at < args.width; at += vector_stride()) {
    Numbers own;
    own.load(x + at);
    if (y) {
      Vector added;
      added.load(y + at);
      float total[kVector];
#pragma unroll
      for (int i = 0; i < kVector; ++i) total[i] = own[i] + added[i];
      own.set(total);
      own.store(x + at);
    }
    if (at == first_vector()) first = own;
#pragma unroll
    for (int i = 0; i < kVector; ++i) sum = fmaf(own[i], own[i], sum);
  }
  sum = block.all(sum, 0.0f, [](float a, float b) { return a + b; });
  const float scale = rsqrtf(sum / static_cast<float>(args.width) + args.eps);
  for (std::int64_t at = first_vector(); at < args.width; at += vector_stride()) {
    if (at != first_vector()) {
      first.load(x + at);
      weight.load(args.weight + at);
    }
    float result[kVector];
#pragma unroll
    for (int i = 0; i < kVector; ++i) result[i] = first[i] * scale * weight[i];
    Vector out;
    out.set(result);
    out.store(args.out + row * args.width + at);
  }
}

}  // namespace cuda
}  // namespace minserve
