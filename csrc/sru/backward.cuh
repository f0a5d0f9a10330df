// The gradient of the simple recurrent unit on CUDA: a thread reads a channel of a sequence from
// its last token to its first, with tokens on their way. Gates are computed again from the kept c.
// The chain from a token to the one before is two multiply-adds: nothing else waits for it.
#pragma once

#include "../core/row_grid.cuh"
#include "scan.cuh"

namespace minserve {
namespace cuda {

// Registers of more tokens would leave too few threads.
constexpr int kSruGradientsAhead = 8;

template <class T, bool kHighway, bool kTanh>
__global__ void __launch_bounds__(kThreads, kSruBlocks)
    sru_backward_kernel(const __grid_constant__ SruArgs args,
                        const __grid_constant__ SruGradients grads) {
  const Layout& lay = args.layout;
  const std::int64_t s = row_group(), channel = thread_of_group(), channels = lay.channels;
  pdl_launch_dependents();
  wait_for_previous_kernel();
  if (s > lay.sequences || channel >= channels) return;
  const std::int64_t begin = lay.begin(s), end = lay.end(s);
  if (s == lay.sequences) {
    for (int plane = 0; plane < 3; ++plane) {
      zero_rows<T>(grads.u, begin, end, plane * channels + channel);
    }
    if (kHighway) zero_rows<T>(grads.highway, begin, end, channel);
    return;
  }
  struct In {
    SruInputs<T, kHighway> of;
    Channels<T, 1> grad;
    float before;  // c of the token before
  };
  const SruChannel<float> of = channel_of(args, channel);
  const SruLoad<T, kHighway> inputs(args, channel);
  const std::int64_t own = s * channels + channel;
  const float c0 = grads.c0 ? grads.c0[own] : 0.0f;
  float carry = grads.last ? grads.last[own] : 0.0f;
  float weight_forget = 0.0f, weight_reset = 0.0f;
  if (args.weight_c) {
    weight_forget = args.weight_c[channel];
    weight_reset = args.weight_c[channels + channel];
  }
  const auto load = [&](std::int64_t row, In& in) {
    inputs(row, in.of);
    in.grad.load(place<const T>(grads.h, row, channel));
    in.before = row > begin ? args.c[(row - 1) * channels + channel] : c0;
  };
  SruSums<float> sums = {};
  In ring[kSruGradientsAhead];
#pragma unroll
  for (int i = 0; i < kSruGradientsAhead; ++i) {
    if (end - 1 - i >= begin) load(end - 1 - i, ring[i]);
  }
  float c = end > begin ? args.c[(end - 1) * channels + channel] : 0.0f;
#pragma unroll 1
  for (std::int64_t row = end - 1; row >= begin; row -= kSruGradientsAhead) {
#pragma unroll
    for (int i = 0; i < kSruGradientsAhead; ++i) {
      const std::int64_t at = row - i, ahead = at - kSruGradientsAhead;
      if (at < begin) break;
      const In in = ring[i];
      if (ahead >= begin) load(ahead, ring[i]);
      const float x = kHighway ? in.of.x[0] * args.scale : 0.0f;
      const SruTokenGradient<float> out = sru_token_gradient<kHighway, kTanh>(
          of, weight_forget, weight_reset, in.of.u0[0], in.of.u1[0], in.of.u2[0], x, in.before, c,
          in.grad[0], carry, sums);
      c = in.before;
      T* const grad_u = place<T>(grads.u, at, channel);
      from_lane(grad_u, out.u0);
      from_lane(grad_u + channels, out.u1);
      from_lane(grad_u + 2 * channels, out.u2);
      if (kHighway) from_lane(place<T>(grads.highway, at, channel), out.x * args.scale);
    }
  }
  grads.of_c0[own] = carry;
  const std::int64_t further = lay.sequences * channels;
  grads.vectors[own] = sums.forget_c;
  grads.vectors[further + own] = sums.reset_c;
  grads.vectors[2 * further + own] = sums.forget;
  grads.vectors[3 * further + own] = sums.reset;
}

}  // namespace cuda
}  // namespace minserve
