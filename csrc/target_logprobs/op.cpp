// target_logprobs: checks, outputs, arguments.
#include "../common/operators.h"
#include "target_logprobs.h"

namespace minserve {

std::tuple<Tensor, Tensor> target_logprobs(const Tensor& logits_given,
                                           const Tensor& targets_given) {
  const Check check("target_logprobs", logits_given, "logits");
  check.tensor(logits_given, "logits", ScalarType::Float, {-1, -1}, "[rows, vocab]");
  TargetArgs args;
  args.rows = logits_given.size(0);
  args.vocab = logits_given.size(1);
  check.require(args.vocab >= 1 && args.vocab <= INT32_MAX,
                "logits must have a vocabulary of 1 to 2**31 - 1 tokens, got ",
                describe(logits_given));
  check.tensor(targets_given, "targets", ScalarType::Long, {args.rows}, "[rows]");
  const bool in_rows = logits_given.stride(1) == 1 || args.vocab == 1;
  const Tensor logits = in_rows ? logits_given : torch::stable::contiguous(logits_given);
  const Tensor targets = torch::stable::contiguous(targets_given);
  args.logits = logits.const_data_ptr<float>();
  args.row_stride = logits.stride(0);
  args.targets = targets.const_data_ptr<std::int64_t>();
  // Values on the GPU are not looked at: that would stall it.
  for (std::int64_t r = 0; targets.is_cpu() && r < args.rows; ++r) {
    check.require(args.targets[r] >= 0 && args.targets[r] < args.vocab,
                  "targets must be tokens of the vocabulary of ", args.vocab, ", got ",
                  args.targets[r], " at index ", r);
  }
  Tensor logprobs = torch::stable::new_empty(logits, {args.rows}, ScalarType::Float);
  Tensor is_greedy = torch::stable::new_empty(logits, {args.rows}, ScalarType::Bool);
  args.logprobs = static_cast<float*>(logprobs.mutable_data_ptr());
  args.is_greedy = static_cast<bool*>(is_greedy.mutable_data_ptr());
  run_target_logprobs(args, logits);
  return {logprobs, is_greedy};
}

}  // namespace minserve
