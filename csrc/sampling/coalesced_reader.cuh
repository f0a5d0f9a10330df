// How a block reads a row of logits as quickly as memory gives it: each warp its run of
// neighbouring tokens, some fours of a lane ahead of the one that is looked at.
#pragma once

#include "../core/reduce/row_reader.cuh"

namespace minserve {
namespace cuda {

constexpr unsigned kLoadsAhead = 4;  // of each lane
constexpr unsigned kStepTokens = kLoadsAhead * kStride;

// Calls visit(logits of four neighbours, id of the first) for this thread's; a warp's lanes
// together. Past the end there are some that weigh nothing. What comes next is on its way
// meanwhile. Before that, begin(the first of them), where they are on their way. kAgain: of a row
// that was read before, whole steps from the last to the first, since caches have what was read
// last; they had better keep others then, since mostly nobody reads all of it once more.
template <bool kAgain, class Begin, class Visit>
__device__ __forceinline__ void read_coalesced(const Row& row, Begin begin, Visit visit) {
  const unsigned warp = threadIdx.x / kWarp, end = row.last(warp);
  const unsigned lane_first = threadIdx.x % kWarp * kTogether;
  unsigned from = row.first(warp);  // of the step that is looked at
  // Where a whole step is within the run, nobody looks where that ends.
  unsigned whole = row.aligned ? (end - from) / kStepTokens : 0;
  const unsigned rest = from + whole * kStepTokens;
  if (kAgain && whole > 0) from = rest - kStepTokens;
  float4 x[kLoadsAhead];
  const auto load = [&](unsigned a, unsigned first) {
    const unsigned id = first + lane_first + a * kStride;
    x[a] = row.four(id < end ? id : row.vocab);
  };
  const float4* next = reinterpret_cast<const float4*>(row.logits + from + lane_first);
  const auto load_next = [&](unsigned a) {
    x[a] = kAgain ? __ldcs(next + a * kWarp) : next[a * kWarp];
  };
  const bool begun = whole > 0;
  if (begun) {
#pragma unroll
    for (unsigned a = 0; a < kLoadsAhead; ++a) load_next(a);
  } else {
#pragma unroll
    for (unsigned a = 0; a < kLoadsAhead; ++a) load(a, from);
  }
  begin(x);
  const auto visit_then = [&](auto load_four) {
#pragma unroll
    for (unsigned a = 0; a < kLoadsAhead; ++a) {
      const float logits[] = {x[a].x, x[a].y, x[a].z, x[a].w};
      visit(logits, from + lane_first + a * kStride);
      load_four(a);
    }
  };
#pragma unroll 1
  while (whole > 0) {
    --whole;
    if (kAgain) next -= kLoadsAhead * kWarp;
    if (!kAgain) next += kLoadsAhead * kWarp;
    visit_then([&](unsigned a) {
      if (whole > 0) load_next(a);
    });
    if (kAgain) from -= kStepTokens;
    if (!kAgain) from += kStepTokens;
  }
  from = rest;
  if (begun && from < end) {
#pragma unroll
    for (unsigned a = 0; a < kLoadsAhead; ++a) load(a, from);
  }
#pragma unroll 1
  while (from < end) {
    const bool more = from + kStepTokens < end;
    visit_then([&](unsigned a) {
      if (more) load(a, from + kStepTokens);
    });
    from += kStepTokens;
  }
}

}  // namespace cuda
}  // namespace minserve
