// What adjust_ does to a row of logits, for host and device. No torch in here.
//
// A row may have a mask: tokens whose bit is 0 become impossible. A slot has a record: what its
// request penalises, and where entries are, of tokens whose logits it changes. Penalties count the
// tokens of prompt and answer in a row of words: twice the number of times that a token is in the
// answer, and one more where it is in the prompt.
#pragma once

#include "../../core/cpu_isa.h"
#include "../../core/types.h"

namespace minserve {

struct LogitsProcessorArgs {
  float* logits = nullptr;  // [rows, vocab], rows row_stride apart
  std::int64_t row_stride = 0;
  std::int64_t rows = 0;
  std::int64_t vocab = 0;
  const std::int32_t* tokens = nullptr;     // [rows]
  const std::int32_t* slots = nullptr;      // [rows]
  const std::int64_t* positions = nullptr;  // [rows]
  const std::int32_t* records = nullptr;    // [slots, kRecordWords]
  std::int64_t count = 0;                   // of records
  // Bit t of a row of masks, from the lowest of the first word, is token t; null where there are
  // none.
  const std::int32_t* masks = nullptr;    // [masked, mask_words]
  const std::int32_t* mask_of = nullptr;  // [rows]: of each row, or negative
  std::int64_t masked = 0, mask_words = 0;
};

constexpr std::int64_t kRecordWords = 8, kEntryWords = 3;
constexpr std::int32_t kInAnswer = 2;  // each time
constexpr int kAhead = 8;              // tokens that a thread looks at together
constexpr float kInfinity = __builtin_huge_valf();
constexpr float kMostLogit = 3.402823466e38f;

MS_HD float bounded(float x) {
  return x > kMostLogit ? kMostLogit : x < -kMostLogit ? -kMostLogit : x;
}
// What is not finite stays as it is, that sampling sees it; what is, stays so.
MS_HD float unless_broken(float logit, float processed) {
  return logit - logit != 0.0f ? logit : bounded(processed);
}
// Of an impossible token.
MS_HD float banned(float logit) {
  return logit <= kMostLogit ? -kInfinity : logit;
}

// As it lies in memory: the addresses of counts and of entries, or 0; three floats; how many
// entries.
class Record {
 public:
  struct Entry {
    std::int32_t id;
    float value;         // is added to the logit
    std::int32_t until;  // at positions below
  };

  MS_HD Record(const LogitsProcessorArgs& args, std::int32_t slot)
      : words_(args.records + slot * kRecordWords) {}

  MS_HD std::int32_t* counts() const { return address(0); }  // [vocab], or null
  MS_HD std::int64_t entries() const { return words_[7]; }
  MS_HD Entry entry(std::int64_t i) const {
    const std::int32_t* const at = address(2) + i * kEntryWords;
    return {at[0], as_float(at + 1), at[2]};
  }

  // A token's logit, whose count is not 0: repetition (Keskar et al., arXiv 1909.05858) divides a
  // positive one and multiplies a negative one, for tokens of prompt and answer; presence and
  // frequency (OpenAI) are subtracted, once and each time, for tokens of the answer.
  MS_HD float penalised(float logit, std::int32_t count) const {
    const float repetition = as_float(words_ + 4);
    const float scaled = bounded(logit > 0.0f ? logit / repetition : logit * repetition);
    const std::int32_t times = count / kInAnswer;
    if (times == 0) return unless_broken(logit, scaled);
    const float once = bounded(scaled - as_float(words_ + 5));
    const float each = bounded(as_float(words_ + 6) * static_cast<float>(times));
    return unless_broken(logit, once - each);
  }

 private:
  MS_HD std::int32_t* address(int at) const {
    const auto low = static_cast<std::uint32_t>(words_[at]);
    const auto high = static_cast<std::uint64_t>(static_cast<std::uint32_t>(words_[at + 1]));
    return reinterpret_cast<std::int32_t*>(high << 32 | low);
  }
  MS_HD static float as_float(const std::int32_t* word) {
    float value;
    __builtin_memcpy(&value, word, sizeof(value));
    return value;
  }

  const std::int32_t* const words_;
};

// The words of a row's mask, or null.
MS_HD const std::int32_t* mask_of(const LogitsProcessorArgs& args, std::int64_t r) {
  if (!args.masks) return nullptr;
  const std::int32_t which = args.mask_of[r];
  return which < 0 || which >= args.masked ? nullptr : args.masks + which * args.mask_words;
}

// Tokens [begin, end) of a row, by one of `threads` threads; `meet` is a barrier for these. A row
// may be cut into pieces, each with threads of its own.
template <class Meet>
MS_HD void process_piece(const LogitsProcessorArgs& args, std::int64_t r, std::int64_t begin,
                         std::int64_t end, std::int64_t thread, std::int64_t threads, Meet meet) {
  const std::int32_t slot = args.slots[r];
  if (slot < 0 || slot >= args.count) return;
  const Record record(args, slot);
  const std::int32_t* const mask = mask_of(args, r);
  std::int32_t* const counts = record.counts();
  const std::int64_t entries = record.entries(), position = args.positions[r];
  float* const logits = args.logits + r * args.row_stride;
  if (mask || counts) {
    // The one that this step reads was sampled for the answer, but for the prompt's last.
    const std::int64_t read = position > 0 ? args.tokens[r] : -1;
    for (std::int64_t first = begin + thread; first < end; first += kAhead * threads) {
      // All are asked for before anything is written.
      std::int32_t ahead[kAhead];
      float logit[kAhead];
      for (int k = 0; k < kAhead; ++k) {
        const std::int64_t id = first + k * threads;
        ahead[k] = counts && id < end ? counts[id] : 0;
        logit[k] = mask && id < end ? logits[id] : 0.0f;
      }
      for (int k = 0; k < kAhead; ++k) {
        const std::int64_t id = first + k * threads;
        if (id >= end) break;
        std::int32_t count = ahead[k];
        if (counts && id == read) counts[id] = count += kInAnswer;
        if (mask && !(static_cast<std::uint32_t>(mask[id / 32]) >> id % 32 & 1)) {
          logits[id] = banned(logit[k]);
        } else if (count) {
          logits[id] = record.penalised(mask ? logit[k] : logits[id], count);
        }
      }
    }
  }
  if (entries <= 0) return;
  const auto each = [&](bool bans, auto act) {
    for (std::int64_t i = thread; i < entries; i += threads) {
      const Record::Entry entry = record.entry(i);
      const bool is_here = entry.id >= begin && entry.id < end;
      if (is_here && position < entry.until && (entry.value == -kInfinity) == bans) {
        act(logits[entry.id], entry.value);
      }
    }
  };
  meet();
  each(false, [](float& logit, float value) { logit = unless_broken(logit, logit + value); });
  meet();
  each(true, [](float& logit, float) { logit = banned(logit); });
}

// Does rows [begin, end) on the CPU.
MS_DECLARE_PER_ISA(void process_rows(const LogitsProcessorArgs& args, std::int64_t begin,
                                     std::int64_t end);)

#ifdef MINSERVE_CUDA
namespace cuda {
// Enqueues on the stream.
void process_logits(const LogitsProcessorArgs& args, int device, void* stream);
}  // namespace cuda
#endif

}  // namespace minserve
