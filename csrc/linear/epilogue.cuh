// What is made of finished sums, four neighbouring channels of one token at a time.
//
// Sixteen neighbouring threads have the kSquareRows channels whose squares are summed together.
#pragma once

#include "../common/channels.cuh"
#include "../common/gates.h"
#include "../minlstm/cell.h"
#include "../mingru/cell.h"
#include "args.h"

namespace minserve {
namespace cuda {

constexpr int kQuad = 4;

template <class T>
using Quad = Channels<T, kQuad>;

template <class T>
__device__ __forceinline__ void add_bias(const LinearArgs& args, std::int64_t row,
                                         float (&y)[kQuad]) {
  if (!args.bias) return;
  Quad<T> bias;
  bias.load(static_cast<const T*>(args.bias) + row);
#pragma unroll
  for (int i = 0; i < kQuad; ++i) y[i] += bias[i];
}

// The residual stream at `at`, and what the norm that comes next needs of it.
template <class T>
__device__ __forceinline__ void write_residual(const LinearArgs& args, T* at, std::int64_t token,
                                               std::int64_t channel, float (&y)[kQuad]) {
  Quad<T> x;
  x.set(y);
  x.store(at);
  if (!args.scaled) return;
  Quad<T> weight, scaled;
  weight.load(static_cast<const T*>(args.norm_weight) + channel);
  // Of x as it was written: rounded.
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kQuad; ++i) {
    sum += x[i] * x[i];
    y[i] = x[i] * weight[i];
  }
  scaled.set(y);
  scaled.store(static_cast<T*>(args.scaled) + token * args.channels + channel);
  const unsigned half = 0xffffu << (threadIdx.x % 32 / 16 * 16);
#pragma unroll
  for (int distance = 8; distance > 0; distance /= 2) {
    sum += __shfl_xor_sync(half, sum, distance);
  }
  if (threadIdx.x % 16 == 0) {
    args.squares_out[channel / kSquareRows * args.tokens + token] = sum;
  }
}

template <class T>
__device__ __forceinline__ void finish_residual(const LinearArgs& args, std::int64_t token,
                                                std::int64_t channel, float (&y)[kQuad]) {
  T* at = static_cast<T*>(args.x) + token * args.channels + channel;
  Quad<T> x;
  x.load(at);
#pragma unroll
  for (int i = 0; i < kQuad; ++i) y[i] += x[i];
  write_residual<T>(args, at, token, channel, y);
}

// One product that no recurrence follows.
template <class T>
__device__ __forceinline__ void finish(const LinearArgs& args, std::int64_t token,
                                       std::int64_t channel, float (&y)[kQuad]) {
  add_bias<T>(args, channel, y);
  if (args.epilogue == Epilogue::residual) return finish_residual<T>(args, token, channel, y);
  const std::int64_t at = token * args.channels + channel;
  if (args.epilogue == Epilogue::logits) {
    Quad<float> out;
    out.set(y);
    return out.store(static_cast<float*>(args.out) + at);
  }
  if (args.epilogue == Epilogue::gelu) {
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      y[i] = 0.5f * y[i] * (1.0f + erff(y[i] * 0.70710678118654752f));
    }
  }
  Quad<T> out;
  out.set(y);
  out.store(static_cast<T*>(args.out) + at);
}

// The products of a channel's gates: one step. They are rounded as a prompt's pre-activations are,
// so that stepping gives the bits that scanning gives.
template <class T, template <class> class CellOf>
__device__ __forceinline__ void finish_step(const LinearArgs& args, std::int64_t token,
                                            std::int64_t channel, int slot,
                                            float (&y)[CellOf<float>::kInputs][kQuad]) {
  using Cell = CellOf<float>;
  const bool real = slot >= 0 && slot < args.num_slots;
  float* at = args.state + (real ? slot * args.state_stride : 0) + channel;
  Quad<float> state;
  if (real) state.load(at);
  Quad<T> pre[Cell::kInputs], out;
#pragma unroll
  for (int gate = 0; gate < Cell::kInputs; ++gate) {
    add_bias<T>(args, gate * args.channels + channel, y[gate]);
    pre[gate].set(y[gate]);
  }
  float h[kQuad];
  const auto step = [&](auto options) {
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      float in[Cell::kInputs];
#pragma unroll
      for (int gate = 0; gate < Cell::kInputs; ++gate) in[gate] = pre[gate][i];
      const Affine<float> affine = Cell::affine(options, in);
      h[i] = real ? fmadd(affine.a, state[i], affine.b) : 0.0f;
    }
  };
  if (args.linear_candidate || !args.normalize_gates) {
    step(AnyOptions{args.linear_candidate, args.normalize_gates});
  } else {
    step(UsualOptions{});
  }
  if (real) {
    state.set(h);
    state.store(at);
  }
  out.set(h);
  out.store(static_cast<T*>(args.out) + token * args.channels + channel);
}

}  // namespace cuda
}  // namespace minserve
