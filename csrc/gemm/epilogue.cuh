// The epilogue of small-batch GEMMs. It takes the sums of four neighbouring channels of one token
// at a time.
//
// Sixteen neighbouring threads have the kSquareRows channels whose squares are summed together.
#pragma once

#include <optional>

#include "../arch/prefetch.cuh"
#include "../core/vector_access.cuh"
#include "../cells/gates.h"
#include "../core/gelu.cuh"
#include "../cells/silu.cuh"
#include "../cells/dispatch.h"
#include "args.h"
#include "epilogue_operands.cuh"

namespace minserve {
namespace cuda {

constexpr int kQuad = 4;

template <class T>
using Quad = Channels<T, kQuad>;

// Where a quad is: of all, and of its block's share.
struct QuadPosition {
  int token, channel, own_token, own_channel;
  __device__ __forceinline__ bool inside(const GemmArgs& args) const {
    return token < args.tokens && channel < args.channels;
  }
  // In a matrix [tokens, channels].
  __device__ __forceinline__ std::int64_t offset(const GemmArgs& args) const {
    return token * args.channels + channel;
  }
};

// What the sums of a token are multiplied by: its norm's division, or nothing.
__device__ __forceinline__ float norm_scale_of(const DeferredNorm& norm, float squares) {
  return rsqrtf(squares / norm.width + norm.eps);
}
// Sums of squares are added up in their order, kAhead of them on their way at a time.
template <int kAhead>
__device__ __forceinline__ float norm_scale(const GemmArgs& args, std::int64_t token) {
  if (!args.squares) return 1.0f;
  float sum = 0.0f;
#pragma unroll 1
  for (int first = 0; first < args.square_blocks; first += kAhead) {
    float next[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int block = first + i;
      next[i] = block < args.square_blocks && token < args.tokens
                    ? args.squares[block * args.tokens + token]
                    : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) sum += next[i];
  }
  return norm_scale_of(args, sum);
}

// What is read for a quad before its sums are looked at: the residual stream, the state, or
// nothing.
struct StreamBefore {
  Quad<bf16> x;
  __device__ __forceinline__ void load(const GemmArgs& args, const QuadPosition& at, int) {
    if (args.epilogue == Epilogue::residual && at.inside(args)) {
      x.load(static_cast<const bf16*>(args.x) + at.offset(args));
    }
  }
};
struct NothingBefore {
  __device__ __forceinline__ void load(const GemmArgs&, const QuadPosition&, int) {}
};
struct StateBefore {
  Quad<float> state;
  float* row;  // null: a padding row
  __device__ __forceinline__ void load(const GemmArgs& args, const QuadPosition& at, int slot) {
    row = nullptr;
    if (slot < 0 || slot >= args.num_slots || !at.inside(args)) return;
    row = args.state + slot * args.state_stride + at.channel;
    state.load(row);
  }
};

// Of a residual stream in fp32.
struct WideStreamBefore {
  Quad<float> x;
  __device__ __forceinline__ void load(const GemmArgs& args, const QuadPosition& at, int) {
    if (at.inside(args)) x.load(static_cast<const float*>(args.x) + at.offset(args));
  }
};
// Of channels that are convolved: the filter, and the inputs before this one.
struct WindowBefore {
  Channels<bf16, kQuad * kConvolvedTaps> filter;
  Quad<bf16> bias;  // zeros
  Quad<float> inputs[kConvolvedTaps - 1];
  float* row;  // null: a padding row
  __device__ __forceinline__ void load(const GemmArgs& args, const QuadPosition& at, int slot) {
    row = nullptr;
    const std::int64_t own = at.channel - args.first_convolved;
    if (own < 0 || own >= args.convolved || !at.inside(args)) return;
    filter.load(static_cast<const bf16*>(args.filter) + own * kConvolvedTaps);
    if (args.filter_bias) bias.load(static_cast<const bf16*>(args.filter_bias) + own);
    if (slot < 0 || slot >= args.num_slots) return;
    row = args.state + slot * args.state_stride + own;
#pragma unroll
    for (int k = 0; k < kConvolvedTaps - 1; ++k) inputs[k].load(row + k * args.tap_stride);
  }
};

// What follows a product: the step of a cell or SwiGLU, of which several rows of W make a channel,
// or an epilogue of rows. kStepping: each token has a row of state.
template <template <class> class CellOf>
struct StepOf {
  using Before = StateBefore;
  using Cell = CellOf<float>;
  static constexpr int kGates = Cell::kPreactivations, kParameters = Cell::kParameters;
  static constexpr bool kStepping = true;
  // Whether a pre-activation behind those of the recurrence gates h, after a norm. The norm's
  // division is left for the next product.
  static constexpr bool kOutputGate = kGates > Cell::kInputs;
  static_assert(Cell::kStates == 1 && Cell::kOutputs == 1, "a quad has one of each");
  static_assert(kGates - Cell::kInputs <= 1 && kParameters <= 1, "no kernel has more");
  static_assert(kGates == 2 || kGates == 3, "tiles of rows are laid out for these");
  static __device__ __forceinline__ void prefetch_operands(const GemmArgs&, std::int64_t, int) {}
  // The states of a line of channels.
  static __device__ __forceinline__ void prefetch_state(const GemmArgs& args, int slot,
                                                        std::int64_t channel) {
    if (slot < 0 || slot >= args.num_slots || channel >= args.channels) return;
    prefetch_to_l2(args.state + slot * args.state_stride + channel);
  }
  static_assert(!kOutputGate || kGates == 3, "squares are summed by sixteen threads of a token");
};
struct SwiGlu {
  using Before = NothingBefore;
  static constexpr int kGates = 2, kParameters = 0;
  static constexpr bool kStepping = false;
};
struct NoStep {
  using Before = StreamBefore;
  static constexpr int kGates = 1, kParameters = 0;
  static constexpr bool kStepping = false;
};
struct WideResidual {
  using Before = WideStreamBefore;
  static constexpr int kGates = 1, kParameters = 0;
  static constexpr bool kStepping = false;
};
struct Convolve {
  using Before = WindowBefore;
  static constexpr int kGates = 1, kParameters = 0;
  static constexpr bool kStepping = true;
  // The filter of a block's channels; no kernel writes it.
  static __device__ __forceinline__ void prefetch_operands(const GemmArgs& args,
                                                           std::int64_t first_channel, int lane) {
    constexpr int kLine = 128 / (kConvolvedTaps * 2);  // channels
    const std::int64_t own = first_channel - args.first_convolved + lane * kLine;
    if (lane >= kSquareRows / kLine || own < 0 || own >= args.convolved) return;
    prefetch_to_l2(static_cast<const bf16*>(args.filter) + own * kConvolvedTaps);
  }
  static __device__ __forceinline__ void prefetch_state(const GemmArgs& args, int slot,
                                                        std::int64_t channel) {
    const std::int64_t own = channel - args.first_convolved;
    if (slot < 0 || slot >= args.num_slots || own < 0 || own >= args.convolved) return;
#pragma unroll
    for (int k = 0; k < kConvolvedTaps - 1; ++k) {
      prefetch_to_l2(args.state + slot * args.state_stride + k * args.tap_stride + own);
    }
  }
};

template <class F, template <class> class CellOf>
void call_with(const F& f, CellTag<CellOf>) {
  f(StepOf<CellOf>{});
}
// Calls f with what follows: the StepOf of a cell, or SwiGlu or NoStep.
template <class F>
void with_step(Epilogue epilogue, std::optional<CellKind> cell, const F& f) {
  if (cell) return with_cell<GemmCells>(*cell, [&](auto tag) { call_with(f, tag); });
  if (epilogue == Epilogue::swiglu) return f(SwiGlu{});
  f(NoStep{});
}

// `from`: this quad's, in shared memory.
__device__ __forceinline__ void add_bias(const GemmArgs& args, const bf16* from,
                                         float (&y)[kQuad]) {
  if (!args.bias) return;
  Quad<bf16> bias;
  bias.load(from);
#pragma unroll
  for (int i = 0; i < kQuad; ++i) y[i] += bias[i];
}

// Neighbouring channels of the residual stream, with what the next product's bias adds to them.
template <int kCount>
__device__ __forceinline__ void store_with_ahead(const GemmArgs& args, const bf16* of_channels,
                                                 std::int64_t offset, Channels<bf16, kCount> x) {
  if (args.ahead) {
    Channels<bf16, kCount> ahead;
    ahead.load(of_channels);
    float total[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) total[i] = x[i] + ahead[i];
    x.set(total);
  }
  x.store(static_cast<bf16*>(args.x) + offset);
}

// The sum over the sixteen neighbouring threads that have the same token's kSquareRows channels.
__device__ __forceinline__ float sum_of_channels(float sum) {
  const unsigned half = 0xffffu << (threadIdx.x % 32 / 16 * 16);
#pragma unroll
  for (int distance = 8; distance > 0; distance /= 2) {
    sum += __shfl_xor_sync(half, sum, distance);
  }
  return sum;
}
__device__ __forceinline__ void write_squares(const GemmArgs& args, const QuadPosition& at,
                                              float sum) {
  sum = sum_of_channels(sum);
  if (threadIdx.x % 16 == 0) {
    args.squares_out[at.channel / kSquareRows * args.tokens + at.token] = sum;
  }
}

// The residual stream, and what the norm that comes next needs of it. `norm_weight`, `ahead`: of
// this quad's channels, where there are any.
__device__ __forceinline__ void write_residual(const GemmArgs& args, const QuadPosition& at,
                                               const bf16* norm_weight, const bf16* ahead,
                                               float (&y)[kQuad]) {
  Quad<bf16> x;
  x.set(y);
  store_with_ahead(args, ahead, at.offset(args), x);
  if (!args.squares_out) return;
  // Of x rounded, before what is added ahead.
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kQuad; ++i) sum += x[i] * x[i];
  if (args.scaled) {
    Quad<bf16> weight, scaled;
    weight.load(norm_weight);
#pragma unroll
    for (int i = 0; i < kQuad; ++i) y[i] = x[i] * weight[i];
    scaled.set(y);
    scaled.store(static_cast<bf16*>(args.scaled) + at.offset(args));
  }
  write_squares(args, at, sum);
}

// One product of each channel.
template <int kChannels>
__device__ __forceinline__ void epilogue(const GemmArgs& args, const QuadPosition& at,
                                         const EpilogueOperands<1, kChannels>& vectors,
                                         const StreamBefore& before, float (&y)[kQuad]) {
  add_bias(args, vectors.bias[0] + at.own_channel, y);
  if (args.epilogue == Epilogue::residual) {
#pragma unroll
    for (int i = 0; i < kQuad; ++i) y[i] += before.x[i];
    return write_residual(args, at, vectors.norm_weight + at.own_channel,
                          vectors.ahead + at.own_channel, y);
  }
  if (args.epilogue == Epilogue::logits) {
    Quad<float> out;
    out.set(y);
    return out.store(static_cast<float*>(args.out) + at.offset(args));
  }
  if (args.epilogue == Epilogue::gelu) {
#pragma unroll
    for (int i = 0; i < kQuad; ++i) y[i] = gelu(y[i]);
  }
  Quad<bf16> out;
  out.set(y);
  out.store(static_cast<bf16*>(args.out) + at.offset(args));
}

// The residual stream in fp32, and what the norm that comes next needs of it.
template <int kChannels>
__device__ __forceinline__ void epilogue(const GemmArgs& args, const QuadPosition& at,
                                         const EpilogueOperands<1, kChannels>& vectors,
                                         const WideStreamBefore& before, float (&y)[kQuad]) {
  add_bias(args, vectors.bias[0] + at.own_channel, y);
  Quad<bf16> weight, scaled;
  weight.load(vectors.norm_weight + at.own_channel);
  float sum = 0.0f, to_scale[kQuad];
#pragma unroll
  for (int i = 0; i < kQuad; ++i) {
    y[i] += before.x[i];
    sum += y[i] * y[i];
    to_scale[i] = y[i] * weight[i];
  }
  Quad<float> x;
  x.set(y);
  x.store(static_cast<float*>(args.x) + at.offset(args));
  scaled.set(to_scale);
  scaled.store(static_cast<bf16*>(args.scaled) + at.offset(args));
  write_squares(args, at, sum);
}

// One step of the convolution as conv1d computes it, of a product that is rounded as it is there.
template <int kChannels>
__device__ __forceinline__ void epilogue(const GemmArgs& args, const QuadPosition& at,
                                         const EpilogueOperands<1, kChannels>& vectors,
                                         const WindowBefore& before, float (&y)[kQuad]) {
  add_bias(args, vectors.bias[0] + at.own_channel, y);
  Quad<bf16> rounded;
  rounded.set(y);
  const std::int64_t own = at.channel - args.first_convolved;
  if (own < 0 || own >= args.convolved) {
    return rounded.store(static_cast<bf16*>(args.out) + at.offset(args));
  }
  float current[kQuad];
#pragma unroll
  for (int i = 0; i < kQuad; ++i) {
    const auto tap = [&](int k) { return before.filter[i * kConvolvedTaps + k]; };
    current[i] = rounded[i];
    float sum = before.bias[i];
#pragma unroll
    for (int k = 0; k < kConvolvedTaps - 1; ++k) sum = fmadd(tap(k), before.inputs[k][i], sum);
    y[i] = before.row ? silu(fmadd(tap(kConvolvedTaps - 1), current[i], sum)) : 0.0f;
  }
  if (before.row) {
#pragma unroll
    for (int k = 0; k < kConvolvedTaps - 2; ++k) {
      before.inputs[k + 1].store(before.row + k * args.tap_stride);
    }
    Quad<float> newest;
    newest.set(current);
    newest.store(before.row + (kConvolvedTaps - 2) * args.tap_stride);
  }
  Quad<bf16> out;
  out.set(y);
  out.store(static_cast<bf16*>(args.convolved_out) + at.token * args.convolved + own);
}

// One step from a quad's pre-activations; `own`: where its channels are in `vectors`.
template <template <class> class CellOf, class Vectors>
__device__ __forceinline__ void finish_gates(StepOf<CellOf>, const GemmArgs& args,
                                             const QuadPosition& at, const Vectors& vectors,
                                             int own, StateBefore& before,
                                             const Quad<bf16> (&pre)[StepOf<CellOf>::kGates]) {
  using Step = StepOf<CellOf>;
  using Cell = CellOf<float>;
  const bool real = before.row != nullptr;
  float h[kQuad];
  Quad<float> parameter;  // zeros
  if constexpr (Step::kParameters > 0) {
    if (args.parameter) parameter.load(vectors.parameter + own);
  }
  const auto step = [&](auto options) {
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      float in[Cell::kInputs];
#pragma unroll
      for (int gate = 0; gate < Cell::kInputs; ++gate) in[gate] = pre[gate][i];
      Parameters<float, Step::kParameters> parameters;
      if constexpr (Step::kParameters > 0) parameters.at[0] = parameter[i];
      const Affine<float> affine = Cell::coefficients(options, in, parameters);
      h[i] = real ? fmadd(affine.a, before.state[i], affine.b) : 0.0f;
    }
  };
  if (Cell::kHasOptions && (args.linear_candidate || !args.normalize_gates)) {
    step(AnyOptions{args.linear_candidate, args.normalize_gates});
  } else {
    step(UsualOptions{});
  }
  if (real) {
    before.state.set(h);
    before.state.store(before.row);
  }
  if constexpr (Step::kOutputGate) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      sum += h[i] * h[i];
      h[i] = real ? h[i] * silu(pre[Cell::kInputs][i]) : 0.0f;
    }
    write_squares(args, at, sum);
  }
  Quad<bf16> out;
  out.set(h);
  out.store(static_cast<bf16*>(args.out) + at.offset(args));
}

