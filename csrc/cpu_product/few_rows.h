// Products of one or two rows on processors with AMX. They go by vectors, because reading weights
// is what takes time, with the bits that tiles give.
//
// What a tile instruction adds to a sum is (Intel's Software Developer's Manual, TDPBF16PS): the
// products of 16 even inputs, added up one by one from zero, plus those of the 16 odd ones. Each
// is added without rounding the product, and subnormal numbers count as zeros, as
// WithoutSubnormals has it.
#pragma once

#include "amx.h"

namespace minserve {
namespace MS_ISA {

constexpr std::int64_t kFewRows = 2;

// Two neighbouring inputs, or weights of two, as floats.
struct Pair {
  VF even, odd;
};
MS_CELL Pair pair_of(VU halves) {
  return {bit_cast<VF>(halves << 16), bit_cast<VF>(halves & 0xffff0000u)};
}
MS_CELL Pair step_of(const char* p, const WeightsHalf*) {
  return pair_of(vector_at<VU>(p));
}
MS_CELL Pair step_of(const char* p, const WeightsByte<FedHalf>*) {
  return {floats_of(vector_at<VB>(p)), floats_of(vector_at<VB>(p + kPanel))};
}

// sums [R, P panels] += rows [R, steps] times P panels; they lie kMostPanels panels apart.
template <class W, int R, int P>
inline __attribute__((noinline)) void few_rows_block(const char* weights, std::int64_t stride,
                                                     const char* fed, std::int64_t fed_stride,
                                                     std::int64_t steps, float* sums, bool begin,
                                                     Ahead ahead) {
  for (std::int64_t first = 0; first < steps; first += kTileSteps) {
    const std::int64_t count = steps - first < kTileSteps ? steps - first : kTileSteps;
    Pair sum[R][P] = {};
    for (std::int64_t s = 0; s < count; ++s) {
      ahead.fetch(1);
      Pair x[R];
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) x[r] = pair_of(WeightsHalf::input(fed + r * fed_stride));
#pragma GCC unroll 8
      for (int p = 0; p < P; ++p) {
        const Pair w = step_of(weights + p * W::kStepBytes, static_cast<const W*>(nullptr));
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          sum[r][p].even = fmadd(w.even, x[r].even, sum[r][p].even);
          sum[r][p].odd = fmadd(w.odd, x[r].odd, sum[r][p].odd);
        }
      }
      weights += stride;
      fed += kInputBytes<W>;
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int p = 0; p < P; ++p) {
        if (count < kTileSteps) {  // a tile is filled up with zeros, after which no sum is -0
          sum[r][p].even += 0.0f;
          sum[r][p].odd += 0.0f;
        }
        float* const at = sums + (r * kMostPanels + p) * kPanel;
        const VF before = begin && first == 0 ? splat<VF>(0.0f) : load<VF>(at, Full{});
        store(at, before + (sum[r][p].even + sum[r][p].odd), Full{});
      }
    }
  }
}

template <class W>
BlockFn few_rows_block_for(std::int64_t rows, std::int64_t panels) {
  constexpr BlockFn fns[kFewRows][kMostPanels] = {
      {&few_rows_block<W, 1, 1>, &few_rows_block<W, 1, 2>, &few_rows_block<W, 1, 3>,
       &few_rows_block<W, 1, 4>},
      {&few_rows_block<W, 2, 1>, &few_rows_block<W, 2, 2>, &few_rows_block<W, 2, 3>,
       &few_rows_block<W, 2, 4>},
  };
  return fns[rows - 1][panels - 1];
}

}  // namespace MS_ISA
}  // namespace minserve
