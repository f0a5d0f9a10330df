// target_logprobs and report_logprobs_: checks, outputs, arguments, the choice of the device's
// kernel.
#include "../../core/operators.h"
#include "../parallel_rows.h"
#include "logprobs.h"

namespace minserve {

namespace {

// What both take.
LogprobsArgs of_rows(const Check& check, const Tensor& logits_given, const Tensor& logits) {
  check.tensor(logits_given, "logits", ScalarType::Float, {-1, -1}, "[rows, vocab]");
  LogprobsArgs args;
  args.rows = logits_given.size(0);
  args.vocab = logits_given.size(1);
  check.require(args.vocab >= 1 && args.vocab <= INT32_MAX,
                "logits must have a vocabulary of 1 to 2**31 - 1 tokens, got ",
                describe(logits_given));
  args.logits = logits.const_data_ptr<float>();
  args.row_stride = logits.stride(0);
  return args;
}

Tensor in_rows(const Tensor& logits) {
  const bool already = logits.dim() == 2 && (logits.stride(1) == 1 || logits.size(1) == 1);
  return already ? logits : torch::stable::contiguous(logits);
}

// Changed in place, so every element follows the one before it.
std::int32_t* changed(const Check& check, const Tensor& t, const char* name) {
  std::int64_t stride = 1;
  bool contiguous = true;
  for (std::int64_t d = t.dim() - 1; d >= 0; --d) {
    contiguous = contiguous && (t.size(d) <= 1 || t.stride(d) == stride);
    stride *= t.size(d);
  }
  check.require(contiguous, name, " is changed in place, so it must be contiguous");
  return static_cast<std::int32_t*>(t.mutable_data_ptr());
}

void run_logprobs(const LogprobsArgs& args, const Tensor& logits) {
  if (args.rows == 0) return;
  if (logits.is_cpu()) return by_rows(args, MS_BY_ISA(logprob_rows));
#ifdef MINSERVE_CUDA
  cuda::logprobs(args, logits.get_device_index(), current_stream(logits));
#else
  no_cuda();
#endif
}

}  // namespace

Tensor target_logprobs(const Tensor& logits_given, const Tensor& targets_given, std::int64_t top) {
  const Check check("target_logprobs", logits_given, "logits");
  const Tensor logits = in_rows(logits_given);
  LogprobsArgs args = of_rows(check, logits_given, logits);
  check.tensor(targets_given, "targets", ScalarType::Long, {args.rows}, "[rows]");
  const std::int64_t most = args.vocab < kMostTop ? args.vocab : kMostTop;
  check.require(top >= 0 && top <= most, "top must be 0 to ", most, ", got ", top);
  const Tensor targets = torch::stable::contiguous(targets_given);
  args.targets = targets.const_data_ptr<std::int64_t>();
  // Values on the GPU are not looked at: that would stall it.
  for (std::int64_t r = 0; targets.is_cpu() && r < args.rows; ++r) {
    check.require(args.targets[r] >= 0 && args.targets[r] < args.vocab,
                  "targets must be tokens of the vocabulary of ", args.vocab, ", got ",
                  args.targets[r], " at index ", r);
  }
  args.top = static_cast<std::int32_t>(top);
  Tensor reports =
      torch::stable::new_empty(logits, {args.rows, words_of_report(args.top)}, ScalarType::Int);
  args.reports = static_cast<std::int32_t*>(reports.mutable_data_ptr());
  run_logprobs(args, logits);
  return reports;
}

void report_logprobs_(const Tensor& logits_given, const Tensor& tops_given,
                      const Tensor& cursor_given, const Tensor& out_given, const Tensor& told,
                      const Tensor& reports) {
  const Check check("report_logprobs_", logits_given, "logits");
  const Tensor logits = in_rows(logits_given);
  LogprobsArgs args = of_rows(check, logits_given, logits);
  const std::int64_t rows = args.rows;
  check.tensor(tops_given, "tops", ScalarType::Int, {rows}, "[rows]");
  check.tensor(cursor_given, "cursor", ScalarType::Int, {rows}, "[rows]");
  check.tensor(out_given, "out", ScalarType::Int, {-1, rows}, "[steps, rows]");
  check.tensor(told, "told", ScalarType::Int, {rows}, "[rows]");
  args.steps = out_given.size(0);
  check.tensor(reports, "reports", ScalarType::Int, {args.steps, rows, -1}, "[steps, rows, words]");
  const std::int64_t words = reports.size(2), room = (words - 2) / 2;
  check.require(words >= 2 && words % 2 == 0 && room <= kMostTop,
                "reports must have 2 words and 2 for each of up to ", kMostTop,
                " best tokens, got ", words);
  check.require(room <= args.vocab, "reports have room for ", room, " best tokens of ", args.vocab);
  const Tensor tops = torch::stable::contiguous(tops_given);
  const Tensor cursor = torch::stable::contiguous(cursor_given);
  const Tensor out = torch::stable::contiguous(out_given);
  args.top = static_cast<std::int32_t>(room);
  args.tops = tops.const_data_ptr<std::int32_t>();
  args.cursor = cursor.const_data_ptr<std::int32_t>();
  args.out = out.const_data_ptr<std::int32_t>();
  args.out_stride = rows;
  args.told = changed(check, told, "told");
  args.reports = changed(check, reports, "reports");
  run_logprobs(args, logits);
}

}  // namespace minserve
