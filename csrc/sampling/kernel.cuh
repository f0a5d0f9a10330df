// A cluster of blocks samples the token of one row; rows of small vocabularies are
// warp_kernel.cuh's.
//
// Where there is room, each block keeps its piece of the row in shared memory: a row is read from
// memory once. Else a block has the whole row and reads it time and again through the caches.
#pragma once

#include "../core/reduce/argmax_key.cuh"
#include "top_k_top_p.cuh"
#include "cluster_rejection.cuh"

namespace minserve {
namespace cuda {

struct SampleShared {
  Cluster::Shared cluster;
  SelectResults results;
  RejectionShared rejection;
  Sections sections;
};
// Behind it in shared memory: what Selection needs, then the block's piece of the row.
constexpr unsigned kSampleSharedBytes = (sizeof(SampleShared) + 15) / 16 * 16;

// What a block's tokens are as they are first read.
struct Best : ArgmaxKey {
  float least;  // -infinity for fours that the row ends in
  unsigned unused;
};

__device__ __forceinline__ float lesser(float x, float y) {
  return x < y ? x : y;
}

// Of the tokens that a thread looks at, ids ascending, and of a block's threads.
class BestOfThread {
 public:
  __device__ __forceinline__ void add(const float (&x)[kTogether], unsigned id) {
    const float most = max_or_nan(max_or_nan(x[0], x[1]), max_or_nan(x[2], x[3]));
    if (most > best_) id_ = id + (x[0] == most ? 0 : x[1] == most ? 1 : x[2] == most ? 2 : 3);
    best_ = max_or_nan(best_, most);
  }
  __device__ __forceinline__ Best of_block(Block& block) const {
    Best best = {};
    // 0 is added since -0 is no less than 0.
    best.key = block.all(ArgmaxKey::of(best_ + 0.0f, id_).key, std::uint64_t{0}, greater);
    return best;
  }

 private:
  float best_ = kImpossible;
  unsigned id_ = 0;
};

// Of fours of a piece, wherever a block meets them. stored: where they are left, or null.
class FirstPass {
 public:
  __device__ __forceinline__ void add(const float4& x, unsigned at, unsigned base, float* stored) {
    if (stored) *reinterpret_cast<float4*>(stored + at) = x;
    best_.add({x.x, x.y, x.z, x.w}, base + at);
    least_ = lesser(least_, lesser(lesser(x.x, x.y), lesser(x.z, x.w)));
  }
  // The cluster's.
  __device__ __forceinline__ Best best(Cluster& cluster) const {
    Best mine = best_.of_block(cluster.block);
    mine.least = cluster.block.all(least_, -kImpossible, lesser);
    Best all = mine;
    cluster.each(mine, [&](unsigned, const Best& said) {
      all.key = greater(all.key, said.key);
      all.least = lesser(all.least, said.least);
    });
    return all;
  }

