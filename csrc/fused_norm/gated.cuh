// What is multiplied by a gate: norm(h) * weight * silu(gate) of a recurrence's states, alone and
// behind a step, and silu(gate) * up of an MLP.
#pragma once

#include "../cells/silu.cuh"
#include "kernel.cuh"

namespace minserve {
namespace cuda {

// A group of the channels of a row of h [rows, channels], by a block each: a block that has no room
// for all of it in its threads' registers reads the rest again. kGateFirst: what is normed is
// h silu(gate), rather than h.
template <class T, bool kGateFirst>
__global__ void __launch_bounds__(kMostThreads)
    gated_rms_norm_kernel(const __grid_constant__ GatedNormArgs args) {
  using Numbers = Channels<T, kVector>;
  extern __shared__ uint4 memory[];
  Block block(*reinterpret_cast<Block::Shared*>(memory));
  const unsigned groups = static_cast<unsigned>(args.groups);
  const std::int64_t row = blockIdx.x / groups, width = args.channels / groups;
  const std::int64_t first = blockIdx.x % groups * width;
  const T* const h = static_cast<const T*>(args.h) + row * args.channels + first;
  const T* const gate = static_cast<const T*>(args.gate) + row * args.gate_stride + first;
  const T* const weight = args.weight ? static_cast<const T*>(args.weight) + first : nullptr;
  T* const out = static_cast<T*>(args.out) + row * args.channels + first;
  pdl_launch_dependents();
  Numbers h_of, gate_of, weight_of;
  std::int64_t at = first_vector();
  const auto load = [&] {
    h_of.load(h + at);
    gate_of.load(gate + at);
    if (weight) weight_of.load(weight + at);
  };
  float own[kVector];  // what is normed
  const auto gated = [&](const Numbers& of_h, const Numbers& of_gate) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      own[i] = kGateFirst ? of_h[i] * silu(of_gate[i]) : of_h[i];
    }
  };
  wait_for_previous_kernel();
  if (at < width) load();
  float sum = 0.0f;
  for (std::int64_t next = at; next < width; next += vector_stride()) {
    Numbers more = h_of, more_gate = gate_of;
    if (next != at) {
      more.load(h + next);
      if constexpr (kGateFirst) more_gate.load(gate + next);
    }
    gated(more, more_gate);
#pragma unroll
    for (int i = 0; i < kVector; ++i) sum = fmaf(own[i], own[i], sum);
  }
  sum = block.all(sum, 0.0f, [](float a, float b) { return a + b; });
  const float scale = rsqrtf(sum / static_cast<float>(width) + args.eps);
  while (at < width) {
    gated(h_of, gate_of);
    float result[kVector];
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      result[i] = own[i] * scale * (weight ? weight_of[i] : 1.0f);
      if constexpr (!kGateFirst) result[i] *= silu(gate_of[i]);
    }
    h_of.set(result);
    h_of.store(out + at);
    at += vector_stride();
    if (at >= width) break;
    load();
  }
}

// y [rows, 2 * channels] = gate | up -> out [rows, channels].
template <class T>
__global__ void __launch_bounds__(kMostThreads)
    swiglu_kernel(const __grid_constant__ SwigluArgs args) {
  const std::int64_t row = blockIdx.x;
  const T* const y = static_cast<const T*>(args.y) + row * 2 * args.channels;
  T* const out = static_cast<T*>(args.out) + row * args.channels;
  pdl_launch_dependents();
  wait_for_previous_kernel();
  for (std::int64_t at = first_vector(); at < args.channels; at += vector_stride()) {
    Channels<T, kVector> gate, up;
    gate.load(y + at);
    up.load(y + args.channels + at);
    float result[kVector];
#pragma unroll
    for (int i = 0; i < kVector; ++i) result[i] = silu(gate[i]) * up[i];
    up.set(result);
    up.store(out + at);
  }
}

// The same of y / norm + bias; args.channels is that of the output.
__global__ void __launch_bounds__(kMostThreads)
    normed_swiglu_kernel(const __grid_constant__ NormedArgs args) {
  extern __shared__ uint4 memory[];
  Block block(*reinterpret_cast<Block::Shared*>(memory));
  const std::int64_t row = blockIdx.x;
  const bf16* const y = args.y + row * 2 * args.channels;
  pdl_launch_dependents();
  Stream stream(args, row);
  Vector gate, up;
  const auto load = [&](std::int64_t at) {
    if (at >= args.channels) return;
    gate.load(y + at);
    up.load(y + args.channels + at);
  };
  std::int64_t at = first_vector();
  wait_for_previous_kernel();
  stream.ask();
  load(at);
  const float scale = stream.divide_and_add(block);
  while (at < args.channels) {
    divide(args.bias ? args.bias + at : nullptr, scale, gate);
    divide(args.bias ? args.bias + args.channels + at : nullptr, scale, up);
    float result[kVector];
#pragma unroll
    for (int i = 0; i < kVector; ++i) result[i] = silu(gate[i]) * up[i];
    up.set(result);
    up.store(args.out + row * args.channels + at);
    at += vector_stride();
    load(at);
  }
}

