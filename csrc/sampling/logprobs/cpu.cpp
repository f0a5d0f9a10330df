// Log-probabilities of given tokens on the CPU: a row is read from memory once, from cache again.
#include "../../core/exp_cpu.h"
#include "logprobs.h"

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

// The `count` best tokens of a row so far, best first.
class TopLogprobs {
 public:
  explicit TopLogprobs(std::int32_t count) : count_(count) {}

  // Ids ascend, so an equal logit comes after those that are here.
  void add(float logit, std::int64_t id) {
    if (size_ == count_ && !(logit > logits_[size_ - 1])) return;
    std::int32_t at = size_ < count_ ? size_++ : size_ - 1;
    for (; at > 0 && logit > logits_[at - 1]; --at) {
      logits_[at] = logits_[at - 1];
      ids_[at] = ids_[at - 1];
    }
    logits_[at] = logit;
    ids_[at] = static_cast<std::int32_t>(id);
  }
  std::int32_t size() const { return size_; }
  float logit(std::int32_t rank) const { return logits_[rank]; }
  std::int32_t id(std::int32_t rank) const { return ids_[rank]; }

 private:
  const std::int32_t count_;
  std::int32_t size_ = 0;
  float logits_[kMostTop];
  std::int32_t ids_[kMostTop];
};

std::int32_t bits_of(float x) {
  std::int32_t bits;
  __builtin_memcpy(&bits, &x, sizeof(bits));
  return bits;
}

bool holds(const float* logits, std::int64_t count, float wanted) {
  bool found = false;
  for (std::int64_t i = 0; i < count; ++i) found |= logits[i] == wanted;
  return found;
}

void report(const LogprobsArgs& args, std::int64_t r, const LogprobsRequest& request) {
  const float* logits = args.logits + r * args.row_stride;
  const float best = best_logit(logits, args.vocab);
  const bool finite = best - best == 0.0f;
  const float nan = __builtin_nanf("");
  const bool exists = request.target >= 0 && request.target < args.vocab;
  const float chosen = finite && exists ? logits[request.target] : nan;
  const float log_sum =
      finite ? static_cast<float>(::log(sum_of_exp(logits, args.vocab, best))) : 0;
  const auto logprob = [&](float logit) { return bits_of((logit - best) - log_sum); };
  request.report[0] = logprob(chosen);
  request.report[1] = chosen == best && !holds(logits, request.target, best);
  if (request.top == 0) return;
  TopLogprobs top(request.top);
  for (std::int64_t id = 0; finite && id < args.vocab; ++id) top.add(logits[id], id);
  for (std::int32_t rank = 0; rank < request.top; ++rank) {
    std::int32_t* const words = request.report + words_of_report(rank);
    words[0] = rank < top.size() ? top.id(rank) : 0;
    words[1] = logprob(rank < top.size() ? top.logit(rank) : nan);
  }
}

}  // namespace

void logprob_rows(const LogprobsArgs& args, std::int64_t begin, std::int64_t end) {
  for (std::int64_t r = begin; r < end; ++r) {
    const LogprobsRequest request(args, r);
    if (!request.report) continue;
    report(args, r, request);
    if (args.told) ++args.told[r];
  }
}

}  // namespace MS_ISA
}  // namespace minserve
