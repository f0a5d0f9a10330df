// The heuristic of persistent GEMMs: whether a call of many tokens takes one, and with which tile.
// No CUDA in here.
#pragma once

#include <algorithm>
#include <cstdint>

#include "tile_config.h"

namespace minserve {

struct PersistentTile {
  TileConfig config;
  int rows, tokens, split_k;
};

constexpr PersistentTile kPersistentTiles[] = {
    {TileConfig::persistent_256_128, 256, 128, 1}, {TileConfig::persistent_192_128, 192, 128, 1},
    {TileConfig::persistent_128_128, 128, 128, 1}, {TileConfig::persistent_128_128, 128, 128, 2},
    {TileConfig::persistent_192_96, 192, 96, 1},   {TileConfig::persistent_192_64, 192, 64, 1},
    {TileConfig::persistent_192_64, 192, 64, 2},   {TileConfig::persistent_128_64, 128, 64, 1},
    {TileConfig::persistent_128_64, 128, 64, 2},   {TileConfig::persistent_64_64, 64, 64, 1},
    {TileConfig::persistent_64_64, 64, 64, 2},     {TileConfig::persistent_64_64, 64, 64, 4},
    {TileConfig::persistent_64_32, 64, 32, 1},
};

// Fitted to measurements like heuristics.h: of GEMMs of 6 million to 1.3 billion weights' models,
// in their layers, with 40 to 2,048 tokens.
class PersistentHeuristic {
 public:
  // What a block may have of the inputs.
  enum class Inputs {
    any,     // all, or a part
    whole,   // all
    serial,  // all, in parts one after the other
  };

  PersistentHeuristic(std::int64_t channels, std::int64_t inputs, std::int64_t gates,
                      std::int64_t tokens, Inputs inputs_of_block)
      : rows_(channels * gates),
        inputs_(inputs),
        gates_(gates),
        tokens_(tokens),
        whole_(inputs_of_block != Inputs::any || gates == 3),
        serial_(inputs_of_block == Inputs::serial) {}

  static constexpr std::int64_t kMultiprocessors = 132;

  // Whether there are tiles for enough multiprocessors, small ones in parts where sums are long.
  bool pays() const {
    std::int64_t blocks = up(rows_, 64) * up(tokens_, 64);
    if (gates_ > 1) return blocks >= 24;
    for (int parts = 2; !whole_ && parts <= 4 && inputs_ >= 256 + 128 * parts; parts *= 2) {
      if (blocks * 2 <= at_once(parts)) blocks *= 2;
    }
    return blocks >= 60;
  }

  // The quickest by its clocks.
  const PersistentTile& best() const {
    const PersistentTile* best = nullptr;
    for (const PersistentTile& tile : kPersistentTiles) {
      if (can_take(tile) && (!best || clocks(tile) < clocks(*best))) best = &tile;
    }
    return *best;
  }

  // Blocks that run at the same time. Fours leave out what is over of a group of multiprocessors.
  static constexpr std::int64_t at_once(int parts) { return parts == 4 ? 112 : kMultiprocessors; }

  std::int64_t blocks(const PersistentTile& tile) const {
    return up(rows_, tile.rows) * up(tokens_, tile.tokens) * tile.split_k;
  }

 private:
  static constexpr double kSumsPerClock = 32;  // of 64 inputs
  static constexpr double kBytesPerClock = 42, kWeightBytesPerClock = 1700;
  static constexpr double kStepsPerClock = 2.5, kFinishedPerClock = 5;
  static constexpr double kExchange = 1000, kSentPerClock = 5.5;

  static std::int64_t up(std::int64_t n, std::int64_t by) { return (n + by - 1) / by; }

  bool can_take(const PersistentTile& tile) const {
    // Two sets of sums, and the epilogue of gates takes registers, too.
    if (serial_ && tile.rows * tile.tokens > 192 * (gates_ > 1 ? 96 : 128)) return false;
    if (tile.config == TileConfig::persistent_64_32 && !serial_) return false;  // too small
    if (gates_ == 3) return tile.rows == 192 && tile.split_k == 1;  // a warpgroup for each
    if (gates_ == 2 && (tile.split_k > 1 || (tile.rows == 192 && inputs_ >= 1024))) {
      return false;  // always behind
    }
    // With split-K a block has one tile, and some inputs.
    return tile.split_k == 1 ||
           (!whole_ && blocks(tile) <= at_once(tile.split_k) && inputs_ >= 64 * tile.split_k);
  }

  // A multiprocessor's: products, or copies where the L2 cache gives less than they take, what
  // parts send each other, and the epilogue; or all weights where memory gives less, and the last
  // epilogue.
  double clocks(const PersistentTile& tile) const {
    const double area = static_cast<double>(tile.rows) * tile.tokens;
    const double bytes = 128.0 * (tile.rows + tile.tokens);
    const double steps = static_cast<double>(up(inputs_, 64)) / tile.split_k;
    const double product = steps * std::max(area / kSumsPerClock, bytes / kBytesPerClock);
    const double own = area / tile.split_k;  // sums of a block's epilogue
    const double sent = 4 * own * (tile.split_k - 1);
    const double exchange = tile.split_k > 1 ? kExchange + sent / kSentPerClock : 0;
    const double finish = own / (gates_ > 1 ? kStepsPerClock : kFinishedPerClock) + exchange;
    const double waves = static_cast<double>(up(blocks(tile), at_once(tile.split_k)));
    const double weights = 2.0 * rows_ * inputs_ / kWeightBytesPerClock;
    return std::max(waves * product + (waves - 1) * finish, weights) + finish;
  }

  std::int64_t rows_, inputs_, gates_, tokens_;
  bool whole_, serial_;
};

}  // namespace minserve
