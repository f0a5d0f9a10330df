// Mamba-2's recurrence token by token: rows of a head's state in registers of a warp.
//
// A step is one token, whose states are read once and written once. A scan token by token is what
// inputs have that chunk kernels do not take. Both form every number in the same way, whatever the
// number of rows, lanes or states per access, so their bits are the same.
#pragma once

#include "../core/row_grid.cuh"
#include "../selective/recurrence.cuh"
#include "args.h"

namespace minserve {
namespace cuda {

__device__ __forceinline__ float head_number(const HeadVector& v, std::int64_t head, float) {
  return static_cast<const float*>(v.data)[head];
}
template <class T>
__device__ __forceinline__ float head_number(const HeadVector& v, std::int64_t head, T) {
  return v.is_float ? static_cast<const float*>(v.data)[head]
                    : to_lane(static_cast<const T*>(v.data)[head]);
}
// dt behind bias, softplus and limits; NaN stays NaN.
__device__ __forceinline__ float time_step(const SsdArgs& args, float dt, float bias) {
  return minimum(maximum(softplus(dt + bias), args.least_dt), args.most_dt);
}

// A warp's share of a head: 32 / kLanes groups of kRows rows, and of each row of states a lane has
// kParts runs of kVec neighbours. kWhole: there are as many states as lanes have, and B, C and
// states lie aligned for whole accesses.
template <int kStatesOfAccess, int kAccesses, int kLanesOfRow, int kRowsOfLane, bool kWholeAccesses>
struct RowShare {
  static constexpr int kVec = kStatesOfAccess, kParts = kAccesses, kLanes = kLanesOfRow;
  static constexpr int kRows = kRowsOfLane, kStates = kVec * kParts;
  static constexpr int kWarpRows = kRows * (kWarpLanes / kLanes);
  static constexpr bool kWhole = kWholeAccesses;
  // Tokens of a scan whose inputs are requested at once. Where lanes have many rows there are
  // other warps to wait for theirs.
  static constexpr int kTogether = kRows >= 8 || kStates > 8 ? 1 : kStates > 4 ? 2 : 4;
  static_assert(!kWhole || kParts == 1);
  static_assert(kRows <= kLanes, "a lane writes the output of at most one row");
};

// Of one sum for each of kRows rows over a lane's own states, that over all lanes of the row with
// index value_of_group<kRows>(lane of the row): a tree over neighbouring lanes.
template <int kLanes, int kRows>
__device__ __forceinline__ float sum_over_row(float (&values)[kRows]) {
  int distance = 1;
#pragma unroll
  for (int half = kRows / 2; half > 0; half /= 2) {
    const bool upper = threadIdx.x & distance;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float kept = upper ? values[i + half] : values[i];
      const float given = upper ? values[i] : values[i + half];
      values[i] = kept + __shfl_xor_sync(kWholeWarp, given, distance);
    }
    distance *= 2;
  }
#pragma unroll
  for (; distance < kLanes; distance *= 2) {
    values[0] += __shfl_xor_sync(kWholeWarp, values[0], distance);
  }
  return values[0];
}

template <class T, class State, class Share>
class HeadRows {
 public:
  // The head's rows from `first` on.
  __device__ __forceinline__ HeadRows(const SsdArgs& args, int head, int first)
      : args_(args),
        head_(head),
        group_(head / static_cast<int>(args.heads / args.groups)),
        first_(first + lane() / kLanes * kRows),
        states_(static_cast<int>(args.states)),
        head_dim_(static_cast<int>(args.head_dim)),
        rate_(args.A[head]),
        bias_(head_number(args.dt_bias, head, T{})),
        skip_(head_number(args.D, head, T{})) {}

  // What the rows read of a token.
  struct Inputs {
    float x, dt, b[Share::kStates], c[Share::kStates];
  };
  __device__ __forceinline__ Inputs read(std::int64_t row) const {
    Inputs in;
    const auto at = [&](const Stream& stream, std::int64_t element) {
      return static_cast<const T*>(stream.data) + row * stream.stride + element;
    };
    in.x = own() < head_dim_
               ? to_lane(*at(args_.x, static_cast<std::int64_t>(head_) * head_dim_ + own()))
               : 0.0f;
    in.dt = to_lane(*at(args_.dt, head_));
    load_parts(at(args_.B, static_cast<std::int64_t>(group_) * states_), states_, in.b);
    load_parts(at(args_.C, static_cast<std::int64_t>(group_) * states_), states_, in.c);
    return in;
  }

