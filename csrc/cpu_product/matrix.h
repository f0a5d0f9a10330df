// A packed matrix in memory, and rows of what it multiplies. No torch in here.
//
// A matrix of `outputs` x `inputs` is cut into panels of 16 outputs, four panels to a group (three
// where three gates lie side by side); a group is stored step after step along the inputs, all its
// panels side by side, so that whoever multiplies with neighbouring outputs reads memory in one
// straight run:
//   float32   a step is one input:  [panel][16 outputs]
//   bfloat16  a step is two inputs: [panel][16 outputs][2 inputs]
//   int8      a step is two inputs: [panel][2 inputs][16 outputs]
// Outputs beyond the last, and an odd last input's partner, are zeros.
#pragma once

#include "../core/types.h"

namespace minserve {

constexpr std::int64_t kPanel = 16;      // outputs of a panel
constexpr std::int64_t kMostPanels = 4;  // of a group

MS_HD std::int64_t up_to(std::int64_t n, std::int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

enum class Kind : std::int64_t { f32 = 0, bf16 = 1, i8 = 2 };

struct Matrix {
  const char* data = nullptr;  // null: there is none
  const float* scale = nullptr;
  const float* bias = nullptr;
  Kind stored = Kind::f32;
  std::int64_t inputs = 0;
  std::int64_t outputs = 0;  // of each gate
  std::int64_t gates = 1;    // matrices whose panels alternate
  bool in_order = false;     // a prompt's rows come one after the other, to one thread

  std::int64_t panels() const { return gates * ((outputs + kPanel - 1) / kPanel); }
  std::int64_t group() const { return gates == 3 ? 3 : kMostPanels; }
  std::int64_t steps() const { return stored == Kind::f32 ? inputs : (inputs + 1) / 2; }
  std::int64_t step_bytes() const { return stored == Kind::i8 ? 2 * kPanel : 4 * kPanel; }
  std::int64_t bytes() const { return panels() * steps() * step_bytes(); }
  // Where panel `panel` begins, and how far its steps lie apart.
  const char* at(std::int64_t panel, std::int64_t& stride) const {
    const std::int64_t first = panel / group() * group();
    const std::int64_t together = panels() - first < group() ? panels() - first : group();
    stride = together * step_bytes();
    return data + first * steps() * step_bytes() + (panel - first) * step_bytes();
  }
};

// Bytes from one row of what feeds a matrix to the next: whole panels, and a line more, without
// which all rows of many a width would take turns in a few sets of the first-level cache.
MS_HD std::int64_t fed_row_bytes(std::int64_t width, std::int64_t element) {
  return up_to(up_to(width, kPanel) * element, 64) + 64;
}

}  // namespace minserve
