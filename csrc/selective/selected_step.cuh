// A selective step together with the projection of its time steps and, in Falcon-Mamba, the norms
// of what was selected: all that is between the selection's product and the out projection's.
//
// dt of a channel is the product of a short row of inputs, and the warp that has the channel's
// states computes it on tensor cores, of kRows rows at once.
#pragma once

#include "../arch/mma.cuh"
#include "selected_args.h"
#include "step.cuh"

namespace minserve {
namespace cuda {

constexpr int kDtVec = kDtChunk;

// Products of kRows rows' inputs with the weights of this lane's own channel. The warp has channels
// from `first` on, and rows from `count` on are not there. The tensor cores' sums of a row depend
// on that row only.
template <class Lanes, int kUnits, int kRows>
__device__ __forceinline__ void project_dt(const SelectedArgs& args, int first, std::int64_t row,
                                           int count, float (&dt)[kRows]) {
  constexpr int kTiles = (kUnits + 1) / 2;  // of 16 channels
  static_assert(Lanes::kWarpChannels == 8 && kRows <= 8, "half a tile, and its columns");
  const int chunks = args.rank / kDtVec, channels = static_cast<int>(args.step.layout.channels);
  const int own = Lanes::lane() / 4, pair = Lanes::lane() % 4 * 2;
  const Stream& selection = args.step.dt;
  const bf16* const inputs =
      static_cast<const bf16*>(selection.data) + (row + own) * selection.stride + pair;
  const auto two_inputs = [&](int chunk) {
    if (own >= count || chunk >= chunks) return 0u;
    return *reinterpret_cast<const unsigned*>(inputs + chunk * kDtVec);
  };
  const auto two_weights = [&](int unit, int chunk) {
    const int channel = first + unit * 8 + own;
    if (unit >= kUnits || channel >= channels || chunk >= chunks) return 0u;
    const std::int64_t at = static_cast<std::int64_t>(chunk) * channels + channel;
    return *reinterpret_cast<const unsigned*>(args.dt_weight + at * kDtVec + pair);
  };
  float sums[kTiles][4] = {};
#pragma unroll 2
  for (int chunk = 0; chunk < chunks; chunk += 2) {
    const unsigned x0 = two_inputs(chunk), x1 = two_inputs(chunk + 1);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const int unit = 2 * tile;
      const uint4 weights = {two_weights(unit, chunk), two_weights(unit + 1, chunk),
                             two_weights(unit, chunk + 1), two_weights(unit + 1, chunk + 1)};
      mma_bf16(sums[tile], weights, x0, x1);
    }
  }
  const int own_unit = value_of_group<kUnits>(Lanes::group());
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int from = Lanes::lane() % 8 * 4 + r / 2;
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
      const float found = __shfl_sync(kWholeWarp, sums[unit / 2][unit % 2 * 2 + r % 2], from);
      if (unit == 0 || unit == own_unit) dt[r] = found;
    }
  }
}

// Asks for the weights that project_dt() reads.
template <class Lanes>
__device__ __forceinline__ void prefetch_dt_weights(const SelectedArgs& args, const Lanes& lanes) {
  const int chunks = args.rank / kDtVec;
  const std::int64_t channels = args.step.layout.channels;
  // A line has a chunk of as many channels as a group of lanes.
  if (Lanes::lane() % Lanes::kWarpChannels || !lanes.owns()) return;
  const bf16* const weights = args.dt_weight + lanes.own() * kDtVec;
  constexpr int kTurns = kWarpLanes / Lanes::kWarpChannels;
  for (int at = Lanes::kOneUnit ? Lanes::group() : 0; at < chunks;
       at += Lanes::kOneUnit ? kTurns : 1) {
    prefetch_to_l2(weights + at * channels * kDtVec);
  }
}

