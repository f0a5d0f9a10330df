// The kernel of rows that are streamed, of more than 1,024 tokens: what a block needs for one, the
// first pass over it, the sampling (streaming_sample.cuh), and what is done where that gives up.
#pragma once

#include "first_pass.cuh"
#include "streaming_sample.cuh"

namespace minserve {
namespace cuda {

// Where this gives up, the row is sampled from memory by the same block.
template <unsigned kThreads>
constexpr std::int64_t streaming_shared_bytes() {
  const std::int64_t other = sample_shared_bytes(kThreads);
  constexpr std::int64_t kOwn = sizeof(StreamingShared<kThreads>);
  return other > kOwn ? other : kOwn;
}
// Tokens of a row.
constexpr std::int64_t streaming_most_vocab(unsigned threads) {
  return static_cast<std::int64_t>(threads) * kMostSummed;
}

// Part of the kernel, for a function would have the rest keep in memory what it needs afterwards;
// and nothing is left to do then.
__device__ __forceinline__ void sample_from_memory(const SampleArgs& args, std::int64_t r,
                                                   std::int64_t position, char* memory) {
  if (threadIdx.x == 0) note_detour();
  __syncthreads();  // others may still use it
  const unsigned token = sample_token<false>(args, r, RowParameters(args, r), position, memory);
  if (threadIdx.x == 0) move_on(args, r, static_cast<std::int32_t>(token));
}

// Each attempt by a warp; a barrier has to follow.
template <unsigned kThreads>
__device__ __forceinline__ void sample_attempts(const Row& row, float best, float octaves,
                                                StreamingShared<kThreads>& shared) {
  const unsigned warp = threadIdx.x / kWarp;
  if (warp >= kAttempts) return;
  const SectionSampler sampler(row, 0, best, octaves, shared.sections);
  const std::uint64_t total = sampler.weight();
#pragma unroll 1
  for (unsigned t = warp; t < kAttempts; t += kThreads / kWarp) {
    SectionSampler::Found found;
    const double number = uniform_number(shared.given.stream, shared.position, static_cast<int>(t));
    sampler.find(number, 0, total, found);  // which it is, for there is no other piece
    if (threadIdx.x % kWarp == 0) shared.attempts[t] = found;
  }
}

template <int kThreads, int kBlocks>
__global__ void __launch_bounds__(kThreads, kBlocks)
    streaming_kernel(const __grid_constant__ SampleArgs args) {
  extern __shared__ uint4 memory[];
  using Sampler = StreamingSampler<kThreads>;
  constexpr unsigned kWarps = kThreads / kWarp;
  auto& shared = *reinterpret_cast<StreamingShared<kThreads>*>(memory);
  const std::int64_t r = blockIdx.x;
  pdl_launch_dependents();
  wait_for_previous_kernel();
  // Read at once with what is_active() looks at.
  const RowParameters parameters(args, r);
  const std::int64_t position = args.positions[r];
  if (!args.is_active(r)) return;
  if (threadIdx.x == 0) {
    shared.given = parameters;
    shared.position = position;
  }
  const RowParameters& given = shared.given;  // behind a barrier
  const float* const logits = args.logits + r * args.row_stride;
  const Row row = {logits, static_cast<unsigned>(args.vocab), Row::is_aligned(logits), kWarps};
  const float octaves = octaves_of(parameters.temperature);
  Block block(shared.block, kWarps);
  ScaledProbHistogram<kThreads> bins(shared.bins, args.vocab, block, shared.results);
  bool counted = false;
  unsigned token = Sampler::kGivenUp;
  if (!(parameters.temperature > 0.0f)) {
    const Best best = best_alone(row, block);
    token = best.is_finite() ? best.id() : kNotFinite;
  } else if (parameters.top_k > 0 && static_cast<unsigned>(parameters.top_k) < row.vocab) {
    shared.clear_list();
    shared.clear_cut();
    shared.fill_list();
    const float best = best_and_histogram(row, octaves, block, bins, counted);
    if (!is_finite(best)) {
      token = kNotFinite;
    } else if (given.top_k <= kExactTokens) {
      const ScaledProbRow scaled_probs(row, {best, octaves});
      const double number = uniform_number(given.stream, shared.position);
      token = Sampler(scaled_probs, block, shared, bins, counted).token_of_top_k(given, number);
    }
  } else {
    const float best =
        parameters.top_p < 1.0
            ? best_and_sections<true>(row, octaves, block, shared.sections, bins, counted)
            : best_and_sections<false>(row, octaves, block, shared.sections, bins, counted);
    token = kNotFinite;
    if (is_finite(best)) {
      sample_attempts(row, best, octaves, shared);
      const ScaledProbRow scaled_probs(row, {best, octaves});
      token = Sampler(scaled_probs, block, shared, bins, counted)
                  .token_by_rejection(given, shared.position);
    }
  }
  if (token == Sampler::kGivenUp) {
    return sample_from_memory(args, r, shared.position, reinterpret_cast<char*>(memory));
  }
  if (threadIdx.x == 0) move_on(args, r, static_cast<std::int32_t>(token));
}

}  // namespace cuda
}  // namespace minserve
