// Which wide form of a linear map's kernel a call of many tokens takes, if any. No CUDA in here.
#pragma once

#include <algorithm>
#include <cstdint>

#include "tile_config.h"

namespace minserve {

struct PersistentTile {
  TileConfig form;
  int rows, tokens, parts;
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

// Fitted to measurements like heuristics.h: of maps of 6 million to 1.3 billion weights' models, in
// their layers, with 40 to 2,048 tokens.
class PersistentHeuristic {
 public:
  // What a block may have of the inputs.
  enum class Inputs {
    any,    // all, or a part
    whole,  // all
    turns,  // all, and takes parts of them in turn
  };

  PersistentHeuristic(std::int64_t channels, std::int64_t inputs, std::int64_t gates,
                      std::int64_t tokens, Inputs inputs_of_block)
      : rows_(channels * gates),
        inputs_(inputs),
        gates_(gates),
        tokens_(tokens),
        whole_(inputs_of_block != Inputs::any || gates == 3),
        turns_(inputs_of_block == Inputs::turns) {}

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
    for (const PersistentTile& form : kPersistentTiles) {
      if (can_take(form) && (!best || clocks(form) < clocks(*best))) best = &form;
    }
    return *best;
  }

  // Blocks that run at the same time. Fours leave out what is over of a group of multiprocessors.
  static constexpr std::int64_t at_once(int parts) { return parts == 4 ? 112 : kMultiprocessors; }

  std::int64_t blocks(const PersistentTile& form) const {
    return up(rows_, form.rows) * up(tokens_, form.tokens) * form.parts;
  }

 private:
  static constexpr double kSumsPerClock = 32;  // of 64 inputs
  static constexpr double kBytesPerClock = 42, kWeightBytesPerClock = 1700;
  static constexpr double kStepsPerClock = 2.5, kFinishedPerClock = 5;
  static constexpr double kExchange = 1000, kSentPerClock = 5.5;

  static std::int64_t up(std::int64_t n, std::int64_t by) { return (n + by - 1) / by; }

  bool can_take(const PersistentTile& form) const {
    // Two sets of sums, and finishing gates takes registers, too.
    if (turns_ && form.rows * form.tokens > 192 * (gates_ > 1 ? 96 : 128)) return false;
    if (form.form == TileConfig::persistent_64_32 && !turns_) return false;  // too small
    if (gates_ == 3) return form.rows == 192 && form.parts == 1;             // a warpgroup for each
    if (gates_ == 2 && (form.parts > 1 || (form.rows == 192 && inputs_ >= 1024))) {
      return false;  // always behind
    }
    // Blocks with parts have one tile, and inputs.
    return form.parts == 1 ||
           (!whole_ && blocks(form) <= at_once(form.parts) && inputs_ >= 64 * form.parts);
  }

  // A multiprocessor's: products, or copies where the L2 cache gives less than they take, what
  // parts send each other, and finishing; or all weights where memory gives less, and finishing the
  // last tile.
  double clocks(const PersistentTile& form) const {
    const double area = static_cast<double>(form.rows) * form.tokens;
    const double bytes = 128.0 * (form.rows + form.tokens);
    const double steps = static_cast<double>(up(inputs_, 64)) / form.parts;
    const double product = steps * std::max(area / kSumsPerClock, bytes / kBytesPerClock);
    const double own = area / form.parts;  // sums that a block finishes
    const double sent = 4 * own * (form.parts - 1);
    const double exchange = form.parts > 1 ? kExchange + sent / kSentPerClock : 0;
    const double finish = own / (gates_ > 1 ? kStepsPerClock : kFinishedPerClock) + exchange;
    const double waves = static_cast<double>(up(blocks(form), at_once(form.parts)));
    const double weights = 2.0 * rows_ * inputs_ / kWeightBytesPerClock;
    return std::max(waves * product + (waves - 1) * finish, weights) + finish;
  }

  std::int64_t rows_, inputs_, gates_, tokens_;
  bool whole_, turns_;
};

}  // namespace minserve
