// The loops over a row's logits on the CPU, once per instruction set.
//
// Every instruction set gives the same bits.
#include "../common/kernels.h"
#include "draw.h"
#include "../common/exp_cpu.h"
#include "filters_cpu.h"

namespace minserve {
namespace MS_ISA {
namespace {

float weigh(const float* __restrict logits, std::int64_t vocab, float best, float octaves,
            float* __restrict distances, std::int64_t* __restrict weights) {
  constexpr double kMagic = 4503599627370496.0;  // 2^52: the sum's low bits are the integer
  for (std::int64_t i = 0; i < vocab; ++i) {
    const float exact = (best - logits[i]) * octaves;
    distances[i] = exact < 2 * kFarthest ? exact : 2 * kFarthest;
  }
  std::int32_t farthest = 0;  // as bits, which order as the distances do
  for (std::int64_t i = 0; i < vocab; ++i) {
    const std::int32_t bits = bit_cast<std::int32_t>(distances[i]);
    farthest = distances[i] <= kFarthest && bits > farthest ? bits : farthest;
  }
  for (std::int64_t i = 0; i < vocab; ++i) {
    const double weight =
        static_cast<double>(static_cast<float>(half_to(distances[i])) * kWeightOne);
    const double rounded = weight + kMagic;
    weights[i] = bit_cast<std::int64_t>(rounded) - bit_cast<std::int64_t>(kMagic) -
                 (rounded - kMagic > weight ? 1 : 0);
  }
  return bit_cast<float>(farthest);
}

}  // namespace

DrawKernels draw_kernels(Dtype) {
  return {&best_logit, &first_place, &weigh, &bin, &holds, &keep};
}

}  // namespace MS_ISA
}  // namespace minserve
