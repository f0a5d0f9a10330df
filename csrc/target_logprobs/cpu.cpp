// Log-probabilities of given tokens on the CPU: a row is read from memory once, from cache again.
#include "../common/exp_cpu.h"
#include "../common/kernels.h"
#include "target_logprobs.h"

namespace minserve {
namespace MS_ISA {
namespace {

// Partial sums side by side, as many on every instruction set, so that the bits are the same.
constexpr int kSums = 16;
constexpr float kNothing = 600.0f;  // exp of minus this adds nothing to a sum of 1 or more

double sum_of_exp(const float* logits, std::int64_t vocab, float best) {
  double sums[kSums] = {};
  std::int64_t i = 0;
  const auto add = [&](int lane) {
    const float distance = best - logits[i + lane];
    sums[lane] += exp_of_minus(distance < kNothing ? distance : kNothing);
  };
  for (; i + kSums <= vocab; i += kSums) {
    for (int lane = 0; lane < kSums; ++lane) add(lane);
  }
  for (int lane = 0; i + lane < vocab; ++lane) add(lane);
  double sum = 0.0;
  for (const double part : sums) sum += part;
  return sum;
}

bool holds(const float* logits, std::int64_t count, float wanted) {
  bool found = false;
  for (std::int64_t i = 0; i < count; ++i) found |= logits[i] == wanted;
  return found;
}

void target_rows(const TargetArgs& args, std::int64_t begin, std::int64_t end) {
  for (std::int64_t r = begin; r < end; ++r) {
    const float* logits = args.logits + r * args.row_stride;
    const float best = best_logit(logits, args.vocab);
    const float chosen = logits[args.targets[r]];
    if (!(best - best == 0.0f)) {  // NaN or infinite
      args.logprobs[r] = __builtin_nanf("");
      args.is_greedy[r] = false;
      continue;
    }
    const double sum = sum_of_exp(logits, args.vocab, best);
    args.logprobs[r] = (chosen - best) - static_cast<float>(::log(sum));
    args.is_greedy[r] = chosen == best && !holds(logits, args.targets[r], best);
  }
}

}  // namespace

TargetFn target_kernel(Dtype) {
  return &target_rows;
}

}  // namespace MS_ISA
}  // namespace minserve
