// The wide forms of a linear map's kernel (wide.cuh), and how long each would take. No CUDA in
// here, so that the choice can be tested anywhere.
#pragma once

#include <algorithm>
#include <cstdint>

namespace minserve {

struct WideForm {
  int sets, groups, blocks;  // sets of warpgroups in turn; groups of a set; blocks of rows of each
  int tokens;
  int share, parts;  // blocks that share tokens, or have a part of the inputs each
  int resident;      // blocks on a multiprocessor

  constexpr int rows() const { return groups * blocks * 64; }
  constexpr bool suits(std::int64_t gates) const {
    return gates < 3 || (groups == 3 && blocks == 1);
  }
};

constexpr WideForm kWideForms[] = {
    {1, 2, 1, 128, 1, 1, 1}, {1, 2, 1, 128, 2, 1, 1}, {1, 2, 1, 128, 1, 2, 1},
    {1, 2, 1, 128, 1, 4, 1}, {1, 2, 2, 128, 1, 1, 1}, {1, 2, 2, 128, 2, 1, 1},
    {1, 2, 1, 160, 1, 1, 1}, {1, 2, 1, 208, 1, 1, 1}, {1, 3, 1, 128, 1, 1, 1},
    {1, 3, 1, 128, 2, 1, 1}, {1, 1, 1, 128, 1, 1, 2}, {2, 1, 2, 128, 1, 1, 1},
    {2, 1, 2, 128, 2, 1, 1},
};
constexpr int kWideCount = sizeof(kWideForms) / sizeof(kWideForms[0]);

struct WideCall {
  std::int64_t channels, inputs, gates, tokens;

  // Blocks of the form, and rounds of them that the multiprocessors take.
  std::int64_t blocks(const WideForm& form) const {
    const std::int64_t rows = form.rows() * form.share;
    return (channels * gates + rows - 1) / rows * form.share *
           ((tokens + form.tokens - 1) / form.tokens) * form.parts;
  }
  bool can_take(const WideForm& form) const {
    // Blocks with parts have one tile; a part has inputs.
    return form.suits(gates) &&
           (form.parts == 1 ||
            (blocks(form) <= kMultiprocessors * form.resident && inputs >= 128 * form.parts));
  }

  // A multiprocessor's clocks: products, or copies where the L2 cache gives less than they take;
  // and finishing, which only a second set hides.
  double clocks(const WideForm& form) const {
    const double area = static_cast<double>(form.rows()) * form.tokens;
    const double bytes = 128.0 * (form.rows() + static_cast<double>(form.tokens) / form.share);
    const double steps = static_cast<double>((inputs + 63) / 64) / form.parts;
    const double product = steps * std::max(area / kSumsPerClock, bytes / kBytesPerClock);
    const double finish =
        area / (gates > 1 ? kStepsPerClock : kFinishedPerClock) + (form.parts > 1 ? kExchange : 0);
    const std::int64_t all = blocks(form), slots = kMultiprocessors * form.resident;
    const auto rounds = static_cast<double>((all + slots - 1) / slots);
    const auto here = static_cast<double>(
        std::min<std::int64_t>(form.resident, (all + kMultiprocessors - 1) / kMultiprocessors));
    if (form.sets == 2) return rounds * std::max(product, finish) + finish;
    return rounds * (product * here + finish);
  }

  // The quickest; one can always be taken.
  int choose() const {
    int best = -1;
    for (int i = 0; i < kWideCount; ++i) {
      if (!can_take(kWideForms[i])) continue;
      if (best < 0 || clocks(kWideForms[i]) < clocks(kWideForms[best])) best = i;
    }
    return best;
  }

 private:
  static constexpr std::int64_t kMultiprocessors = 132;
  static constexpr double kSumsPerClock = 32;  // of 64 inputs
  static constexpr double kBytesPerClock = 42;
  static constexpr double kStepsPerClock = 2.5, kFinishedPerClock = 5;
  static constexpr double kExchange = 3000;
};

}  // namespace minserve
