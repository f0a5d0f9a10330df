// The place of one element of a sequence, as cells see it.
#pragma once

#include "vec.h"

namespace minserve {
namespace MS_ISA {

struct At {
  std::int64_t sequence;
  std::int64_t begin;  // rows of the sequence
  std::int64_t end;
  std::int64_t row;
  std::int64_t channel;
};

// For a backward cell: the state before this element in forward order, from the saved outputs or
// h0. backward_reverse is the direction of the backward scan, the opposite of the forward one.
template <class V, class T, class S, class L>
MS_CELL V previous_state(const T* h, const S* h0, const At& at, std::int64_t channels,
                         bool backward_reverse, L lanes) {
  const bool first = backward_reverse ? at.row == at.begin : at.row == at.end - 1;
  if (!first) {
    const std::int64_t row = backward_reverse ? at.row - 1 : at.row + 1;
    return load<V>(h + row * channels + at.channel, lanes);
  }
  if (!h0) return splat<V>(0.0f);
  return load<V>(h0 + at.sequence * channels + at.channel, lanes);
}

}  // namespace MS_ISA
}  // namespace minserve
