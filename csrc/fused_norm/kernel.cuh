// A block has a row: it sums the squares of the residual stream while the product's row is on its
// way, and each thread finishes eight neighbouring channels of it at a time.
#pragma once

#include "../core/reduce/block_reduce.cuh"
#include "../core/vector_access.cuh"
#include "../cells/gates.h"
#include "../core/gelu.cuh"
#include "args.h"

namespace minserve {
namespace cuda {

constexpr int kVector = 8;  // channels of two bytes in one access
constexpr int kHeld = 2;    // of them, that a thread of a GELU takes at once
constexpr unsigned kMostThreads = 1024;
constexpr unsigned kThreadsAtOnce = 1024;  // of a multiprocessor, with a GELU's registers
constexpr unsigned kFewestThreads = 96;    // of a GELU
constexpr int kStepRegisters = 48;  // of a step's threads: eight rows of 1,152 channels at once

using Vector = Channels<bf16, kVector>;

// What a thread takes of a row first, and from one turn to the next.
__device__ __forceinline__ std::int64_t first_vector() {
  return static_cast<std::int64_t>(threadIdx.x) * kVector;
}
__device__ __forceinline__ std::int64_t vector_stride() {
  return static_cast<std::int64_t>(blockDim.x) * kVector;
}

// A pre-activation, rounded to what a product that had bias and norm would be written in.
__device__ __forceinline__ void divide(const bf16* bias, float scale, Vector& y) {
  Vector add;
  if (bias) add.load(bias);
  float pre[kVector];
#pragma unroll
  for (int i = 0; i < kVector; ++i) pre[i] = fmaf(y[i], scale, add[i]);
  y.set(pre);
}

// The block's row of the residual stream.
struct Stream {
  const NormedArgs& args;
  bf16* const x;
  Vector first;  // of this thread's turns

  __device__ __forceinline__ Stream(const NormedArgs& of, std::int64_t row)
      : args(of), x(of.x + row * of.width) {}

