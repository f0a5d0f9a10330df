// One step of every row of a batch: the states are read once and written once.
//
// A warp takes kUnits neighbouring runs of channels, of which each lane has some states of one
// channel each, and all of these are on their way at once. What is there once for a channel (x,
// softplus, gate, y) belongs to one of its lanes. A thread goes through up to kMostRows rows with
// the same channels, so that A is read once for them.
#pragma once

#include <algorithm>

#include "../arch/prefetch.cuh"
#include "../core/row_grid.cuh"
#include "../core/vector_access.cuh"
#include "recurrence.cuh"

namespace minserve {
namespace cuda {

// What the lanes of a warp have of the states of a row, from channel `first` on. kWhole: all lanes
// have all their states, and A and the states lie aligned for whole accesses.
template <class State, int kStates, int kLanes, int kUnits, bool kWhole>
class StepLanes {
 public:
  static constexpr int kWarpChannels = kWarpLanes / kLanes;
  static constexpr bool kOneUnit = kUnits == 1;

  __device__ __forceinline__ StepLanes(const SelectiveArgs& args, int first)
      : channels_(static_cast<int>(args.layout.channels)),
        states_(kWhole ? kStates * kLanes : args.states),
        channel_(first + lane() % kWarpChannels),
        place_(channel_ * states_ + group() * kStates) {}

  __device__ __forceinline__ static int lane() { return threadIdx.x % kWarpLanes; }
  __device__ __forceinline__ static int group() { return lane() / kWarpChannels; }
  __device__ __forceinline__ static int first_state() { return group() * kStates; }
  // Of unit u a lane has states of channel_ + u * kWarpChannels; of own() it has the rest.
  __device__ __forceinline__ int own() const {
    return channel_ + value_of_group<kUnits>(group()) * kWarpChannels;
  }
  __device__ __forceinline__ bool owns() const { return own() < channels_; }
  // Where units are fewer than groups, several lanes have the same channel for their own.
  __device__ __forceinline__ bool writes() const { return owns() && group() < kUnits; }

  __device__ __forceinline__ void load_rates(const SelectiveArgs& args) {
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      load_states<kWhole>(args.A + place_of(u), states_of(u), a_[u]);
    }
  }
  // Asks for a row's states early. The row may become another's, or padding, before it is loaded.
  __device__ __forceinline__ void prefetch(const SelectiveArgs& args, std::int64_t slot) const {
    constexpr int kLineChannels = 128 / (kStates * kLanes * static_cast<int>(sizeof(float)));
    if (group() > 0 || lane() % (kLineChannels > 1 ? kLineChannels : 1)) return;
    if (slot < 0 || slot >= args.layout.num_slots) return;
    const State* const row = static_cast<const State*>(args.state) + slot * args.slot_stride;
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      if (states_of(u) > 0) prefetch_to_l2(row + place_of(u));
    }
  }
  // The states of a row; of one that is padding zeros, which are not stored.
  __device__ __forceinline__ void load(const SelectiveArgs& args, std::int64_t slot) {
    real_ = slot >= 0 && slot < args.layout.num_slots;
    row_ = static_cast<State*>(args.state) + (real_ ? slot * args.slot_stride : 0);
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      load_states<kWhole>(row_ + place_of(u), real_ ? states_of(u) : 0, h_[u]);
    }
  }
  __device__ __forceinline__ bool real() const { return real_; }

  // The step, from what each lane knows of its own channel and of its states; C h of its own
  // channel. Padding is computed too and then dropped: were the inputs of no use to it, the
  // compiler would not read them before it knew.
  __device__ __forceinline__ float advance(float own_decay, float own_write,
                                           const float (&b)[kStates], const float (&c)[kStates]) {
    float sums[kUnits];
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      float decay = own_decay, write = own_write;
      if constexpr (kUnits > 1) {
        const int owner = value_of_group<kUnits>(u) * kWarpChannels + lane() % kWarpChannels;
        decay = __shfl_sync(kWholeWarp, own_decay, owner);
        write = __shfl_sync(kWholeWarp, own_write, owner);
      }
#pragma unroll
      for (int n = 0; n < kStates; ++n) {
        h_[u][n] = cuda::advance(h_[u][n], decay, a_[u][n], write, b[n]);
      }
      sums[u] = sum_of_states(c, h_[u]);
    }
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      store_states<kWhole>(row_ + place_of(u), real_ ? states_of(u) : 0, h_[u]);
    }
    return sum_over_lanes<kLanes>(sums);
  }

 private:
  __device__ __forceinline__ std::int64_t states_of(int u) const {
    return channel_ + u * kWarpChannels < channels_ ? states_ - group() * kStates : 0;
  }
  __device__ __forceinline__ std::int64_t place_of(int u) const {
    return place_ + u * kWarpChannels * states_;
  }

  const int channels_;
  const std::int64_t states_;  // of a channel
  const int channel_;
  const std::int64_t place_;
  State* row_;
  bool real_;
  float a_[kUnits][kStates], h_[kUnits][kStates];
};

