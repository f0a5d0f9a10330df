// One row's sampling on the CPU: weights from the instruction set's loops; where attempts do not
// settle it, where the filters cut, from sums over bins of distances and partial sorting of the bin
// that holds the cut.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "rejection.h"

namespace minserve {

class RowSampler {
 public:
  RowSampler(const SampleArgs& args, const SampleKernels& kernels)
      : args_(args), kernels_(kernels) {}

  // The token of row r, or -1 where its best logit is not finite.
  std::int32_t token(std::int64_t r) {
    logits_ = args_.logits + r * args_.row_stride;
    const RowParameters given(args_, r);
    const bool by_rejection = given.temperature > 0 && uses_rejection(args_.vocab, given.top_k);
    best_ = by_rejection ? best_of_sections() : kernels_.best(logits_, args_.vocab);
    if (!std::isfinite(best_)) return -1;
    if (!(given.temperature > 0)) {
      return static_cast<std::int32_t>(kernels_.first(logits_, args_.vocab, best_));
    }
    octaves_ = octaves_of(given.temperature);
    const auto size = static_cast<std::size_t>(args_.vocab);
    distances_.resize(size);
    weights_.resize(size);
    if (by_rejection) {
      find_section_weights();
      const std::int32_t token = accepted_attempt(given, args_.positions[r]);
      if (token >= 0) return token;
    }
    // Attempts have weighed already, where they are asked what ranks before them.
    if (!by_rejection || !(given.top_p < 1.0)) find_weights();
    const bool has_top_k = given.top_k > 0 && given.top_k < args_.vocab;
    if (has_top_k || given.top_p < 1.0) {
      bins_.resize(size);
      kernels_.bin(distances_.data(), args_.vocab, farthest_ > 1e-30f ? kRowBins / farthest_ : 0.0f,
                   bins_.data());
    }
    Cut cut;
    if (has_top_k) cut = top_k_cut(static_cast<std::uint64_t>(given.top_k));
    if (has_top_k || given.top_p < 1.0) cut = top_p_cut(cut, given.top_p, has_top_k);
    if (given.min_p > 0) {
      const std::uint32_t bits = min_p_distance(given.min_p);
      if (bits < cut.distance) cut = {bits, 0xffffffffu};
    }
    const int rejected = by_rejection ? kAttempts : 0;
    return sampled(cut, uniform_number(given.stream, args_.positions[r], rejected));
  }

 private:
  static constexpr std::int64_t kLook = 256;  // tokens that are looked at together
  using Keys = std::vector<std::uint64_t>;    // distance bits << 32 | id

  static std::uint32_t bits_of(float distance) {
    std::uint32_t bits;
    std::memcpy(&bits, &distance, sizeof bits);
    return bits & 0x7fffffffu;  // -0.0 is 0.0
  }
  static std::uint32_t id_of(std::uint64_t key) { return static_cast<std::uint32_t>(key); }
  std::uint64_t weight(std::size_t id) const { return static_cast<std::uint64_t>(weights_[id]); }
  static std::uint32_t min_p_distance(float min_p) {
    return bits_of(std::max(0.0f, -static_cast<float>(std::log2(static_cast<double>(min_p)))));
  }

  void find_weights() {
    farthest_ = kernels_.find_weights(logits_, args_.vocab, best_, octaves_, distances_.data(),
                                      weights_.data());
  }
  float distance_to(float logit) const {
    return std::min((best_ - logit) * octaves_, 2 * kFarthest);
  }

  struct Section {
    std::int64_t first, tokens;
    float best;
    std::uint64_t sum, weight;  // beside its best, and beside the row's
  };
  float best_of_sections() {
    sections_.clear();
    float best = kernels_.best(logits_, 1);
    for (std::int64_t first = 0; first < args_.vocab; first += kSection) {
      const std::int64_t tokens = std::min(kSection, args_.vocab - first);
      const float own = kernels_.best(logits_ + first, tokens);
      if (std::isnan(own)) return own;
      best = std::max(best, own);
      sections_.push_back({first, tokens, own, 0, 0});
    }
    return best;
  }
  void find_section_weights() {
    section_weights_.resize(static_cast<std::size_t>(args_.vocab));
    sections_weight_ = 0;
    for (Section& section : sections_) {
      if (!std::isfinite(section.best)) continue;  // none of its tokens is possible
      std::int64_t* const weights = section_weights_.data() + section.first;
      kernels_.find_weights(logits_ + section.first, section.tokens, section.best, octaves_,
                            distances_.data(), weights);
      section.sum = kernels_.before(distances_.data(), section.tokens, Cut(), weights);
      section.weight = section_weight(section.sum, kernels_.scaled_prob(distance_to(section.best)));
      sections_weight_ += section.weight;
    }
  }
  // The token sampled from all of them after so many were rejected.
  std::int32_t attempt(const RowParameters& given, std::int64_t position, int rejected) const {
    const double number = uniform_number(given.stream, position, rejected);
    const std::uint64_t target = sampled_weight(number, sections_weight_);
    std::uint64_t before = 0;
    std::size_t at = 0;
    while (target - before >= sections_[at].weight) before += sections_[at++].weight;
    const Section& section = sections_[at];
    const std::uint64_t of_section =
        sampled_of_section(number, sections_weight_, before, section.weight, section.sum);
    auto id = static_cast<std::size_t>(section.first);
    std::uint64_t sum = 0;
    while ((sum += static_cast<std::uint64_t>(section_weights_[id])) <= of_section) ++id;
    return static_cast<std::int32_t>(id);
  }
  // The first of the attempts that the filters keep, or -1.
  std::int32_t accepted_attempt(const RowParameters& given, std::int64_t position) {
    std::uint64_t limit = 0;
    if (given.top_p < 1.0) {
      find_weights();
      limit = nucleus_limit(given.top_p, sum_before(Cut()));
    }
    for (int rejected = 0; rejected < kAttempts; ++rejected) {
      const std::int32_t token = attempt(given, position, rejected);
      const Cut own = {bits_of(distance_to(logits_[token])), static_cast<std::uint32_t>(token)};
      if (given.min_p > 0 && own.distance > min_p_distance(given.min_p)) continue;
      if (!(given.top_p < 1.0) || sum_before(own) < limit) return token;
    }
    return -1;
  }
  std::uint64_t sum_before(const Cut& cut) const {
    return kernels_.before(distances_.data(), args_.vocab, cut, weights_.data());
  }

