// The heuristic that chooses a tile config and a split-K for a call. No CUDA in here, so that it
// can be tested anywhere.
//
// It reads shapes alone. It was fitted to measurements of every tile config at the shapes of models
// of 6 million to 1.3 billion weights on a GPU of 132 multiprocessors. For 4 to 64 tokens each GEMM
// was tried in its likely configs among the others of its layer: no other config of one GEMM makes
// a layer quicker by more than 4 %, mostly 1 %.
#pragma once

#include <cstdint>

#include "tile_config.h"
#include "heuristics_persistent.h"

namespace minserve {

class SmallBatchHeuristic {
 public:
  SmallBatchHeuristic(std::int64_t channels, std::int64_t inputs, std::int64_t gates,
                      std::int64_t tokens)
      : channels_(channels), inputs_(inputs), gates_(gates), tokens_(tokens) {}

  // `inputs`: what a block of a persistent GEMM may have of them.
  GemmConfig choose(PersistentHeuristic::Inputs inputs = PersistentHeuristic::Inputs::any) const {
    if (tokens_ <= 32) return few();
    const PersistentHeuristic persistent(channels_, inputs_, gates_, tokens_, inputs);
    // In one wave of blocks that share inputs, up to two pieces of tokens.
    const int shared = inputs == PersistentHeuristic::Inputs::any && tokens_ <= 128 ? parts(64) : 1;
    if (persistent.pays()) {
      const PersistentTile& tile = persistent.best();
      const bool more_blocks = tiles(64) * pieces(64) * shared > persistent.blocks(tile);
      if (shared > 1 && tile.split_k == 1 && more_blocks) return {TileConfig::tokens_64, shared};
      return {tile.config, tile.split_k};
    }
    if (shared > 1 && tokens_ > 64) return {TileConfig::tokens_64, shared};
    return some();
  }

  // Of up to 64 tokens, where no persistent kernel has the epilogue.
  GemmConfig choose_small_batch() const {
    const GemmConfig config = tokens_ <= 32 ? few() : some();
    if (config.tile != TileConfig::persistent_64_32) return config;
    return {tokens_ <= 8    ? TileConfig::tokens_8
            : tokens_ <= 16 ? TileConfig::tokens_16
                            : TileConfig::tokens_32,
            1};
  }

 private:
  static constexpr std::int64_t kOneWave = 140, kTwoWaves = 264;

  std::int64_t tiles(std::int64_t rows) const { return (channels_ + rows - 1) / rows; }
  std::int64_t pieces(std::int64_t tokens) const { return (tokens_ + tokens - 1) / tokens; }
  bool small() const { return channels_ * gates_ * inputs_ * 2 <= (8 << 20); }

  // A few tokens: all that counts is that the weights come from everywhere at once.
  GemmConfig few() const {
    const int size = tokens_ <= 8 ? 0 : tokens_ <= 16 ? 1 : 2;
    constexpr TileConfig kSingle[] = {TileConfig::tokens_8, TileConfig::tokens_16,
                                      TileConfig::tokens_32};
    // Blocks that stay on their multiprocessors: the weights of a tile come during the epilogue
    // of the one before.
    if (gates_ == 1 && tiles(64) >= kTwoWaves) return {TileConfig::persistent_64_32, 1};
    const std::int64_t tile_bytes = 64 * gates_ * inputs_ * 2, least = tokens_ <= 8 ? 96 : 192;
    int parts = 1;
    while (parts < 8 && inputs_ / (2 * parts) >= least && tiles(64) * parts * 2 <= kTwoWaves &&
           tile_bytes > parts * (40 << 10)) {
      parts *= 2;
    }
    return {kSingle[size], parts};
  }

  int parts(std::int64_t tokens) const {
    const std::int64_t blocks = tiles(64) * pieces(tokens), least = tokens < 64 ? 256 : 190;
    int parts = 1;
    while (parts < 8 && inputs_ / (2 * parts) >= least && blocks * parts * 2 <= kOneWave &&
           blocks * parts < (tokens_ > 64 ? 65 : 64)) {
      parts *= 2;
    }
    return parts;
  }

  // Between: pieces of tokens so small that blocks are many, since epilogues take time too.
  GemmConfig some() const {
    std::int64_t tokens = small() && channels_ <= 128 ? 16 : 64;
    const std::int64_t wanted = inputs_ < 1000 ? 96 : 44;
    const auto blocks = [&] { return tiles(64) * pieces(tokens); };
    while (tokens > 16 && blocks() * parts(tokens) < wanted) tokens /= 2;
    if (tokens == 64 && inputs_ < 1000 && small() && tiles(64) * pieces(32) <= 400) tokens = 32;
    const int shared = parts(tokens);
    if (tokens == 16) return {TileConfig::tokens_16, shared};
    if (tokens == 32) return {TileConfig::tokens_32, shared};
    return {TileConfig::tokens_64, shared};
  }

  std::int64_t channels_, inputs_, gates_, tokens_;
};

}  // namespace minserve