// One over the root mean square of `size` numbers whose squares sum to `squares`.
__device__ __forceinline__ float one_over_rms(float squares, int size, float eps) {
  return rsqrtf(squares / static_cast<float>(size) + eps);
}
// Of the inputs of dt of a row; all lanes together.
__device__ __forceinline__ float dt_scale(const SelectedArgs& args, std::int64_t row) {
  const Stream& selection = args.step.dt;
  const bf16* const inputs = static_cast<const bf16*>(selection.data) + row * selection.stride;
  float squares = 0.0f;
  for (int at = threadIdx.x % kWarpLanes; at < args.rank / kDtVec; at += kWarpLanes) {
    Channels<bf16, kDtVec> in;
    in.load(inputs + at * kDtVec);
#pragma unroll
    for (int i = 0; i < kDtVec; ++i) squares = fmadd(in[i], in[i], squares);
  }
  return one_over_rms(sum_over_groups<1>(squares), args.rank, args.norm_eps);
}
// Divides a row's B or C, of which each lane has kStates numbers, by its root mean square.
template <int kWarpChannels, int kStates>
__device__ __forceinline__ void divide_by_rms(float (&x)[kStates], int states, float eps) {
  float squares = 0.0f;
#pragma unroll
  for (int n = 0; n < kStates; ++n) squares = fmadd(x[n], x[n], squares);
  const float scale = one_over_rms(sum_over_groups<kWarpChannels>(squares), states, eps);
#pragma unroll
  for (int n = 0; n < kStates; ++n) x[n] *= scale;
}

template <class State, int kUnits, int kRows, bool kNormed>
__global__ void __launch_bounds__(kThreads, 5)
    selected_step_kernel(const __grid_constant__ SelectedArgs args) {
  constexpr int kStates = 4, kLanes = 4;
  using Lanes = StepLanes<State, kStates, kLanes, kUnits, true>;
  const SelectiveArgs& step = args.step;
  const int first =
      static_cast<int>(thread_of_group() / kWarpLanes) * kUnits * Lanes::kWarpChannels;
  const std::int64_t row = row_group() * kRows;
  pdl_launch_dependents();
  if (first >= step.layout.channels || row >= step.layout.tokens) return wait_for_previous_kernel();
  const std::int64_t left = step.layout.tokens - row;
  const int count = left < kRows ? static_cast<int>(left) : kRows;

  // No kernel writes weights, so they are read before the previous kernel has ended. The states lie
  // where they will lie then, in all but a few cases.
  Lanes lanes(step, first);
  const int own = lanes.own();
  lanes.load_rates(step);
  float bias = 0.0f, skip = 0.0f;
  if (lanes.owns()) {
    bias = channel_number(step.dt_bias, own, bf16{});
    skip = channel_number(step.D, own, bf16{});
  }
  prefetch_dt_weights(args, lanes);
  for (int r = 0; r < count; ++r) lanes.prefetch(step, step.layout.slots[row + r]);
  wait_for_previous_kernel();
  StepInputs<bf16, kStates, kStates, false> next;
  next.load(step, row, own, lanes.owns(), Lanes::first_state());
  float dt[kRows];
  project_dt<Lanes, kUnits>(args, first, row, count, dt);
#pragma unroll 1
  for (int r = 0; r < count; ++r) {
    const auto in = next;
    lanes.load(step, in.slot);
    if (r + 1 < count) next.load(step, row + r + 1, own, lanes.owns(), Lanes::first_state());
    float b[kStates], c[kStates], own_dt = dt[0];
    in.numbers(b, c);
    if constexpr (kNormed) {
      own_dt *= dt_scale(args, row + r);
      divide_by_rms<Lanes::kWarpChannels>(b, kStates * kLanes, args.norm_eps);
      divide_by_rms<Lanes::kWarpChannels>(c, kStates * kLanes, args.norm_eps);
    }
    const float delta = softplus(own_dt + bias);
    float y = fmadd(skip, in.x[0], lanes.advance(decay_of(delta), delta * in.x[0], b, c));
    if (step.z.data) y *= silu(in.z[0]);
    if (lanes.writes()) write_output<bf16>(step, row + r, own, y, lanes.real());
#pragma unroll
    for (int i = 0; i + 1 < kRows; ++i) dt[i] = dt[i + 1];
  }
}

template <int kUnitsOfWarp, int kRowsOfThread>
struct SelectedShare {
  static constexpr int kUnits = kUnitsOfWarp, kRows = kRowsOfThread;
};
// Calls f with the numbers of units of a warp and of rows of a thread; all give the same bits.
template <class F>
inline void with_selected_share(const Layout& lay, const F& f) {
  if (lay.tokens < 4) return f(SelectedShare<1, 1>{});
  if (lay.tokens * lay.channels <= kFewStepThreads) return f(SelectedShare<1, 4>{});
  f(SelectedShare<4, 4>{});
}
template <class Share>
inline Grid selected_grid(const Layout& lay) {
  constexpr long long kRunChannels = Share::kUnits * 8;
  const long long threads = (lay.channels + kRunChannels - 1) / kRunChannels * kWarpLanes;
  return row_grid((lay.tokens + Share::kRows - 1) / Share::kRows, threads);
}

}  // namespace cuda
}  // namespace minserve
