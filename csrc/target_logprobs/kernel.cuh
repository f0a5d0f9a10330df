// One block finds the log-probability of one row's target, reading the row once.
//
// Each thread keeps the best of its logits and the sum of exp(logit - best), brought to a new best
// where one comes up; the threads' pairs are combined in a fixed order.
#pragma once

#include "../common/row.cuh"
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

template <int kMostThreads>
__global__ void __launch_bounds__(kMostThreads)
    target_kernel(const __grid_constant__ TargetArgs args) {
  extern __shared__ uint4 memory[];
  const std::int64_t r = blockIdx.x;
  let_next_kernel_start();
  wait_for_previous_kernel();
  const float* const logits = args.logits + r * args.row_stride;
  const std::int64_t target = args.targets[r];
  const bool exists = target >= 0 && target < args.vocab;
  const float chosen = exists ? logits[target] : kImpossible;
  const Row row = {logits, static_cast<unsigned>(args.vocab), Row::is_aligned(logits)};
  ExpSum mine;
  bool equal_before = false;
  row.each<4>([&](unsigned id, const float4& x) {
    mine.add(x);
    equal_before |= (x.x == chosen && id < target) | (x.y == chosen && id + 1 < target) |
                    (x.z == chosen && id + 2 < target) | (x.w == chosen && id + 3 < target);
  });
  Block block(*reinterpret_cast<Block::Shared*>(memory));
  const ExpSum all = ExpSum::unpacked(block.all(mine.packed(), ExpSum().packed(), Combine()));
  const unsigned equals =
      block.all(equal_before ? 1u : 0u, 0u, [](unsigned x, unsigned y) { return x | y; });
  if (threadIdx.x != 0) return;
  const bool finite = exists && all.best - all.best == 0.0f;
  args.logprobs[r] = finite ? (chosen - all.best) - logf(all.sum) : NAN;
  args.is_greedy[r] = finite && chosen == all.best && !equals;
}

}  // namespace cuda
}  // namespace minserve
