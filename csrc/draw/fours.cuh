// How a block reads a row of logits as quickly as memory gives it: each warp its run of
// neighbouring tokens, some fours of a lane ahead of the one that is looked at.
#pragma once

#include "../common/row.cuh"

namespace minserve {
namespace cuda {

constexpr unsigned kFoursAhead = 4;  // of each lane
constexpr unsigned kStepTokens = kFoursAhead * kStride;

// Calls visit(logits of four neighbours, id of the first) for this thread's; a warp's lanes
// together. Past the end there are some that weigh nothing. What comes next is on its way
// meanwhile. Before that, begin(the first of them), where they are on their way. kLast:
// mostly nobody reads all of them once more, so the caches had better keep others.
template <bool kLast, class Begin, class Visit>
__device__ __forceinline__ void each_four(const Row& row, Begin begin, Visit visit) {
  const unsigned warp = threadIdx.x / kWarp, end = row.last(warp);
  unsigned from = row.first(warp), at = from + threadIdx.x % kWarp * kTogether;
  float4 x[kFoursAhead];
  const auto load = [&](unsigned a, unsigned id) { x[a] = row.four(id < end ? id : row.vocab); };
  // Where a whole step is within the run, nobody looks where that ends.
  bool is_whole = row.aligned && from + kStepTokens <= end;
  const float4* next = reinterpret_cast<const float4*>(row.logits + at);
  const auto load_next = [&](unsigned a) {
    x[a] = kLast ? __ldcs(next + a * kWarp) : next[a * kWarp];
  };
  if (is_whole) {
#pragma unroll
    for (unsigned a = 0; a < kFoursAhead; ++a) load_next(a);
  } else {
#pragma unroll
    for (unsigned a = 0; a < kFoursAhead; ++a) load(a, at + a * kStride);
  }
  begin(x);
  const auto visit_then = [&](auto load_four) {
#pragma unroll
    for (unsigned a = 0; a < kFoursAhead; ++a) {
      const float logits[] = {x[a].x, x[a].y, x[a].z, x[a].w};
      visit(logits, at + a * kStride);
      load_four(a);
    }
    from += kStepTokens, at += kStepTokens;
  };
  const bool begun = is_whole;
#pragma unroll 1
  while (is_whole) {
    is_whole = from + 2 * kStepTokens <= end;
    next += kFoursAhead * kWarp;
    visit_then([&](unsigned a) {
      if (is_whole) load_next(a);
    });
  }
  if (begun && from < end) {
#pragma unroll
    for (unsigned a = 0; a < kFoursAhead; ++a) load(a, at + a * kStride);
  }
#pragma unroll 1
  while (from < end) {
    const bool more = from + kStepTokens < end;
    visit_then([&](unsigned a) {
      if (more) load(a, at + kStepTokens + a * kStride);
    });
  }
}

}  // namespace cuda
}  // namespace minserve
