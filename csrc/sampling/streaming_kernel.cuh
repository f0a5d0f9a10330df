// The kernel of rows that are streamed, of more than 1,024 tokens: what a block needs for one, the
// first look at it, the draw (streaming_sample.cuh), and what is done where that gives up.
#pragma once

#include "first_pass.cuh"
#include "streaming_sample.cuh"

namespace minserve {
namespace cuda {

// Where this gives up, the row is drawn from memory by the same block.
template <unsigned kThreads>
constexpr std::int64_t streamed_bytes() {
  const std::int64_t other = draw_shared_bytes(kThreads);
  constexpr std::int64_t kOwn = sizeof(StreamedShared<kThreads>);
  return other > kOwn ? other : kOwn;
}
// Tokens of a row.
constexpr std::int64_t streamed_vocab(unsigned threads) {
  return static_cast<std::int64_t>(threads) * kMostSummed;
}

// Part of the kernel, for a function would have the rest keep in memory what it needs afterwards;
// and nothing is left to do then.
__device__ __forceinline__ void draw_from_memory(const DrawArgs& args, std::int64_t r,
                                                 std::int64_t position, char* memory) {
  if (threadIdx.x == 0) note_detour();
  __syncthreads();  // others may still use it
  const unsigned token = drawn_token<false>(args, r, RowParameters(args, r), position, memory);
  if (threadIdx.x == 0) move_on(args, r, static_cast<std::int32_t>(token));
}

// Each try by a warp; a barrier has to follow.
template <unsigned kThreads>
__device__ __forceinline__ void draw_tries(const Row& row, float best, float octaves,
                                           StreamedShared<kThreads>& shared) {
  const unsigned warp = threadIdx.x / kWarp;
  if (warp >= kTries) return;
  const SectionDraw draw(row, 0, best, octaves, shared.sections);
  const std::uint64_t total = draw.weight();
#pragma unroll 1
  for (unsigned t = warp; t < kTries; t += kThreads / kWarp) {
    SectionDraw::Found found;
    const double number = uniform_number(shared.given.stream, shared.position, static_cast<int>(t));
    draw.find(number, 0, total, found);  // which it is, for there is no other piece
    if (threadIdx.x % kWarp == 0) shared.tries[t] = found;
  }
}

template <int kThreads, int kBlocks>
__global__ void __launch_bounds__(kThreads, kBlocks)
    streamed_draw_kernel(const __grid_constant__ DrawArgs args) {
  extern __shared__ uint4 memory[];
  using Draw = StreamedDraw<kThreads>;
  constexpr unsigned kWarps = kThreads / kWarp;
  auto& shared = *reinterpret_cast<StreamedShared<kThreads>*>(memory);
  const std::int64_t r = blockIdx.x;
  pdl_launch_dependents();
  wait_for_previous_kernel();
  // Asked for at once with what draws() looks at.
  const RowParameters parameters(args, r);
  const std::int64_t position = args.positions[r];
  if (!args.draws(r)) return;
  if (threadIdx.x == 0) {
    shared.given = parameters;
    shared.position = position;
  }
  const RowParameters& given = shared.given;  // behind a barrier
  const float* const logits = args.logits + r * args.row_stride;
  const Row row = {logits, static_cast<unsigned>(args.vocab), Row::is_aligned(logits), kWarps};
  const float octaves = octaves_of(parameters.temperature);
  Block block(shared.block, kWarps);
  OddsBins<kThreads> bins(shared.bins, args.vocab, block, shared.results);
  bool counted = false;
  unsigned token = Draw::kGivenUp;
  if (!(parameters.temperature > 0.0f)) {
    const Best best = best_alone(row, block);
    token = best.is_finite() ? best.id() : kNotFinite;
  } else if (parameters.top_k > 0 && static_cast<unsigned>(parameters.top_k) < row.vocab) {
    shared.clear_list();
    shared.clear_cut();
    shared.fill_list();
    const float best = best_and_bins(row, octaves, block, bins, counted);
    if (!is_finite(best)) {
      token = kNotFinite;
    } else if (given.top_k <= kExactTokens) {
      const OddsRow odds(row, {best, octaves});
      const double number = uniform_number(given.stream, shared.position);
      token = Draw(odds, block, shared, bins, counted).token_of_top_k(given, number);
    }
  } else {
    const float best =
        parameters.top_p < 1.0
            ? best_and_sections<true>(row, octaves, block, shared.sections, bins, counted)
            : best_and_sections<false>(row, octaves, block, shared.sections, bins, counted);
    token = kNotFinite;
    if (is_finite(best)) {
      draw_tries(row, best, octaves, shared);
      const OddsRow odds(row, {best, octaves});
      token = Draw(odds, block, shared, bins, counted).token_of_tries(given, shared.position);
    }
  }
  if (token == Draw::kGivenUp) {
    return draw_from_memory(args, r, shared.position, reinterpret_cast<char*>(memory));
  }
  if (threadIdx.x == 0) move_on(args, r, static_cast<std::int32_t>(token));
}

}  // namespace cuda
}  // namespace minserve