  __device__ __forceinline__ void load(std::int64_t slot) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      load_parts(state_row(slot, r), first_ + r < head_dim_ ? states_ : 0, h_[r]);
    }
  }
  __device__ __forceinline__ void store(std::int64_t slot) const {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int count = first_ + r < head_dim_ ? states_ : 0;
#pragma unroll
      for (int part = 0; part < Share::kParts; ++part) {
        float own[kVec];
#pragma unroll
        for (int v = 0; v < kVec; ++v) own[v] = h_[r][part * kVec + v];
        store_states<Share::kWhole>(state_row(slot, r) + place(part), count - place(part), own);
      }
    }
  }

  // Reads a token; the output of the lane's own row.
  __device__ __forceinline__ float advance(const Inputs& in) {
    const float delta = time_step(args_, in.dt, bias_);
    const float kept = exp2_of(decay_of(delta) * rate_), added = delta * in.x;
    float sums[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float write =
          __shfl_sync(kWholeWarp, added, lane() / kLanes * kLanes + value_of_group<kRows>(r));
#pragma unroll
      for (int n = 0; n < Share::kStates; ++n) h_[r][n] = fmadd(kept, h_[r][n], write * in.b[n]);
      sums[r] = sum_of_parts(in.c, h_[r]);
    }
    return fmadd(skip_, in.x, sum_over_row<kLanes>(sums));
  }
  __device__ __forceinline__ void write(std::int64_t row, float y) const {
    if (lane() % kLanes >= kRows || own() >= head_dim_) return;
    from_lane(static_cast<T*>(args_.y.data) + row * args_.y.stride +
                  static_cast<std::int64_t>(head_) * head_dim_ + own(),
              y);
  }

 private:
  static constexpr int kVec = Share::kVec, kLanes = Share::kLanes, kRows = Share::kRows;
  __device__ __forceinline__ static int lane() { return threadIdx.x % kWarpLanes; }
  __device__ __forceinline__ int own() const {
    return first_ + value_of_group<kRows>(lane() % kLanes % kRows);
  }
  __device__ __forceinline__ static int place(int part) {
    return (part * kLanes + lane() % kLanes) * kVec;
  }
  __device__ __forceinline__ State* state_row(std::int64_t slot, int r) const {
    return static_cast<State*>(args_.state) + slot * args_.slot_stride +
           (static_cast<std::int64_t>(head_) * head_dim_ + first_ + r) * states_;
  }
  __device__ __forceinline__ static float sum_of_parts(const float (&c)[Share::kStates],
                                                       const float (&h)[Share::kStates]) {
    float sum = 0.0f;
#pragma unroll
    for (int part = 0; part < Share::kParts; ++part) {
      float of_c[kVec], of_h[kVec];
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
        of_c[v] = c[part * kVec + v], of_h[v] = h[part * kVec + v];
      }
      const float own = sum_of_states(of_c, of_h);
      sum = part == 0 ? own : sum + own;
    }
    return sum;
  }
  template <class U>
  __device__ __forceinline__ static void load_parts(const U* from, int count,
                                                    float (&to)[Share::kStates]) {
#pragma unroll
    for (int part = 0; part < Share::kParts; ++part) {
      float own[kVec];
      load_states<Share::kWhole>(from + place(part), count - place(part), own);
#pragma unroll
      for (int v = 0; v < kVec; ++v) to[part * kVec + v] = own[v];
    }
  }

  const SsdArgs& args_;
  const int head_, group_, first_, states_, head_dim_;
  const float rate_, bias_, skip_;
  float h_[kRows][Share::kStates];
};

