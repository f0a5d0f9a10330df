// One block draws the token of one row; rows of small vocabularies are small.cuh's.
//
// The row is read for its best; rows that are sampled are read again, from shared memory where
// there is room for a copy, else through the caches: for where the filters cut, and for the token.
#pragma once

#include "select.cuh"

namespace minserve {
namespace cuda {

struct DrawShared {
  Block::Shared block;
  SelectResults results;
};
// Behind it in shared memory: what Selection needs, then the copy.
constexpr unsigned kDrawSharedBytes = (sizeof(DrawShared) + 15) / 16 * 16;

struct Best {
  float logit;
  float least;  // -infinity for fours that the row ends in
  unsigned id;  // the lowest of this thread's
};

__device__ __forceinline__ float lesser(float x, float y) {
  return x < y ? x : y;
}

// This thread's best. copy: where the row is left in shared memory, or null.
__device__ inline Best best_of_thread(const Row& row, float* copy) {
  Best best = {kImpossible, -kImpossible, 0};
  row.each<4>([&](unsigned id, const float4& x) {
    if (copy) *reinterpret_cast<float4*>(copy + id) = x;
    const float most = max_or_nan(max_or_nan(x.x, x.y), max_or_nan(x.z, x.w));
    if (most > best.logit) {
      best.id = id + (x.x == most ? 0 : x.y == most ? 1 : x.z == most ? 2 : 3);
    }
    best.logit = max_or_nan(best.logit, most);
    best.least = lesser(best.least, lesser(lesser(x.x, x.y), lesser(x.z, x.w)));
  });
  return best;
}

// The row's token, or -1.
__device__ inline std::int32_t drawn_token(const DrawArgs& args, std::int64_t r,
                                           const RowParameters& given, double number, bool copied,
                                           char* memory) {
  DrawShared& shared = *reinterpret_cast<DrawShared*>(memory);
  const SelectShared select(memory + kDrawSharedBytes);
  float* const copy = reinterpret_cast<float*>(memory + kDrawSharedBytes +
                                               blockDim.x * SelectShared::kBytesPerThread);
  Block block(shared.block);
  const bool greedy = !(given.temperature > 0.0f);

  const float* const logits = args.logits + r * args.row_stride;
  Row row = {logits, static_cast<unsigned>(args.vocab), Row::is_aligned(logits)};
  const Best mine = best_of_thread(row, copied && !greedy ? copy : nullptr);
  const float best =
      block.all(mine.logit, kImpossible, [](float x, float y) { return max_or_nan(x, y); });
  if (!(best - best == 0.0f)) return -1;  // NaN or infinite
  if (greedy) {
    const unsigned none = 0xffffffffu;
    return static_cast<std::int32_t>(
        block.all(mine.logit == best ? mine.id : none, none,
                  [](unsigned x, unsigned y) { return x < y ? x : y; }));
  }

  if (copied) row.logits = copy, row.aligned = true;
  const Tokens tokens(
      row, best, given.temperature > kLeastTemperature ? given.temperature : kLeastTemperature);
  Cut cut;
  const bool has_top_k = given.top_k > 0 && given.top_k < args.vocab;
  if (has_top_k || given.top_p < 1.0) {
    const float least =
        block.all(mine.least, -kImpossible, [](float x, float y) { return lesser(x, y); });
    const float farthest = tokens.distance(least);
    float within = farthest < kFarthest ? farthest : kFarthest;
    if (has_top_k) {
      cut = Selection<false>(tokens, within, cut, block, select, shared.results)
                .cut({static_cast<std::uint64_t>(given.top_k), 1.0, true});
      if (cut.distance < __float_as_uint(within)) within = __uint_as_float(cut.distance);
    }
    if (given.top_p < 1.0 || (has_top_k && given.top_k > kExactTokens)) {
      cut = Selection<true>(tokens, within, cut, block, select, shared.results)
                .cut({0, given.top_p, has_top_k});
    }
  }
  if (given.min_p > 0.0f) {
    const Cut other = min_p_cut(given.min_p);
    if (other.distance < cut.distance) cut = other;
  }
  const float farthest =
      cut.distance < __float_as_uint(kFarthest) ? __uint_as_float(cut.distance) : kFarthest;
  return static_cast<std::int32_t>(token_at(
      tokens, tokens.span(0.0f, farthest), block, shared.results.found,
      [&](unsigned id, float distance) -> std::uint64_t {
        return cut.keeps(__float_as_uint(distance), id) ? whole(weight_of(distance)) : 0;
      },
      [&](std::uint64_t total) { return drawn_weight(number, total); }));
}

template <int kMostThreads, int kBlocks>
__global__ void __launch_bounds__(kMostThreads, kBlocks)
    draw_kernel(const __grid_constant__ DrawArgs args, bool copied) {
  extern __shared__ uint4 memory[];
  const std::int64_t r = blockIdx.x;
  let_next_kernel_start();
  wait_for_previous_kernel();
  const RowParameters given(args, r);
  const double number = uniform_number(given.stream, args.positions[r]);
  if (!args.draws(r)) return;
  const std::int32_t token =
      drawn_token(args, r, given, number, copied, reinterpret_cast<char*>(memory));
  if (threadIdx.x == 0) move_on(args, r, token);
}

inline std::int64_t draw_shared_bytes(unsigned threads) {
  return kDrawSharedBytes + static_cast<std::int64_t>(threads) * SelectShared::kBytesPerThread;
}
// Of the copy, whole strides of it.
inline std::int64_t draw_copy_bytes(std::int64_t vocab) {
  return (vocab + kTogether - 1) / kTogether * kTogether * static_cast<std::int64_t>(sizeof(float));
}

}  // namespace cuda
}  // namespace minserve
