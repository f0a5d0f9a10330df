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

// What a lane reads of a row besides states: x, dt and z of its own channel, B and C of its states.
template <class T, int kStates, int kVec>
struct StepInputs {
  std::int64_t slot;
  Channels<T, 1> x, dt, z;
  Channels<T, kVec> b[kStates / kVec], c[kStates / kVec];

  __device__ __forceinline__ void load(const SelectiveArgs& args, std::int64_t row, int own,
                                       bool owns, int first_state) {
    const auto at = [&](const Stream& stream, int element) {
      return static_cast<const T*>(stream.data) + row * stream.stride + element;
    };
    slot = args.layout.slots[row];
    if (owns) {
      x.load(at(args.x, own));
      dt.load(at(args.dt, own));
      if (args.z.data) z.load(at(args.z, own));
    }
#pragma unroll
    for (int n = 0; n < kStates; n += kVec) {
      if (first_state + n >= args.states) continue;
      b[n / kVec].load(at(args.B, first_state + n));
      c[n / kVec].load(at(args.C, first_state + n));
    }
  }
};

// kWhole: all lanes have all their states, and B, C, A and the states lie aligned for whole
// accesses.
template <class T, class State, int kStates, int kLanes, int kUnits, bool kWhole>
__global__ void __launch_bounds__(kThreads, 6)
    selective_step_kernel(const __grid_constant__ SelectiveArgs args, const int rows) {
  constexpr int kWarpChannels = kWarpLanes / kLanes;
  using Inputs = StepInputs<T, kStates, kWhole ? kStates : 1>;
  const Layout& lay = args.layout;
  const std::int64_t states = kWhole ? kStates * kLanes : args.states;
  const int channels = static_cast<int>(lay.channels);
  const int lane = threadIdx.x % kWarpLanes, group = lane / kWarpChannels;
  const int first = static_cast<int>(thread_of_group() / kWarpLanes) * (kUnits * kWarpChannels);
  std::int64_t row = row_group() * rows;
  pdl_launch_dependents();
  wait_for_previous_kernel();
  if (first >= channels || row >= lay.tokens) return;
  const std::int64_t last = row + rows < lay.tokens ? row + rows : lay.tokens;

  // Of unit u this lane has states of `channel` + u * kWarpChannels; of `own` it has the rest.
  const int channel = first + lane % kWarpChannels;
  const int own = channel + value_of_group<kUnits>(group) * kWarpChannels;
  const bool owns = own < channels;
  const std::int64_t place = channel * states + group * kStates;
  const auto states_of = [&](int u) {
    return channel + u * kWarpChannels < channels ? states - group * kStates : 0;
  };
  // A row's inputs are on their way while the row before is computed.
  Inputs next;
  next.load(args, row, own, owns, group * kStates);
  float a[kUnits][kStates];
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    load_states<kWhole>(args.A + place + u * kWarpChannels * states, states_of(u), a[u]);
  }
  float bias = 0.0f, skip = 0.0f;
  if (owns) {
    bias = channel_number(args.dt_bias, own, T{});
    skip = channel_number(args.D, own, T{});
  }
#pragma unroll 1
  for (; row < last; ++row) {
    const Inputs in = next;
    const bool real = in.slot >= 0 && in.slot < lay.num_slots;
    State* const state =
        static_cast<State*>(args.state) + (real ? in.slot * args.slot_stride : 0) + place;
    float h[kUnits][kStates];
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      load_states<kWhole>(state + u * kWarpChannels * states, real ? states_of(u) : 0, h[u]);
    }
    if (row + 1 < last) next.load(args, row + 1, own, owns, group * kStates);
    // Padding is computed too and then dropped: were the inputs of no use to it, the compiler
    // would not read them before it knew.
    const float delta = softplus(in.dt[0] + bias);
    const float own_decay = decay_of(delta), own_write = delta * in.x[0];
    const auto number = [](const auto& numbers, int n) {
      return numbers[kWhole ? 0 : n][kWhole ? n : 0];
    };
    float c[kStates], sums[kUnits];
#pragma unroll
    for (int n = 0; n < kStates; ++n) c[n] = number(in.c, n);
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      float decay = own_decay, write = own_write;
      if constexpr (kUnits > 1) {
        const int owner = value_of_group<kUnits>(u) * kWarpChannels + lane % kWarpChannels;
        decay = __shfl_sync(kWholeWarp, own_decay, owner);
        write = __shfl_sync(kWholeWarp, own_write, owner);
      }
#pragma unroll
      for (int n = 0; n < kStates; ++n) {
        h[u][n] = advance(h[u][n], decay, a[u][n], write, number(in.b, n));
      }
      sums[u] = sum_of_states(c, h[u]);
    }
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      store_states<kWhole>(state + u * kWarpChannels * states, real ? states_of(u) : 0, h[u]);
    }
    float y = fmadd(skip, in.x[0], sum_over_lanes<kLanes>(sums));
    if (args.z.data) y *= silu(in.z[0]);
    if (owns && group < kUnits) {
      from_lane(static_cast<T*>(args.y.data) + row * args.y.stride + own, real ? y : 0.0f);
    }
  }
}

template <class T, class State, int kStates, int kLanes>
inline bool steps_are_whole(const SelectiveArgs& args) {
  return args.states == kStates * kLanes && lie_aligned<T, kStates>(args.B.data, args.B.stride) &&
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
template <int kStatesOfThread, int kLanesOfChannel, int kUnitsOfWarp, bool kWholeAccesses>
struct StepShare {
  static constexpr int kStates = kStatesOfThread, kLanes = kLanesOfChannel, kUnits = kUnitsOfWarp;
  static constexpr bool kWhole = kWholeAccesses;
};
template <class T, class State, class F>
inline void with_step_share(const SelectiveArgs& args, const F& f) {
  if (args.states > 64) return f(StepShare<8, 32, 1, false>{});
  if (args.states > 16) return f(StepShare<4, 16, 1, false>{});
  if (!steps_are_whole<T, State, 4, 4>(args)) return f(StepShare<4, 4, 1, false>{});
  if (args.layout.tokens * args.layout.channels * 4 <= kFewStepThreads) {
    return f(StepShare<4, 4, 1, true>{});
  }
  f(StepShare<4, 4, 4, true>{});
}

}  // namespace cuda
}  // namespace minserve
