// One block writes the report of one row; what its threads find is combined in a fixed order.
#pragma once

#include "../../core/reduce/row_reader.cuh"
#include "top_logprobs.cuh"
#include "logsumexp.cuh"
#include "logprobs.h"

namespace minserve {
namespace cuda {

__device__ __forceinline__ std::int32_t bits_of(float x) {
  return static_cast<std::int32_t>(__float_as_uint(x));
}

struct LogprobsShared {
  static constexpr int kMostThreads = 256;
  Block::Shared block;
  TopLogprobsShared<kMostThreads> top;
};

__global__ void __launch_bounds__(LogprobsShared::kMostThreads)
    logprobs_kernel(const __grid_constant__ LogprobsArgs args) {
  extern __shared__ uint4 memory[];
  const std::int64_t r = blockIdx.x;
  pdl_launch_dependents();
  wait_for_previous_kernel();
  const LogprobsRequest request(args, r);
  if (!request.report) return;
  const float* const logits = args.logits + r * args.row_stride;
  const bool exists = request.target >= 0 && request.target < args.vocab;
  const float chosen = exists ? logits[request.target] : kImpossible;
  const Row row = {logits, static_cast<unsigned>(args.vocab), Row::is_aligned(logits)};
  LogSumExpReader mine;
  mine.read(row);
  LogprobsShared& shared = *reinterpret_cast<LogprobsShared*>(memory);
  Block block(shared.block);
  const ExpSum all =
      ExpSum::unpacked(block.all(mine.sum().packed(), ExpSum().packed(), CombineExpSums()));
  const ArgmaxKey best{block.all(mine.key(), std::uint64_t{0}, greater)};
  const bool finite = best.is_finite();
  const float log_sum = logf(all.sum);
  if (threadIdx.x == 0) {
    const bool known = finite && exists;
    const float logprob = known ? (chosen - all.best) - log_sum : NAN;
    request.report[0] = bits_of(logprob);
    request.report[1] = known && best.id() == request.target;
    if (args.told) ++args.told[r];
  }
  if (request.top == 0) return;
  const auto tell = [&](std::int32_t rank, std::uint64_t key) {
    const ArgmaxKey one{key};
    std::int32_t* const words = request.report + words_of_report(rank);
    words[0] = static_cast<std::int32_t>(one.id());
    words[1] = bits_of(finite ? (one.logit() - all.best) - log_sum : NAN);
  };
  const std::int32_t thread = static_cast<std::int32_t>(threadIdx.x);
  if (!finite || request.top == 1) {  // of a row that is not, no rank means anything
    if (thread < request.top) tell(thread, best.key);
  } else {
    find_top_logprobs(row, mine.key(), request.top, block, shared.top, tell);
  }
}

}  // namespace cuda
}  // namespace minserve
