// One block writes the report of one row, reading the row once, and once more for several best.
//
// Each thread keeps the best of its logits and the sum of exp(logit - best), brought to a new best
// where one comes up; the threads' pairs are combined in a fixed order.
#pragma once

#include "../common/row.cuh"
#include "best_so_far.cuh"
#include "ranks.cuh"
#include "target_logprobs.h"

namespace minserve {
namespace cuda {

// The sum of exp(logit - best) over some tokens; best is -infinity and the sum 0 where there is no
// possible one. A NaN becomes the best and stays it.
struct ExpSum {
  float best = kImpossible;
  float sum = 0.0f;

  __device__ __forceinline__ void raise(float to) {
    const float before = best;
    best = max_or_nan(best, to);
    if (best != before) sum *= expf(before - best);
  }
  __device__ __forceinline__ void add(const float4& x) {
    raise(max_or_nan(max_or_nan(x.x, x.y), max_or_nan(x.z, x.w)));
    if (best == kImpossible) return;
    sum += (expf(x.x - best) + expf(x.y - best)) + (expf(x.z - best) + expf(x.w - best));
  }

  // In one register pair, which is what threads exchange.
  __device__ std::uint64_t packed() const {
    return static_cast<std::uint64_t>(__float_as_uint(best)) << 32 | __float_as_uint(sum);
  }
  __device__ static ExpSum unpacked(std::uint64_t bits) {
    ExpSum sum;
    sum.best = __uint_as_float(static_cast<unsigned>(bits >> 32));
    sum.sum = __uint_as_float(static_cast<unsigned>(bits));
    return sum;
  }
};
struct Combine {
  __device__ std::uint64_t operator()(std::uint64_t x_bits, std::uint64_t y_bits) const {
    ExpSum x = ExpSum::unpacked(x_bits), y = ExpSum::unpacked(y_bits);
    x.raise(y.best);
    y.raise(x.best);
    x.sum += y.sum;
    return x.packed();
  }
};

__device__ __forceinline__ std::int32_t bits_of(float x) {
  return static_cast<std::int32_t>(__float_as_uint(x));
}

struct TargetShared {
  static constexpr int kMostThreads = 256;
  Block::Shared block;
  RanksShared<kMostThreads> ranks;
};

__global__ void __launch_bounds__(TargetShared::kMostThreads)
    target_kernel(const __grid_constant__ TargetArgs args) {
  extern __shared__ uint4 memory[];
  const std::int64_t r = blockIdx.x;
  let_next_kernel_start();
  wait_for_previous_kernel();
  const Asked asked(args, r);
  if (!asked.report) return;
  const float* const logits = args.logits + r * args.row_stride;
  const bool exists = asked.target >= 0 && asked.target < args.vocab;
  const float chosen = exists ? logits[asked.target] : kImpossible;
  const Row row = {logits, static_cast<unsigned>(args.vocab), Row::is_aligned(logits)};
  ExpSum mine;
  BestSoFar best_of_mine;
  row.each<4>([&](unsigned id, const float4& x) {
    mine.add(x);
    best_of_mine.add(x, id);
  });
  TargetShared& shared = *reinterpret_cast<TargetShared*>(memory);
  Block block(shared.block);
  const ExpSum all = ExpSum::unpacked(block.all(mine.packed(), ExpSum().packed(), Combine()));
  const BestKey best{block.all(best_of_mine.key(), std::uint64_t{0}, greater)};
  const bool finite = best.is_finite();
  const float log_sum = logf(all.sum);
  if (threadIdx.x == 0) {
    const bool known = finite && exists;
    const float logprob = known ? (chosen - all.best) - log_sum : NAN;
    asked.report[0] = bits_of(logprob);
    asked.report[1] = known && best.id() == asked.target;
    if (args.told) ++args.told[r];
  }
  if (asked.top == 0) return;
  const auto tell = [&](std::int32_t rank, std::uint64_t key) {
    const BestKey one{key};
    std::int32_t* const words = asked.report + words_of_report(rank);
    words[0] = static_cast<std::int32_t>(one.id());
    words[1] = bits_of(finite ? (one.logit() - all.best) - log_sum : NAN);
  };
  if (asked.top == 1) {
    if (threadIdx.x == 0) tell(0, best.key);
  } else {
    rank_best(row, best_of_mine.key(), asked.top, block, shared.ranks, tell);
  }
}

}  // namespace cuda
}  // namespace minserve
