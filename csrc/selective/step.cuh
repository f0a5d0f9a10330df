// One step of every row of a batch: the states are read once and written once.
//
// A warp takes kUnits neighbouring runs of channels, of which each lane has some states of one
// channel each, and all of these are on their way at once. What is there once for a channel (x,
// softplus, gate, y) belongs to one of its lanes. A thread goes through up to kMostRows rows with
// the same channels, so that A is read once for them.
#pragma once

#include "../core/row_grid.cuh"
#include "../core/vector_access.cuh"
#include "recurrence.cuh"

namespace minserve {
namespace cuda {

// kInVectors: B, C and states lie aligned for whole accesses, in rows that kStates divides.
template <class T, class State, int kStates, int kLanes, int kUnits, bool kInVectors>
__global__ void __launch_bounds__(kThreads, 6)
    selective_step_kernel(const __grid_constant__ SelectiveArgs args, const int rows) {
  constexpr int kWarpChannels = kWarpLanes / kLanes;
  constexpr int kVec = kInVectors ? kStates : 1;
  const Layout& lay = args.layout;
  const int lane = threadIdx.x % kWarpLanes, group = lane / kWarpChannels;
  const std::int64_t first = thread_of_group() / kWarpLanes * (kUnits * kWarpChannels);
  std::int64_t row = row_group() * rows;
  pdl_launch_dependents();
  wait_for_previous_kernel();
  if (first >= lay.channels || row >= lay.tokens) return;
  const std::int64_t last = row + rows < lay.tokens ? row + rows : lay.tokens;

  // Of unit u this lane has states of `channel` + u * kWarpChannels; of `own` it has the rest.
  const std::int64_t channel = first + lane % kWarpChannels;
  const std::int64_t own = channel + value_of_group<kUnits>(group) * kWarpChannels;
  const bool owns = own < lay.channels;
  const std::int64_t states = args.states - group * kStates;
  const std::int64_t place = channel * args.states + group * kStates;
  const std::int64_t unit = kWarpChannels * args.states;
  const auto states_of = [&](int u) {
    return channel + u * kWarpChannels < lay.channels ? states : 0;
  };
  float rate[kUnits][kStates];
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    load_states<kInVectors>(args.A + place + u * unit, states_of(u), rate[u]);
#pragma unroll
    for (int n = 0; n < kStates; ++n) rate[u][n] *= static_cast<float>(kLog2e);
  }
  float bias = 0.0f, skip = 0.0f;
  if (owns) {
    bias = channel_number(args.dt_bias, own, T{});
    skip = channel_number(args.D, own, T{});
  }
  const auto at = [&](const Stream& stream, std::int64_t element) {
    return static_cast<T*>(stream.data) + row * stream.stride + element;
  };
#pragma unroll 1
  for (; row < last; ++row) {
    // Layout::slot() in two halves, so that only the second waits.
    const std::int64_t slot = lay.slots[row];
    Channels<T, 1> x, dt, z;
    if (owns) {
      x.load(at(args.x, own));
      dt.load(at(args.dt, own));
      if (args.z.data) z.load(at(args.z, own));
    }
    Channels<T, kVec> b[kStates / kVec], c[kStates / kVec];
#pragma unroll
    for (int n = 0; n < kStates; n += kVec) {
      if (n >= states) continue;
      b[n / kVec].load(at(args.B, group * kStates + n));
      c[n / kVec].load(at(args.C, group * kStates + n));
    }
    const bool real = slot >= 0 && slot < lay.num_slots;
    State* const state =
        static_cast<State*>(args.state) + (real ? slot * args.slot_stride : 0) + place;
    float h[kUnits][kStates];
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      load_states<kInVectors>(state + u * unit, real ? states_of(u) : 0, h[u]);
    }
    // Padding is computed too and then dropped: were the inputs of no use to it, the compiler
    // would not read them before it knew.
    const float own_delta = softplus(dt[0] + bias), own_write = own_delta * x[0];
    float choice[kStates], sums[kUnits];
#pragma unroll
    for (int n = 0; n < kStates; ++n) choice[n] = c[n / kVec][n % kVec];
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      float delta = own_delta, write = own_write;
      if constexpr (kUnits > 1) {
        const int owner = value_of_group<kUnits>(u) * kWarpChannels + lane % kWarpChannels;
        delta = __shfl_sync(kWholeWarp, own_delta, owner);
        write = __shfl_sync(kWholeWarp, own_write, owner);
      }
#pragma unroll
      for (int n = 0; n < kStates; ++n) {
        h[u][n] = advance(h[u][n], delta, rate[u][n], write, b[n / kVec][n % kVec]);
      }
      sums[u] = sum_of_states(choice, h[u]);
      store_states<kInVectors>(state + u * unit, real ? states_of(u) : 0, h[u]);
    }
    float y = fmadd(skip, x[0], sum_over_lanes<kLanes>(sums));
    if (args.z.data) y *= silu(z[0]);
    if (owns && group < kUnits) {
      from_lane(at(args.y, own), real ? y : 0.0f);
    }
  }
}

template <class T, class State, int kStates>
inline bool steps_in_vectors(const SelectiveArgs& args) {
  return args.states % kStates == 0 && lie_aligned<T, kStates>(args.B.data, args.B.stride) &&
         lie_aligned<T, kStates>(args.C.data, args.C.stride) &&
         lie_aligned<float, kStates>(args.A) &&
         lie_aligned<State, kStates>(args.state, args.slot_stride);
}

// Up to so many threads all run at once, and what takes time is how much one of them has to do.
constexpr long long kFewStepThreads = 1 << 16;
// Beyond these a thread takes more rows.
constexpr long long kManyStepThreads = 1 << 18;
constexpr long long kMostRows = 4;

struct StepGrid {
  int rows;  // of a thread
  Grid grid;
};
template <int kLanes, int kUnits>
inline StepGrid step_grid(const Layout& lay) {
  constexpr long long kRunChannels = kUnits * (kWarpLanes / kLanes);
  const long long threads = (lay.channels + kRunChannels - 1) / kRunChannels * kWarpLanes;
  const long long rows = std::min(kMostRows, 1 + lay.tokens * threads / kManyStepThreads);
  return {static_cast<int>(rows), row_grid((lay.tokens + rows - 1) / rows, threads)};
}

// Calls f with the constants of selective_step_kernel behind its types; all give the same bits.
template <int kStatesOfThread, int kLanesOfChannel, int kUnitsOfWarp, bool kVectorAccess>
struct StepShare {
  static constexpr int kStates = kStatesOfThread, kLanes = kLanesOfChannel, kUnits = kUnitsOfWarp;
  static constexpr bool kInVectors = kVectorAccess;
};
template <class T, class State, class F>
inline void with_step_share(const SelectiveArgs& args, const F& f) {
  if (args.states > 64) return f(StepShare<8, 32, 1, false>{});
  if (args.states > 16) return f(StepShare<4, 16, 1, false>{});
  if (!steps_in_vectors<T, State, 4>(args)) return f(StepShare<4, 4, 1, false>{});
  if (args.layout.tokens * args.layout.channels * 4 <= kFewStepThreads) {
    return f(StepShare<4, 4, 1, true>{});
  }
  f(StepShare<4, 4, 4, true>{});
}

}  // namespace cuda
}  // namespace minserve
