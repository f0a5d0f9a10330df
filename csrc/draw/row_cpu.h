// One row's draw on the CPU: weights from the instruction set's loops; where the filters cut, from
// sums over bins of distances and partial sorting of the bin that holds the cut.
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
    const float farthest =
        kernels_.weigh(logits, args_.vocab, best, octaves_of(args_.temperature[r]),
                       distances_.data(), weights_.data());
    scale_ = farthest > 1e-30f ? kBins / farthest : 0.0f;
    const bool has_top_k = args_.top_k[r] > 0 && args_.top_k[r] < args_.vocab;
    Cut cut;
    if (has_top_k) cut = top_k_cut(static_cast<std::uint64_t>(args_.top_k[r]));
    if (has_top_k || args_.top_p[r] < 1.0) cut = top_p_cut(cut, args_.top_p[r], has_top_k);
    if (args_.min_p[r] > 0) {
      const auto bits = bits_of(
          std::max(0.0f, -static_cast<float>(std::log2(static_cast<double>(args_.min_p[r])))));
      if (bits < cut.distance) cut = {bits, 0xffffffffu};
    }
    return drawn(cut, uniform_number(args_.streams[r], args_.positions[r]));
  }

 private:
  static constexpr int kBins = 1024;
  using Keys = std::vector<std::uint64_t>;  // distance bits << 32 | id

  static std::uint32_t bits_of(float distance) {
    std::uint32_t bits;
    std::memcpy(&bits, &distance, sizeof bits);
    return bits & 0x7fffffffu;  // -0.0 is 0.0
  }
  static std::uint32_t id_of(std::uint64_t key) { return static_cast<std::uint32_t>(key); }
  std::uint64_t weight(std::size_t id) const { return static_cast<std::uint64_t>(weights_[id]); }

  Cut top_k_cut(std::uint64_t top_k) {
    const auto one = [](std::size_t) -> std::uint64_t { return 1; };
    return sum_bins(Cut{}, one) > top_k ? last_below(top_k, Cut{}, one) : Cut{};
  }
  Cut top_p_cut(Cut allowed, double top_p, bool has_top_k) {
    const auto weight_of = [this](std::size_t id) { return weight(id); };
    const std::uint64_t total = sum_bins(allowed, weight_of);
    if (!has_nucleus(top_p, has_top_k, total)) return allowed;
    const std::uint64_t limit = nucleus_limit(top_p, total);
    return total > limit ? last_below(limit, allowed, weight_of) : allowed;
  }

  // Calls visit(id, bin) for every allowed token that has a weight.
  template <class Visit>
  void each(Cut allowed, Visit visit) const {
    for (std::size_t id = 0; id < weights_.size(); ++id) {
      if (weights_[id] == 0) continue;
      const int bin = std::min(kBins - 1, static_cast<int>(distances_[id] * scale_));
      if (allowed.keeps(bits_of(distances_[id]), static_cast<std::uint32_t>(id))) visit(id, bin);
    }
  }
  template <class Measure>
  std::uint64_t sum_bins(Cut allowed, Measure measure) {
    sums_.assign(kBins, 0);
    each(allowed, [&](std::size_t id, int bin) { sums_[bin] += measure(id); });
    std::uint64_t total = 0;
    for (const std::uint64_t sum : sums_) total += sum;
    return total;
  }

  // The last token before which the better ones sum to less than the limit, which all together do
  // not; after sum_bins of the same.
  template <class Measure>
  Cut last_below(std::uint64_t limit, Cut allowed, Measure measure) {
    std::uint64_t before = 0;
    int holding = 0;
    while (before + sums_[holding] < limit) before += sums_[holding++];
    keys_.clear();
    each(allowed, [&](std::size_t id, int bin) {
      if (bin == holding) {
        keys_.push_back(static_cast<std::uint64_t>(bits_of(distances_[id])) << 32 | id);
      }
    });
    auto from = keys_.begin(), to = keys_.end();
    // What ranks before `from` is kept; what is at `to` or after is not. The first is kept.
    while (from != to) {
      const auto middle = from + (to - from) / 2;
      std::nth_element(from, middle, to);
      std::uint64_t half = 0;
      for (auto key = from; key != middle; ++key) half += measure(id_of(*key));
      if (before + half >= limit) {
        to = middle;
      } else {
        before += half + measure(id_of(*middle));
        from = middle + 1;
      }
    }
    const std::uint64_t last = *std::max_element(keys_.begin(), to);
    return {static_cast<std::uint32_t>(last >> 32), id_of(last)};
  }

  std::int32_t drawn(Cut cut, double number) {
    std::uint64_t total = 0;
    for (std::size_t id = 0; id < weights_.size(); ++id) {
      if (!cut.keeps(bits_of(distances_[id]), static_cast<std::uint32_t>(id))) weights_[id] = 0;
      total += weight(id);
    }
    const std::uint64_t target = drawn_weight(number, total);
    std::uint64_t sum = 0;
    std::size_t id = 0;
    while ((sum += weight(id)) <= target) ++id;
    return static_cast<std::int32_t>(id);
  }

  const DrawArgs& args_;
  const DrawKernels& kernels_;
  float scale_ = 0.0f;  // bins per distance
  std::vector<float> distances_;
  std::vector<std::int64_t> weights_;
  std::vector<std::uint64_t> sums_;  // of the bins
  Keys keys_;
};

}  // namespace minserve