template <class Vectors>
__device__ __forceinline__ void finish_gates(SwiGlu, const GemmArgs& args, const QuadPosition& at,
                                             const Vectors&, int, NothingBefore&,
                                             const Quad<bf16> (&pre)[SwiGlu::kGates]) {
  float y[kQuad];
#pragma unroll
  for (int i = 0; i < kQuad; ++i) y[i] = silu(pre[0][i]) * pre[1][i];
  Quad<bf16> out;
  out.set(y);
  out.store(static_cast<bf16*>(args.out) + at.offset(args));
}

// The products of a channel's gates: one step, or SwiGLU. They are rounded as a prompt's
// pre-activations are, so that stepping differs from scanning by nothing but the order of a
// product's sums; with an output gate, also by what is rounded around the norm of h.
template <class Step, class Vectors>
__device__ __forceinline__ void gates_epilogue(Step step, const GemmArgs& args,
                                               const QuadPosition& at, const Vectors& vectors,
                                               typename Step::Before& before,
                                               float (&y)[Step::kGates][kQuad]) {
  Quad<bf16> pre[Step::kGates];
#pragma unroll
  for (int gate = 0; gate < Step::kGates; ++gate) {
    add_bias(args, vectors.bias[gate] + at.own_channel, y[gate]);
    pre[gate].set(y[gate]);
  }
  finish_gates(step, args, at, vectors, at.own_channel, before, pre);
}

}  // namespace cuda
}  // namespace minserve
