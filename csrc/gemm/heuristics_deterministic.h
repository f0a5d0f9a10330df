// The heuristic of batch-invariant calls, whose sums must not depend on the number of tokens.
//
// A kernel adds up its products in the order of the inputs, whatever its tile. What changes the
// order is cutting the inputs into parts (split-K), each summed from zero. So here the number of
// parts follows from the weight's shape alone, and the number of tokens decides who sums them: few
// tokens have a block for each part, or for two of them, and many have one block that takes them in
// turn (serial split-K). All add the parts up in order. So does the kernel of a persistent decode
// step, where a warp has a part (persistent_decode/deterministic.cuh): it cuts the inputs where
// these kernels do, part * blocks / parts of their blocks of kStep.
#pragma once

#include "heuristics.h"

namespace minserve {

class BatchInvariantHeuristic {
 public:
  static constexpr int kMostSplitK = 8;
  // Weights of more rows have one part, whatever their inputs: their tiles alone fill a GPU.
  static constexpr std::int64_t kFewTiles = 95, kOnePartRows = kFewTiles * 64;

  BatchInvariantHeuristic(std::int64_t channels, std::int64_t inputs, std::int64_t gates,
                          std::int64_t tokens)
      : channels_(channels), inputs_(inputs), gates_(gates), tokens_(tokens) {}

  // As many as fill the GPU when there are few tokens, but no more: they cost many tokens time.
  int parts() const {
    const bool enough = (tiles(64) >= 24 && 64 * gates_ * inputs_ * 2 <= (64 << 10)) ||
                        (gates_ == 2 && small_tiles() >= kMany);
    int parts = 1;
    while (parts < kMostSplitK && !enough && inputs_ / (2 * parts) >= 192 &&
           tiles(64) * parts <= kFewTiles) {
      parts *= 2;
    }
    return parts;
  }

  GemmConfig choose() const {
    using Inputs = PersistentHeuristic::Inputs;
    const int parts = this->parts();
    if (parts == 1) {
      if (tokens_ <= 32 && gates_ < 3 && small_tiles() >= kMany)
        return {TileConfig::persistent_64_32, 1};
      return {SmallBatchHeuristic(channels_, inputs_, gates_, tokens_).choose(Inputs::whole).tile,
              1};
    }
    // A block for each part pays while all of them run at once. Gates, whose persistent GEMMs never
    // share inputs, take those in turn as soon as there are tiles for many multiprocessors, two of
    // them also in the smallest tiles.
    const PersistentHeuristic persistent(channels_, inputs_, gates_, tokens_, Inputs::serial);
    const bool in_turn = blocks(64) * parts > kMultiprocessors || (gates_ > 1 && persistent.pays());
    if (tokens_ <= (gates_ == 2 ? 16 : 32) || !in_turn) return among_blocks(parts);
    if (two_each(parts)) return {TileConfig::persistent_64_64, parts / 2, 2};
    return {persistent.best().config, 1, parts};
  }

 private:
  static constexpr std::int64_t kMultiprocessors = PersistentHeuristic::kMultiprocessors;

  // Tiles of 64 rows and 32 tokens that have all inputs keep as much under way as more blocks with
  // parts of them, when there are so many.
  static constexpr std::int64_t kMany = 96;
  std::int64_t small_tiles() const { return (channels_ * gates_ + 63) / 64; }

  std::int64_t tiles(std::int64_t rows) const { return (channels_ + rows - 1) / rows; }
  std::int64_t blocks(std::int64_t tokens) const {
    return tiles(64) * ((tokens_ + tokens - 1) / tokens);
  }

  // Whether all blocks run at once that have two parts each, which they give each other apart.
  // Short sums do not make up for that.
  bool two_each(int parts) const {
    if (gates_ > 1 || parts < 4 || (parts == 4 && inputs_ < 1024)) return false;
    return blocks(64) * (parts / 2) <= PersistentHeuristic::at_once(parts / 2);
  }

  GemmConfig among_blocks(int parts) const {
    if (tokens_ <= 8) return {TileConfig::tokens_8, parts};
    if (tokens_ <= 16) return {TileConfig::tokens_16, parts};
    if (tokens_ <= 32) return {TileConfig::tokens_32, parts};
    if (blocks(16) * parts <= kMultiprocessors) return {TileConfig::tokens_16, parts};
    // Long parts are a matter of how many weights are on their way: two blocks to a multiprocessor.
    const bool two = tokens_ <= 64 && inputs_ / parts >= 512;
    if (blocks(32) * parts <= (two ? 2 : 1) * kMultiprocessors)
      return {TileConfig::tokens_32, parts};
    return {TileConfig::tokens_64, parts};
  }

  std::int64_t channels_, inputs_, gates_, tokens_;
};

}  // namespace minserve