  __device__ __forceinline__ void ask() {
    if (first_vector() < args.width) first.load(x + first_vector());
  }
  // One over its root mean square; then it has what the next product's bias adds to it.
  __device__ __forceinline__ float divide_and_add(Block& block) {
    float sum = 0.0f;
    for (std::int64_t at = first_vector(); at < args.width; at += vector_stride()) {
      Vector own = first;
      if (at != first_vector()) own.load(x + at);
#pragma unroll
      for (int i = 0; i < kVector; ++i) sum = fmaf(own[i], own[i], sum);
    }
    sum = block.all(sum, 0.0f, [](float a, float b) { return a + b; });
    if (args.ahead) {  // by whoever has read it, and nobody else does
      for (std::int64_t at = first_vector(); at < args.width; at += vector_stride()) {
        Vector own = first, bias;
        if (at != first_vector()) own.load(x + at);
        bias.load(args.ahead + at);
        float total[kVector];
#pragma unroll
        for (int i = 0; i < kVector; ++i) total[i] = own[i] + bias[i];
        own.set(total);
        own.store(x + at);
      }
    }
    return rsqrtf(sum / static_cast<float>(args.width) + args.eps);
  }
};

// Two vectors of a thread are on their way at once, so that half as many threads have as much to
// wait for, and the blocks of a thousand rows run all at once.
__global__ void __launch_bounds__(kMostThreads)
    normed_gelu_kernel(const __grid_constant__ NormedArgs args) {
  extern __shared__ uint4 memory[];
  Block block(*reinterpret_cast<Block::Shared*>(memory));
  const std::int64_t row = blockIdx.x;
  bf16* const y = args.y + row * args.channels;
  pdl_launch_dependents();
  Stream stream(args, row);
  Vector held[kHeld];
  const auto load = [&](std::int64_t at) {
#pragma unroll
    for (int n = 0; n < kHeld; ++n) {
      const std::int64_t channel = at + n * vector_stride();
      if (channel < args.channels) held[n].load(y + channel);
    }
  };
  wait_for_previous_kernel();
  stream.ask();
  std::int64_t at = first_vector();
  load(at);
  const float scale = stream.divide_and_add(block);
  while (at < args.channels) {
#pragma unroll
    for (int n = 0; n < kHeld; ++n) {
      const std::int64_t channel = at + n * vector_stride();
      if (channel >= args.channels) break;
      Vector bias;
      if (args.bias) bias.load(args.bias + channel);
      float out[kVector];
#pragma unroll
      for (int i = 0; i < kVector; ++i) out[i] = gelu(fmaf(held[n][i], scale, bias[i]));
      held[n].set(out);
      held[n].store(y + channel);
    }
    at += kHeld * vector_stride();
    load(at);
  }
}

template <template <class> class CellOf, class O>
__global__ void __maxnreg__(kStepRegisters)
    normed_step_kernel(const __grid_constant__ NormedArgs args, const O options) {
  using Cell = CellOf<float>;
  static_assert(kIsPlain<Cell>);
  extern __shared__ uint4 memory[];
  Block block(*reinterpret_cast<Block::Shared*>(memory));
  const std::int64_t row = blockIdx.x;
  const bf16* const y = args.y + row * args.channels * Cell::kInputs;
  pdl_launch_dependents();
  Stream stream(args, row);
  Vector in[Cell::kInputs];
  const auto load = [&](std::int64_t at) {
    if (at >= args.channels) return;
#pragma unroll
    for (int gate = 0; gate < Cell::kInputs; ++gate) in[gate].load(y + gate * args.channels + at);
  };
  std::int64_t at = first_vector();
  wait_for_previous_kernel();
  const std::int64_t slot = args.slots[row];
  stream.ask();
  load(at);
  // Last, for these wait for their slot.
  const bool real = slot >= 0 && slot < args.num_slots;
  float* const row_of_state = args.state + (real ? slot * args.state_stride : 0);
  Channels<float, kVector> state;
  if (real && at < args.channels) state.load(row_of_state + at);
  const float scale = stream.divide_and_add(block);
  while (at < args.channels) {
    float h[kVector];
#pragma unroll
    for (int gate = 0; gate < Cell::kInputs; ++gate) {
      divide(args.bias ? args.bias + gate * args.channels + at : nullptr, scale, in[gate]);
    }
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      float element[Cell::kInputs];
#pragma unroll
      for (int gate = 0; gate < Cell::kInputs; ++gate) element[gate] = in[gate][i];
      const Affine<float> affine = Cell::coefficients(options, element);
      h[i] = real ? fmadd(affine.a, state[i], affine.b) : 0.0f;
    }
    if (real) {
      state.set(h);
      state.store(row_of_state + at);
    }
    Vector out;
    out.set(h);
    out.store(args.out + row * args.channels + at);
    at += vector_stride();
    load(at);
    if (real && at < args.channels) state.load(row_of_state + at);
  }
}

__global__ void __launch_bounds__(kMostThreads)
    rms_norm_kernel(const __grid_constant__ NormedArgs args) {
  extern __shared__ uint4 memory[];
  Block block(*reinterpret_cast<Block::Shared*>(memory));
  const std::int64_t row = blockIdx.x;
  bf16* const y = args.y + row * args.width;
  pdl_launch_dependents();
  Stream stream(args, row);
  Vector weight;
  std::int64_t at = first_vector();
  wait_for_previous_kernel();
  stream.ask();
  if (at < args.width) weight.load(args.weight + at);
  const float scale = stream.divide_and_add(block);
  Vector own = stream.first;
  while (at < args.width) {
    float out[kVector];
#pragma unroll
    for (int i = 0; i < kVector; ++i) out[i] = own[i] * scale * weight[i];
    own.set(out);
    own.store(y + at);
    at += vector_stride();
    if (at >= args.width) break;
    own.load(stream.x + at);
    weight.load(args.weight + at);
  }
}

// Threads for each vector of the stream and for each `held` vectors of the product.
inline unsigned normed_threads(const NormedArgs& args, int held) {
  const std::int64_t vectors = (args.channels + held * kVector - 1) / (held * kVector);
  const std::int64_t most = vectors > args.width / kVector ? vectors : args.width / kVector;
  const std::int64_t threads = (most + kWarp - 1) / kWarp * kWarp;
  return static_cast<unsigned>(threads < kMostThreads ? threads : kMostThreads);
}

// A GELU's, of at least one row: so few that all rows are under way together, where that can be.
// Those that are not would take as long again as those that are. (So the last bit of a row's norm
// may depend on how many rows there are, as those of the products before it do.)
inline unsigned gelu_threads(const NormedArgs& args, int processors) {
  const std::int64_t rows_each = (args.rows + processors - 1) / processors;
  const std::int64_t room = kThreadsAtOnce / rows_each / kWarp * kWarp;
  const unsigned most = static_cast<unsigned>(room > kFewestThreads ? room : kFewestThreads);
  const unsigned threads = normed_threads(args, kHeld);
  return threads < most ? threads : most;
}

}  // namespace cuda
}  // namespace minserve
