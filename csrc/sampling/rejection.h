// Sampling from all tokens, for host and device: what a row without top_k tries first. No torch in
// here.
//
// A token sampled from all of them that top_p and min_p keep is a sample from those that are kept,
// for it leaves them their odds to each other (von Neumann's rejection, 1951). Whether they keep
// one token is known for less than where they cut, and top_p = 0.9 rejects one in ten. After
// kAttempts rejections the token is sampled from the kept ones.
//
// An attempt takes one number. Rows have sections of kSection neighbours, whose tokens are weighed
// beside the section's own best: so a section's sum is known when its logits have been read once,
// before the row's best is. The number finds a section by what these sums weigh beside the row's
// best, and what is left of it the token. Weights and sums are integers, as those beside the row's
// best are, and no order of summation changes them.
#pragma once

#include "sample.h"

namespace minserve {

constexpr int kAttempts = 8;
constexpr std::int64_t kSection = 512;
// Others are sampled at once: few tokens cost next to nothing, and sums of more sections than 512
// have no room where they are looked at.
constexpr std::int64_t kLeastRejectionVocab = 1025, kMostRejectionVocab = 512 * kSection;

MS_HD bool uses_rejection(std::int64_t vocab, std::int32_t top_k) {
  const bool has_top_k = top_k > 0 && top_k < vocab;
  return !has_top_k && vocab >= kLeastRejectionVocab && vocab <= kMostRejectionVocab;
}

// What a section weighs beside the row's best, whose tokens weigh `sum` beside its own, which is up
// to 2**47, and whose best one has this scaled probability in the row. Nothing where all of it
// together is not 2**-38 as likely as the best.
MS_HD std::uint64_t section_weight(std::uint64_t sum, float scaled_prob) {
  return static_cast<std::uint64_t>(static_cast<double>(static_cast<std::int64_t>(sum)) *
                                    static_cast<double>(scaled_prob));
}

// Of a section that the number finds, because sampled_weight(number, total) is at least `before`
// and less than that and `weight`: the token is the first, in id order, at which the sum of the
// weights beside the section's best, `sum` of all, passes this.
MS_HD std::uint64_t sampled_of_section(double number, std::uint64_t total, std::uint64_t before,
                                       std::uint64_t weight, std::uint64_t sum) {
  const double place = number * static_cast<double>(static_cast<std::int64_t>(total));
  const double left = place - static_cast<double>(static_cast<std::int64_t>(before));
  const double share = left / static_cast<double>(static_cast<std::int64_t>(weight));
  const double at = share * static_cast<double>(static_cast<std::int64_t>(sum));
  const auto target = at > 0.0 ? static_cast<std::uint64_t>(at) : 0;  // `place` may be rounded
  return target < sum ? target : sum - 1;
}

}  // namespace minserve