// Reads rows [begin, end) of a sequence; kTogether tokens' inputs are on their way while the tokens
// before are computed.
template <int kTogether, class Rows>
__device__ __forceinline__ void read_tokens(Rows& rows, std::int64_t begin, std::int64_t end) {
  typename Rows::Inputs next[kTogether];
  const auto read = [&](std::int64_t first) {
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      next[i] = rows.read(first + i < end ? first + i : end - 1);
    }
  };
  read(begin);
#pragma unroll 1
  for (std::int64_t row = begin; row < end; row += kTogether) {
    typename Rows::Inputs now[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) now[i] = next[i];
    if (row + kTogether < end) read(row + kTogether);
    if (row + kTogether <= end) {
#pragma unroll
      for (int i = 0; i < kTogether; ++i) rows.write(row + i, rows.advance(now[i]));
    } else {
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        if (row + i < end) rows.write(row + i, rows.advance(now[i]));
      }
    }
  }
}

// A sequence is one row of a step, or what cu_seqlens says; behind the last is the padding tail.
template <class T, class State, class Share, bool kSteps>
__global__ void __launch_bounds__(kThreads) ssd_rows_kernel(const __grid_constant__ SsdArgs args) {
  const Layout& lay = args.layout;
  const int runs = (static_cast<int>(args.head_dim) + Share::kWarpRows - 1) / Share::kWarpRows;
  const int run = static_cast<int>(thread_of_group() / kWarpLanes);
  const std::int64_t s = row_group();
  pdl_launch_dependents();
  wait_for_previous_kernel();
  if (run >= runs * args.heads || s > lay.sequences) return;
  HeadRows<T, State, Share> rows(args, run / runs, run % runs * Share::kWarpRows);
  if constexpr (kSteps) {
    if (s == lay.sequences) return;
    const auto in = rows.read(s);
    const std::int64_t slot = lay.slot(s);
    if (slot < 0) return rows.write(s, 0.0f);
    rows.load(slot);
    const float y = rows.advance(in);
    rows.store(slot);
    rows.write(s, y);
  } else {
    const std::int64_t begin = lay.begin(s), end = lay.end(s), slot = lay.slot(s);
    if (begin >= end) return;
    if (slot < 0) {
      for (std::int64_t row = begin; row < end; ++row) rows.write(row, 0.0f);
      return;
    }
    rows.load(slot);
    read_tokens<Share::kTogether>(rows, begin, end);
    rows.store(slot);
  }
}

template <class Share>
inline Grid rows_grid(const SsdArgs& args, bool steps) {
  const long long runs = divided_up(args.head_dim, Share::kWarpRows);
  return row_grid(args.layout.sequences + (steps ? 0 : 1), args.heads * runs * kWarpLanes);
}

// Up to so many rows of states, threads take fewer of them each.
constexpr long long kFewRows = 8192;

// Shares whose accesses are 16 bytes of states.
template <class State, int kStates, int kRows>
using WholeShare = RowShare<16 / static_cast<int>(sizeof(State)), 1,
                            kStates* static_cast<int>(sizeof(State)) / 16, kRows, true>;

// Whether B, C and states lie aligned for 16 bytes of states at a time.
template <class T, class State>
inline bool rows_are_whole(const SsdArgs& args) {
  constexpr int kVec = 16 / static_cast<int>(sizeof(State));
  return lie_aligned<T, kVec>(args.B.data, args.B.stride) &&
         lie_aligned<T, kVec>(args.C.data, args.C.stride) &&
         lie_aligned<State, kVec>(args.state, args.slot_stride);
}

// Calls f with the share for these arguments; all give the same bits.
template <class T, class State, class F>
inline void with_row_share(const SsdArgs& args, const F& f) {
  if ((args.states == 64 || args.states == 128) && rows_are_whole<T, State>(args)) {
    const bool few = args.layout.sequences * args.layout.channels <= kFewRows;
    if (args.states == 64) {
      if (few) return f(WholeShare<State, 64, 2>{});
      return f(WholeShare<State, 64, 8>{});
    }
    if (few) return f(WholeShare<State, 128, 2>{});
    return f(WholeShare<State, 128, 8>{});
  }
  if (args.states <= 128) return f(RowShare<4, 1, 32, 4, false>{});
  f(RowShare<4, 8, 32, 1, false>{});
}

}  // namespace cuda
}  // namespace minserve
