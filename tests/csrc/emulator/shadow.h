// Who touched which word of a block's shared memory, and whether they may have met.
//
// Each thread has a clock that tells, for every thread of the block, up to which of its barriers
// this one has heard of it. Two accesses of one word, not both reads, are in order only if the
// later thread has heard of the earlier access. What is in no order here is in no order on a GPU
// either, whatever the outcome was in this run.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace emulator {

struct Clock {
  std::vector<std::uint32_t> at;  // by thread
  void join(const Clock& other) {
    if (at.size() < other.at.size()) at.resize(other.at.size());
    for (std::size_t i = 0; i < other.at.size(); ++i) {
      at[i] = at[i] < other.at[i] ? other.at[i] : at[i];
    }
  }
};

class Shadow {
 public:
  static constexpr std::size_t kWord = 4;  // two threads must not share one, as two-byte halves
  Shadow(std::size_t bytes, unsigned threads)
      : words_((bytes + kWord - 1) / kWord), threads_(threads) {}

  // Each answers what is wrong, or nothing.
  std::string read(std::size_t offset, std::size_t bytes, unsigned thread, const Clock& clock) {
    if (!inside(offset, bytes)) return outside(offset);
    for (std::size_t i = offset / kWord; i * kWord < offset + bytes; ++i) {
      Word& word = words_[i];
      if (word.copier) return before_wait("reads", i, word);
      if (word.writer && clock.at[word.writer - 1] < word.written) {
        return race("reads", i, word.writer, "wrote");
      }
      note_reader(word, thread, clock);
    }
    return {};
  }
  std::string write(std::size_t offset, std::size_t bytes, unsigned thread, const Clock& clock) {
    if (!inside(offset, bytes)) return outside(offset);
    for (std::size_t i = offset / kWord; i * kWord < offset + bytes; ++i) {
      Word& word = words_[i];
      if (word.copier) return before_wait("writes", i, word);
      if (word.writer && clock.at[word.writer - 1] < word.written) {
        return race("writes", i, word.writer, "wrote");
      }
      if (const unsigned reader = unheard_reader(word, clock)) {
        return race("writes", i, reader, "read");
      }
      word.writer = thread + 1, word.written = clock.at[thread];
      word.reader = 0;
      word.readers.reset();
    }
    return {};
  }
  // From its start to the wait for it a copy may write at any time.
  std::string start_copy(std::size_t offset, std::size_t bytes, unsigned thread,
                         const Clock& clock) {
    const std::string wrong = write(offset, bytes, thread, clock);
    if (!wrong.empty()) return "(by a copy that it starts) " + wrong;
    for (std::size_t i = offset / kWord; i * kWord < offset + bytes; ++i) {
      words_[i].copier = thread + 1;
    }
    return {};
  }
  void land_copy(std::size_t offset, std::size_t bytes, unsigned thread, const Clock& clock) {
    for (std::size_t i = offset / kWord; i * kWord < offset + bytes; ++i) {
      words_[i].copier = 0;
      words_[i].writer = thread + 1, words_[i].written = clock.at[thread];
    }
  }

 private:
  struct Word {
    std::uint32_t written = 0, read = 0;               // the thread's own time then
    std::uint16_t writer = 0, reader = 0, copier = 0;  // thread + 1, or 0 for none
    std::unique_ptr<std::uint32_t[]> readers;          // where there are several: time by thread
  };

  void note_reader(Word& word, unsigned thread, const Clock& clock) {
    const std::uint32_t now = clock.at[thread];
    if (word.readers) {
      word.readers[thread] = now + 1;
    } else if (!word.reader || word.reader == thread + 1 ||
               clock.at[word.reader - 1] >= word.read) {
      word.reader = static_cast<std::uint16_t>(thread + 1), word.read = now;
    } else {
      word.readers.reset(new std::uint32_t[threads_]());
      word.readers[word.reader - 1] = word.read + 1;
      word.readers[thread] = now + 1;
    }
  }
  // thread + 1
  unsigned unheard_reader(const Word& word, const Clock& clock) const {
    if (word.readers) {
      for (unsigned t = 0; t < threads_; ++t) {
        if (word.readers[t] && clock.at[t] < word.readers[t] - 1) return t + 1;
      }
      return 0;
    }
    return word.reader && clock.at[word.reader - 1] < word.read ? word.reader : 0;
  }

  bool inside(std::size_t offset, std::size_t bytes) const {
    return offset + bytes <= words_.size() * kWord;
  }
  static std::string outside(std::size_t offset) {
    return "touches shared memory outside of what was asked for, at byte " + std::to_string(offset);
  }
  static std::string race(const char* verb, std::size_t word, unsigned other, const char* did) {
    return std::string(verb) + " shared memory at byte " + std::to_string(word * kWord) +
           ", which thread " + std::to_string(other - 1) + " " + did + " with no barrier between";
  }
  static std::string before_wait(const char* verb, std::size_t index, const Word& word) {
    return std::string(verb) + " shared memory at byte " + std::to_string(index * kWord) +
           " before thread " + std::to_string(word.copier - 1) + " has waited for its copy there";
  }

  std::vector<Word> words_;
  unsigned threads_;
};

}  // namespace emulator
