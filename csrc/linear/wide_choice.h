// Which wide form of a linear map's kernel a call of many tokens takes, if any. No CUDA in here.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>

#include "form.h"

namespace minserve {

struct WideForm {
  Form form;
  int rows, tokens, parts;
};

constexpr WideForm kWideForms[] = {
    {Form::wide_256_128, 256, 128, 1}, {Form::wide_192_128, 192, 128, 1},
    {Form::wide_128_128, 128, 128, 1}, {Form::wide_128_128, 128, 128, 2},
    {Form::wide_128_64, 128, 64, 2},
};

// Fitted to measurements like choice.h.
class WideChooser {
 public:
  // whole: every block has all inputs.
  WideChooser(std::int64_t channels, std::int64_t inputs, std::int64_t gates, std::int64_t tokens,
              bool whole)
      : rows_(channels * gates),
        inputs_(inputs),
        gates_(gates),
        tokens_(tokens),
        whole_(whole || gates == 3) {}

  // Whether there are tiles for the GPU: whole ones, fewer where they take long; or of long sums
  // halves and thin ones.
  bool pays() const {
    if (small_steps()) return true;
    const std::int64_t tiles = up(rows_, 128) * up(tokens_, 128);
    // Fitted to sums that may be cut into parts.
    const std::int64_t long_sums = gates_ > 1 ? 768 : 1024, short_ones = gates_ > 1 ? 120 : 72;
    const std::int64_t few = whole_ ? 120 : inputs_ < long_sums ? short_ones : 48;
    if (tokens_ > 64 && tiles >= few) return true;
    return tokens_ > 128 && inputs_ >= 1024 && tiles >= (whole_ ? 90 : inputs_ < 2048 ? 12 : 16);
  }

  // The quickest by its clocks.
  Choice choose() const {
    if (small_steps()) return {Form::wide_64_64, 2};
    const WideForm* best = std::begin(kWideForms);
    for (const WideForm& form : kWideForms) {
      if (can_take(form) && (!can_take(*best) || clocks(form) < clocks(*best))) best = &form;
    }
    return {best->form, best->parts};
  }

 private:
  static constexpr std::int64_t kMultiprocessors = 132;
  static constexpr double kSumsPerClock = 32;  // of 64 inputs
  static constexpr double kBytesPerClock = 42;
  static constexpr double kStepsPerClock = 2.5, kFinishedPerClock = 5;
  static constexpr double kExchange = 3000;

  static std::int64_t up(std::int64_t n, std::int64_t by) { return (n + by - 1) / by; }

  // Steps of two gates in halves of small tiles, three at once on a multiprocessor.
  bool small_steps() const {
    const std::int64_t blocks = up(rows_, 64) * up(tokens_, 64) * 2;
    return gates_ == 2 && !whole_ && tokens_ >= 64 && inputs_ >= 768 && blocks >= 72 &&
           blocks <= 3 * kMultiprocessors && (inputs_ < 1024 || tokens_ == 64);
  }

  std::int64_t blocks(const WideForm& form) const {
    return up(rows_, form.rows) * up(tokens_, form.tokens) * form.parts;
  }
  bool can_take(const WideForm& form) const {
    if (gates_ == 3) return form.rows == 192;            // a warpgroup for each
    if (gates_ == 2 && form.tokens == 64) return false;  // small_steps() has that of steps
    if (gates_ == 2 && form.rows == 192 && inputs_ >= 1024) return false;  // always behind
    // Blocks with parts have one tile, and inputs.
    return form.parts == 1 ||
           (!whole_ && blocks(form) <= kMultiprocessors && inputs_ >= 64 * form.parts);
  }

  // A multiprocessor's: products, or copies where the L2 cache gives less than they take; then
  // finishing.
  double clocks(const WideForm& form) const {
    const double area = static_cast<double>(form.rows) * form.tokens;
    const double bytes = 128.0 * (form.rows + form.tokens);
    const double steps = static_cast<double>(up(inputs_, 64)) / form.parts;
    const double product = steps * std::max(area / kSumsPerClock, bytes / kBytesPerClock);
    const double finish =
        area / (gates_ > 1 ? kStepsPerClock : kFinishedPerClock) + (form.parts > 1 ? kExchange : 0);
    return static_cast<double>(up(blocks(form), kMultiprocessors)) * (product + finish);
  }

  std::int64_t rows_, inputs_, gates_, tokens_;
  bool whole_;
};

}  // namespace minserve