 private:
  BestOfThread best_;
  float least_ = -kImpossible;
};

// base: the id of a block's first token.
__device__ inline Best best_of(const Row& row, unsigned base, float* stored, Cluster& cluster) {
  FirstPass look;
  row.each<8>([&](unsigned at, const float4& x) { look.add(x, at, base, stored); });
  return look.best(cluster);
}
// The same, and weighs the piece's sections.
__device__ inline Best best_and_sections_of(const Row& row, unsigned base, float* stored,
                                            float octaves, Sections& sections, Cluster& cluster) {
  const unsigned lane = cluster.block.lane();
  const unsigned count = (row.vocab + kSectionTokens - 1) / kSectionTokens;
  FirstPass look;
#pragma unroll 1
  for (unsigned section = cluster.block.warp(); section < count; section += cluster.block.warps()) {
    const unsigned first = section * kSectionTokens + lane * kTogether;
    LaneFours x;
#pragma unroll
    for (unsigned a = 0; a < kFoursOfLane; ++a) x[a] = row.four(first + a * kStride);
    SectionSum section_sum(x, octaves);
#pragma unroll
    for (unsigned a = 0; a < kFoursOfLane; ++a) {
      const unsigned at = first + a * kStride;
      if (at < row.vocab) look.add(x[a], at, base, stored);
      float scaled_prob[kTogether];
      section_sum.add(x[a], scaled_prob);
    }
    const std::uint64_t sum = section_sum.sum();
    if (lane == 0) {
      sections.best[section] = section_sum.best();
      sections.sums[section] = sum;
    }
  }
  return look.best(cluster);
}

// Of the row's tokens that the filters keep, the one that is sampled; kElsewhere in blocks that do
// not have it.
template <bool kStored>
__device__ unsigned sample_kept(const Tokens<kStored>& tokens, float farthest,
                                const RowParameters& given, std::int64_t vocab, double number,
                                Cluster& cluster, const SelectShared& select,
                                SelectResults& results) {
  Cut cut;
  const bool has_top_k = given.top_k > 0 && given.top_k < vocab;
  float within = farthest < kFarthest ? farthest : kFarthest;
  if (has_top_k) {
    cut = Selection<false, kStored>(tokens, within, cut, cluster, select, results)
              .cut({static_cast<std::uint64_t>(given.top_k), 1.0, true});
    if (cut.distance < __float_as_uint(within)) within = __uint_as_float(cut.distance);
  }
  if (given.top_p < 1.0 || (has_top_k && given.top_k > kExactTokens)) {
    cut = Selection<true, kStored>(tokens, within, cut, cluster, select, results)
              .cut({0, given.top_p, has_top_k});
  }
  if (given.min_p > 0.0f) {
    const Cut other = min_p_cut(given.min_p);
    if (other.distance < cut.distance) cut = other;
  }
  return token_at(tokens, cluster, results.found, WeightSum<kStored>(cut),
                  [&](std::uint64_t total) { return sampled_weight(number, total); });
}

// Tokens of a block's piece of a row; whole sections.
MS_HD std::int64_t piece_of_row(std::int64_t vocab, unsigned blocks) {
  return ((vocab + blocks - 1) / blocks + kSection - 1) / kSection * kSection;
}

// The row's token, -1 where its logits are not finite; kElsewhere in all blocks but one.
template <bool kStored>
__device__ unsigned sample_token(const SampleArgs& args, std::int64_t r, const RowParameters& given,
                                 std::int64_t position, char* memory) {
  SampleShared& shared = *reinterpret_cast<SampleShared*>(memory);
  const SelectShared select(memory + kSampleSharedBytes);
  float* stored =
      reinterpret_cast<float*>(memory + kSampleSharedBytes + SelectShared::bytes(blockDim.x));
  Cluster cluster(shared.cluster);
  const bool greedy = !(given.temperature > 0.0f);
  const bool by_rejection = !greedy && uses_rejection(args.vocab, given.top_k);
  const float octaves = octaves_of(given.temperature);

  const std::int64_t piece = piece_of_row(args.vocab, cluster.blocks());
  const std::int64_t base = cluster.rank() * piece, left = args.vocab - base;
  const float* const logits = args.logits + r * args.row_stride + base;
  const Row row = {logits,
                   static_cast<unsigned>(left < 0       ? 0
                                         : left < piece ? left
                                                        : piece),
                   Row::is_aligned(logits)};
  const auto id_of_first = static_cast<unsigned>(base);
  if (!kStored || greedy) stored = nullptr;
  const Best best = by_rejection ? best_and_sections_of(row, id_of_first, stored, octaves,
                                                        shared.sections, cluster)
                                 : best_of(row, id_of_first, stored, cluster);
  if (!best.is_finite() || greedy) {
    return cluster.rank() ? kElsewhere : best.is_finite() ? best.id() : kNotFinite;
  }
  if (by_rejection) {
    const Attempts attempts(given, position, row, id_of_first, best.logit(), shared.sections,
                            cluster);
    if (!(given.top_p < 1.0 || given.min_p > 0.0f)) return attempts.first();
    attempts.tell(shared.rejection);
  }
  const Distances distances{best.logit(), octaves};
  const Tokens<kStored> tokens(row, stored, id_of_first, distances);
  if (by_rejection) {
    const unsigned token = accepted_attempt(tokens, distances, given, cluster, shared.rejection);
    if (token != kAllRejected) return cluster.rank() ? kElsewhere : token;
  }
  const double number = uniform_number(given.stream, position, by_rejection ? kAttempts : 0);
  return sample_kept(tokens, distances(best.least), given, args.vocab, number, cluster, select,
                     shared.results);
}

template <bool kStored, int kMostThreads, int kBlocks>
__global__ void __launch_bounds__(kMostThreads, kBlocks)
    sample_kernel(const __grid_constant__ SampleArgs args) {
  extern __shared__ uint4 memory[];
  const std::int64_t r = blockIdx.x / blocks_of_cluster();
  pdl_launch_dependents();
  Cluster::begin();
  wait_for_previous_kernel();
  const RowParameters given(args, r);
  const std::int64_t position = args.positions[r];
  if (!args.is_active(r)) return;
  const unsigned token =
      sample_token<kStored>(args, r, given, position, reinterpret_cast<char*>(memory));
  if (threadIdx.x == 0 && token != kElsewhere) move_on(args, r, static_cast<std::int32_t>(token));
}

constexpr std::int64_t sample_shared_bytes(unsigned threads) {
  return kSampleSharedBytes + static_cast<std::int64_t>(SelectShared::bytes(threads));
}
inline std::int64_t stored_row_bytes(std::int64_t vocab, unsigned blocks) {
  return piece_of_row(vocab, blocks) * static_cast<std::int64_t>(sizeof(float));
}

}  // namespace cuda
}  // namespace minserve