  Cut top_k_cut(std::uint64_t top_k) {
    const auto one = [this](std::size_t id) -> std::uint64_t { return weights_[id] != 0; };
    return sum_bins(one) > top_k ? last_below(top_k, one) : Cut{};
  }
  Cut top_p_cut(Cut allowed, double top_p, bool has_top_k) {
    const auto weight_of = [this](std::size_t id) { return weight(id); };
    const std::uint64_t allowed_total = has_top_k ? keep(allowed) : 0;
    if (has_top_k && !has_nucleus(top_p, has_top_k, allowed_total)) return allowed;
    const std::uint64_t total = sum_bins(weight_of), limit = nucleus_limit(top_p, total);
    return total > limit ? last_below(limit, weight_of) : allowed;
  }

  // Of the measures of all tokens. Neighbours are added to bins of their own: an addition to the
  // same bin waits for the one before.
  template <class Measure>
  std::uint64_t sum_bins(Measure measure) {
    constexpr std::size_t kApart = 2;
    sums_.assign(kApart * kRowBins, 0);
    std::uint64_t* const sums = sums_.data();
    const std::uint16_t* const bins = bins_.data();
    std::size_t id = 0;
    for (; id + kApart <= bins_.size(); id += kApart) {
      for (std::size_t set = 0; set < kApart; ++set) {
        sums[set * kRowBins + bins[id + set]] += measure(id + set);
      }
    }
    for (; id < bins_.size(); ++id) sums[bins[id]] += measure(id);
    std::uint64_t total = 0;
    for (std::size_t bin = 0; bin < kRowBins; ++bin) {
      for (std::size_t set = 1; set < kApart; ++set) sums[bin] += sums[set * kRowBins + bin];
      total += sums[bin];
    }
    return total;
  }

  // The last token before which the better ones sum to less than the limit, which all together do
  // not; after sum_bins of the same.
  template <class Measure>
  Cut last_below(std::uint64_t limit, Measure measure) {
    std::uint64_t before = 0;
    std::uint16_t holding = 0;
    while (before + sums_[holding] < limit) before += sums_[holding++];
    keys_.clear();
    for (std::int64_t first = 0; first < args_.vocab; first += kLook) {
      const std::int64_t count = std::min(kLook, args_.vocab - first);
      if (!kernels_.holds(bins_.data() + first, count, holding)) continue;
      for (auto id = static_cast<std::size_t>(first); id < static_cast<std::size_t>(first + count);
           ++id) {
        if (bins_[id] == holding && weights_[id] != 0) {
          keys_.push_back(static_cast<std::uint64_t>(bits_of(distances_[id])) << 32 | id);
        }
      }
    }
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

  // Tokens that rank behind the cut get weight 0. Returns the sum of the others.
  std::uint64_t keep(Cut cut) {
    pieces_.resize(static_cast<std::size_t>((args_.vocab + kPiece - 1) / kPiece));
    kernels_.keep(distances_.data(), args_.vocab, cut, weights_.data(), pieces_.data());
    std::uint64_t total = 0;
    for (const std::int64_t piece : pieces_) total += static_cast<std::uint64_t>(piece);
    return total;
  }

  std::int32_t sampled(Cut cut, double number) {
    const std::uint64_t total = keep(cut);
    const std::uint64_t target = sampled_weight(number, total);
    std::uint64_t sum = 0;
    std::size_t piece = 0;
    while (sum + static_cast<std::uint64_t>(pieces_[piece]) <= target) {
      sum += static_cast<std::uint64_t>(pieces_[piece++]);
    }
    std::size_t id = piece * static_cast<std::size_t>(kPiece);
    while ((sum += weight(id)) <= target) ++id;
    return static_cast<std::int32_t>(id);
  }

  const SampleArgs& args_;
  const SampleKernels& kernels_;
  // Of the row that is sampled.
  const float* logits_ = nullptr;
  float best_ = 0, octaves_ = 0, farthest_ = 0;
  std::vector<Section> sections_;
  std::uint64_t sections_weight_ = 0;
  std::vector<std::int64_t> section_weights_;  // of the tokens, as all that follow
  std::vector<float> distances_;
  std::vector<std::int64_t> weights_;
  std::vector<std::uint16_t> bins_;
  std::vector<std::uint64_t> sums_;   // of the bins
  std::vector<std::int64_t> pieces_;  // sums of neighbouring weights
  Keys keys_;
};

}  // namespace minserve
