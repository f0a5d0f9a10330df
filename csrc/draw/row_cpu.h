// One row's draw on the CPU: weights from the instruction set's loops, the cut by partial sorting.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "draw.h"

namespace minserve {

class RowDraw {
 public:
  RowDraw(const DrawArgs& args, const DrawKernels& kernels) : args_(args), kernels_(kernels) {}

  // The token of row r, or -1 where its best logit is not finite.
  std::int32_t token(std::int64_t r) {
    const float* logits = args_.logits + r * args_.row_stride;
    const float best = kernels_.best(logits, args_.vocab);
    if (!std::isfinite(best)) return -1;
    if (!(args_.temperature[r] > 0)) {
      return static_cast<std::int32_t>(std::find(logits, logits + args_.vocab, best) - logits);
    }
    const auto size = static_cast<std::size_t>(args_.vocab);
    distances_.resize(size);
    weights_.resize(size);
    kernels_.weigh(logits, args_.vocab, best, std::max(args_.temperature[r], kLeastTemperature),
                   distances_.data(), weights_.data());
    drop_unlikely(args_.min_p[r]);
    const bool has_top_k = args_.top_k[r] > 0 && args_.top_k[r] < args_.vocab;
    if (has_top_k || args_.top_p[r] < 1.0) {
      keep_top(has_top_k ? args_.top_k[r] : args_.vocab, args_.top_p[r], has_top_k);
    }
    return drawn(uniform_number(args_.streams[r], args_.positions[r]));
  }

 private:
  // A token's place in the order of (distance, id).
  struct Rank {
    std::uint64_t key;
    std::uint32_t id() const { return static_cast<std::uint32_t>(key); }
    bool operator<(const Rank& other) const { return key < other.key; }
  };
  using Ranks = std::vector<Rank>;

  std::uint64_t weight(const Rank& rank) const {
    return static_cast<std::uint64_t>(weights_[rank.id()]);
  }

  // min_p is relative to the best, so what top_k and top_p leave does not matter to it; but they
  // look at all tokens, so it takes weights away only after they have been ranked.
  void drop_unlikely(float min_p) {
    farthest_ = min_p > 0 ? -static_cast<float>(std::log(static_cast<double>(min_p))) : INFINITY;
  }

  void keep_top(std::int64_t top_k, double top_p, bool has_top_k) {
    ranks_.clear();
    for (std::size_t id = 0; id < weights_.size(); ++id) {
      if (weights_[id] == 0) continue;
      std::uint32_t bits;
      std::memcpy(&bits, &distances_[id], sizeof bits);
      bits &= 0x7fffffffu;  // -0.0 is 0.0
      ranks_.push_back({static_cast<std::uint64_t>(bits) << 32 | id});
    }
    auto end = ranks_.end();
    if (top_k < end - ranks_.begin()) {
      end = ranks_.begin() + top_k;
      std::nth_element(ranks_.begin(), end, ranks_.end());
    }
    std::uint64_t total = 0;
    for (auto rank = ranks_.begin(); rank != end; ++rank) total += weight(*rank);
    if (has_nucleus(top_p, has_top_k, total)) {
      end = nucleus_end(ranks_.begin(), end, nucleus_limit(top_p, total));
    }
    for (auto rank = end; rank != ranks_.end(); ++rank) weights_[rank->id()] = 0;
  }

  // Puts those before which less than `limit` is summed first; the end of them.
  Ranks::iterator nucleus_end(Ranks::iterator from, Ranks::iterator to, std::uint64_t limit) {
    std::uint64_t before = 0;
    // Everything before `from` is in; what is at `to` and after is not.
    while (from != to) {
      const auto middle = from + (to - from) / 2;
      std::nth_element(from, middle, to);
      std::uint64_t half = 0;
      for (auto rank = from; rank != middle; ++rank) half += weight(*rank);
      if (before + half >= limit) {
        to = middle;
      } else {
        before += half + weight(*middle);
        from = middle + 1;
      }
    }
    return to;
  }

  std::int32_t drawn(double number) {
    std::uint64_t total = 0;
    for (std::size_t id = 0; id < weights_.size(); ++id) {
      if (!(distances_[id] <= farthest_)) weights_[id] = 0;
      total += static_cast<std::uint64_t>(weights_[id]);
    }
    const std::uint64_t target = drawn_weight(number, total);
    std::uint64_t sum = 0;
    std::size_t id = 0;
    while ((sum += static_cast<std::uint64_t>(weights_[id])) <= target) ++id;
    return static_cast<std::int32_t>(id);
  }

  const DrawArgs& args_;
  const DrawKernels& kernels_;
  float farthest_ = INFINITY;
  std::vector<float> distances_;
  std::vector<std::int64_t> weights_;
  Ranks ranks_;
};

}  // namespace minserve
