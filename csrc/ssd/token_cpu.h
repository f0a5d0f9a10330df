// One token of Mamba-2's recurrence on the CPU: each state is read and written once.
#pragma once

#include "../core/states_cpu.h"

namespace minserve {
namespace MS_ISA {

constexpr int kQuad = 4;  // rows of a state that are computed side by side

MS_CELL VF all_lanes(float x) {
  return x - VF{};
}

// h <- kept h + added[row] B of kRows rows; sums[row] += the products of B's neighbour C and h.
template <int kRows, class S, class L>
MS_CELL void advance(S* h, std::int64_t states, VF kept, const VF (&added)[kRows], VF b, VF c,
                     VF (&sums)[kRows], L lanes) {
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
    S* const at = h + r * states;
    __builtin_prefetch(at + 2 * kQuad * states, 1);  // a step reads states once, row after row
    const VF after = fmadd(kept, load<VF>(at, lanes), added[r] * b);
    store(at, after, lanes);
    sums[r] = fmadd(c, after, sums[r]);
  }
}

// The same for all states of the rows; the sums begin with zero.
template <int kRows, class S>
MS_CELL void advance_rows(S* h, const float* B, const float* C, std::int64_t states, float kept,
                          const float* added, VF* sums_of) {
  const VF left = all_lanes(kept);
  VF add[kRows], sums[kRows] = {};
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) add[r] = all_lanes(added[r]);
  std::int64_t n = 0;
  for (; n + kWidth <= states; n += kWidth) {
    advance(h + n, states, left, add, load<VF>(B + n, Full{}), load<VF>(C + n, Full{}), sums,
            Full{});
  }
  if (n < states) {
    const Part rest{static_cast<int>(states - n)};
    advance(h + n, states, left, add, load<VF>(B + n, rest), load<VF>(C + n, rest), sums, rest);
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) sums_of[r] = sums[r];
}

// h <- kept h + added B^T, y = h C, of up to kWidth rows; returns their y. h: [rows, states], of
// floats or of bfloat16, which is rounded behind y.
template <class S>
MS_CELL VF advance_token(S* h, const float* B, const float* C, std::int64_t states, float kept,
                         VF added, int rows) {
  alignas(64) float add[kWidth];
  store(add, added, Full{});
  VF sums[kWidth] = {};
  int r = 0;
  for (; r + kQuad <= rows; r += kQuad) {
    advance_rows<kQuad>(h + r * states, B, C, states, kept, add + r, sums + r);
  }
  for (; r < rows; ++r) advance_rows<1>(h + r * states, B, C, states, kept, add + r, sums + r);
  return sums_of_each(sums);
}

}  // namespace MS_ISA
}  // namespace minserve
