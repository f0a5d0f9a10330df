// The kernel of rows that are streamed: what a block needs for one, the look at it for its best
// logit, the draw (streamed_draw.cuh), and what is done where that gives up.
#pragma once

#include "first_look.cuh"
#include "streamed_draw.cuh"

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

__device__ __noinline__ unsigned token_from_memory(const DrawArgs& args, std::int64_t r,
                                                   double number, char* memory) {
  if (threadIdx.x == 0) note_detour();
  __syncthreads();  // others may still use it
  return drawn_token<false>(args, r, RowParameters(args, r), number, memory);
}

template <int kThreads, int kBlocks>
__global__ void __launch_bounds__(kThreads, kBlocks)
    streamed_draw_kernel(const __grid_constant__ DrawArgs args) {
  extern __shared__ uint4 memory[];
  using Draw = StreamedDraw<kThreads>;
  constexpr unsigned kWarps = kThreads / kWarp;
  auto& shared = *reinterpret_cast<StreamedShared<kThreads>*>(memory);
  const std::int64_t r = blockIdx.x;
  let_next_kernel_start();
  wait_for_previous_kernel();
  const RowParameters given(args, r);  // asked for at once with what draws() looks at
  const std::int64_t position = args.positions[r];
  if (!args.draws(r)) return;
  const float* const logits = args.logits + r * args.row_stride;
  const Row row = {logits, static_cast<unsigned>(args.vocab), Row::is_aligned(logits), kWarps};
  Block block(shared.block, kWarps);
  OddsBins<kThreads> bins(shared.bins, args.vocab, block, shared.results);
  const bool has_top_k = Draw::has_top_k(given, row.vocab);
  bool counted = false;
  shared.clear_list();
  shared.clear_cut();
  Best best;
  if (given.temperature > 0.0f && (has_top_k || given.top_p < 1.0)) {
    const float octaves = octaves_of(given.temperature);
    shared.fill_list();
    best = has_top_k ? best_and_bins<false>(row, octaves, block, bins, counted)
                     : best_and_bins<true>(row, octaves, block, bins, counted);
  } else {
    best = best_alone(row, block);
  }
  unsigned token = Draw::kGivenUp;
  double number = 0.0;
  if (!best.is_finite()) {
    token = kNotFinite;
  } else if (!(given.temperature > 0.0f)) {
    token = best.id();
  } else {
    number = uniform_number(given.stream, position);
    const OddsRow odds(row, {best.logit(), octaves_of(given.temperature)});
    token = Draw(odds, block, shared, bins, counted).token(given, number);
  }
  if (token == Draw::kGivenUp) {
    token = token_from_memory(args, r, number, reinterpret_cast<char*>(memory));
  }
  if (threadIdx.x == 0) move_on(args, r, static_cast<std::int32_t>(token));
}

}  // namespace cuda
}  // namespace minserve