// What a lane reads of a row besides states: x, dt (kHasDt) and z of its own channel, B and C of
// its states.
template <class T, int kStates, int kVec, bool kHasDt>
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
      if (kHasDt) dt.load(at(args.dt, own));
      if (args.z.data) z.load(at(args.z, own));
    }
#pragma unroll
    for (int n = 0; n < kStates; n += kVec) {
      if (first_state + n >= args.states) continue;
      b[n / kVec].load(at(args.B, first_state + n));
      c[n / kVec].load(at(args.C, first_state + n));
    }
  }
  __device__ __forceinline__ void numbers(float (&of_b)[kStates], float (&of_c)[kStates]) const {
#pragma unroll
    for (int n = 0; n < kStates; ++n) {
      of_b[n] = b[n / kVec][n % kVec], of_c[n] = c[n / kVec][n % kVec];
    }
  }
};

// The row's output, of the lanes that write it.
template <class T>
__device__ __forceinline__ void write_output(const SelectiveArgs& args, std::int64_t row, int own,
                                             float y, bool real) {
  from_lane(static_cast<T*>(args.y.data) + row * args.y.stride + own, real ? y : 0.0f);
}

// kWhole: B and C lie aligned for whole accesses, too.
template <class T, class State, int kStates, int kLanes, int kUnits, bool kWhole>
__global__ void __launch_bounds__(kThreads, 6)
    selective_step_kernel(const __grid_constant__ SelectiveArgs args, const int rows) {
  using Lanes = StepLanes<State, kStates, kLanes, kUnits, kWhole>;
  const Layout& lay = args.layout;
  const int first =
      static_cast<int>(thread_of_group() / kWarpLanes) * kUnits * Lanes::kWarpChannels;
  std::int64_t row = row_group() * rows;
  pdl_launch_dependents();
  wait_for_previous_kernel();
  if (first >= lay.channels || row >= lay.tokens) return;
  const std::int64_t last = row + rows < lay.tokens ? row + rows : lay.tokens;

  Lanes lanes(args, first);
  const int own = lanes.own();
  // A row's inputs are on their way while the row before is computed.
  StepInputs<T, kStates, kWhole ? kStates : 1, true> next;
  next.load(args, row, own, lanes.owns(), Lanes::first_state());
  lanes.load_rates(args);
  float bias = 0.0f, skip = 0.0f;
  if (lanes.owns()) {
    bias = channel_number(args.dt_bias, own, T{});
    skip = channel_number(args.D, own, T{});
  }
#pragma unroll 1
  for (; row < last; ++row) {
    const auto in = next;
    lanes.load(args, in.slot);
    if (row + 1 < last) next.load(args, row + 1, own, lanes.owns(), Lanes::first_state());
    const float delta = softplus(in.dt[0] + bias);
    float b[kStates], c[kStates];
    in.numbers(b, c);
    float y = fmadd(skip, in.x[0], lanes.advance(decay_of(delta), delta * in.x[0], b, c));
    if (args.z.data) y *= silu(in.z[0]);
    if (lanes.writes()) write_output<T>(args, row, own, y, lanes.real());
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

// The constants of selective_step_kernel behind its types.
template <int kStatesOfThread, int kLanesOfChannel, int kUnitsOfWarp, bool kWholeAccesses>
struct StepShare {
  static constexpr int kStates = kStatesOfThread, kLanes = kLanesOfChannel, kUnits = kUnitsOfWarp;
  static constexpr bool kWhole = kWholeAccesses;
};
// Calls f with those for these arguments; all give the same bits.
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