// A step of a cell whose last pre-activation is an output gate: h / norm(h) * weight * silu(gate).
// What a thread does not hold of h it finds in the row of state, where it has just written it.
template <template <class> class CellOf>
__global__ void __launch_bounds__(kMostThreads)
    normed_gated_step_kernel(const __grid_constant__ NormedArgs args) {
  using Cell = CellOf<float>;
  static_assert(Cell::kPreactivations == Cell::kInputs + 1 && Cell::kParameters <= 1 &&
                    Cell::kStates == 1 && Cell::kOutputs == 1 && !Cell::kHasOptions,
                "an output gate follows the inputs");
  extern __shared__ uint4 memory[];
  Block block(*reinterpret_cast<Block::Shared*>(memory));
  const std::int64_t row = blockIdx.x;
  const bf16* const y = args.y + row * args.channels * Cell::kPreactivations;
  bf16* const out = args.out + row * args.channels;
  pdl_launch_dependents();
  Stream stream(args, row);
  Vector in[Cell::kInputs];
  const auto load = [&](std::int64_t at) {
    if (at >= args.channels) return;
#pragma unroll
    for (int n = 0; n < Cell::kInputs; ++n) in[n].load(y + n * args.channels + at);
  };
  std::int64_t at = first_vector();
  wait_for_previous_kernel();
  const std::int64_t slot = args.slots[row];
  stream.ask();
  load(at);
  const bool real = slot >= 0 && slot < args.num_slots;
  float* const row_of_state = args.state + (real ? slot * args.state_stride : 0);
  Channels<float, kVector> state, bound;
  if (real && at < args.channels) state.load(row_of_state + at);
  const float scale = stream.divide_and_add(block);
  Vector first;
  float sum = 0.0f;
  while (at < args.channels) {
    if (args.lower_bound) bound.load(args.lower_bound + at);
#pragma unroll
    for (int n = 0; n < Cell::kInputs; ++n) {
      divide(args.bias ? args.bias + n * args.channels + at : nullptr, scale, in[n]);
    }
    float h[kVector];
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      float element[Cell::kInputs];
#pragma unroll
      for (int n = 0; n < Cell::kInputs; ++n) element[n] = in[n][i];
      Parameters<float, Cell::kParameters> parameters;
      if constexpr (Cell::kParameters == 1) parameters.at[0] = bound[i];
      const Affine<float> step = Cell::coefficients(UsualOptions{}, element, parameters);
      h[i] = real ? fmadd(step.a, state[i], step.b) : 0.0f;
    }
    if (real) {
      state.set(h);
      state.store(row_of_state + at);
    }
    Vector rounded_h;  // as a prompt's are before their norm
    rounded_h.set(h);
    if (at == first_vector()) first = rounded_h;
#pragma unroll
    for (int i = 0; i < kVector; ++i) sum = fmaf(rounded_h[i], rounded_h[i], sum);
    at += vector_stride();
    load(at);
    if (real && at < args.channels) state.load(row_of_state + at);
  }
  sum = block.all(sum, 0.0f, [](float a, float b) { return a + b; });
  const float norm = rsqrtf(sum / static_cast<float>(args.channels) + args.eps);
  for (at = first_vector(); at < args.channels; at += vector_stride()) {
    Vector own = first, gate, weight;
    if (at != first_vector()) {
      float h[kVector] = {};
      if (real) {
        state.load(row_of_state + at);
#pragma unroll
        for (int i = 0; i < kVector; ++i) h[i] = state[i];
      }
      own.set(h);
    }
    gate.load(y + Cell::kInputs * args.channels + at);
    divide(args.bias ? args.bias + Cell::kInputs * args.channels + at : nullptr, scale, gate);
    if (args.weight) weight.load(args.weight + at);
    float result[kVector];
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      result[i] = real ? own[i] * norm * (args.weight ? weight[i] : 1.0f) * silu(gate[i]) : 0.0f;
    }
    own.set(result);
    own.store(out + at);
  }
}

}  // namespace cuda
}  // namespace minserve
