// Arrays in global memory, with room between them that nobody may touch.
//
// What one block writes in the plain way, no other may touch before the kernel's end: nothing
// orders the two. Words, which are loaded and stored whole, are for that.
#pragma once

#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "machine.h"

namespace emulator {

// Who touches an array, and how.
struct Access {
  Use use;
  bool word;        // as a whole word, in no order with others
  unsigned kernel;  // its number
  unsigned block;
  bool after_before;  // whether the kernel before has ended as far as this block knows
};

class Arrays {
 public:
  Arrays()
      : base_(static_cast<char*>(mmap(nullptr, kBytes, PROT_READ | PROT_WRITE,
                                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0))) {
    if (base_ == MAP_FAILED) std::abort();
  }

  void* allocate(const std::string& name, std::size_t bytes, Use use, std::size_t shift) {
    char* const at = base_ + used_ + kBetween + shift;
    used_ = (used_ + 2 * kBetween + shift + bytes) / 128 * 128;
    if (used_ > kBytes) std::abort();
    arrays_.push_back({name, at, at + bytes, use, std::vector<Written>(bytes / kHalf + 1)});
    std::memset(at, 0xff, bytes);
    return at;
  }
  void free_all() {
    arrays_.clear();
    used_ = 0;
  }

  bool holds(const void* at) const {
    return static_cast<const char*>(at) >= base_ && static_cast<const char*>(at) < base_ + kBytes;
  }
  // What is wrong with an access, or nothing.
  std::string check(const void* at, std::size_t bytes, const Access& access) {
    const char* const from = static_cast<const char*>(at);
    if (last_ >= arrays_.size() || !arrays_[last_].has(from, bytes)) {
      for (last_ = 0; last_ < arrays_.size() && !arrays_[last_].has(from, bytes);) ++last_;
    }
    const std::string verb = access.use == Use::read ? "reads " : "writes ";
    if (last_ == arrays_.size()) return verb + "outside of the arrays: " + place(at);
    Array& array = arrays_[last_];
    if (array.use == Use::read) {
      return access.use == Use::write ? verb + "what is to be read alone: " + place(at) : "";
    }
    const std::size_t offset = static_cast<std::size_t>(from - array.begin);
    for (std::size_t i = offset / kHalf; i * kHalf < offset + bytes; ++i) {
      Written& written = array.written[i];
      if (written.kernel && written.kernel != access.kernel + 1 && !access.after_before) {
        return verb + place(at) + ", which the kernel before may still write";
      }
      if (written.kernel == access.kernel + 1 && written.block != access.block &&
          !(written.word && access.word)) {
        return verb + place(at) + ", which block " + std::to_string(written.block) +
               " wrote, and nothing orders the two";
      }
      if (access.use == Use::write) {
        written = {static_cast<std::uint16_t>(access.block),
                   static_cast<std::uint8_t>(access.kernel + 1), access.word};
      }
    }
    return {};
  }
  // For messages: in an array, behind the nearest, or before the first.
  std::string place(const void* at) const {
    if (arrays_.empty()) return "nowhere";
    const Array* nearest = &arrays_.front();
    for (const Array& array : arrays_) {
      if (array.begin <= at) nearest = &array;
    }
    return nearest->name + " at byte " +
           std::to_string(static_cast<const char*>(at) - nearest->begin) + " of " +
           std::to_string(nearest->end - nearest->begin);
  }

 private:
  static constexpr std::size_t kBytes = std::size_t{1} << 30, kBetween = 1024;
  static constexpr std::size_t kHalf = 2;  // bytes of the smallest element
  struct Written {
    std::uint16_t block = 0;
    std::uint8_t kernel = 0;  // + 1, or 0 for none
    bool word = false;
  };
  struct Array {
    std::string name;
    char *begin, *end;
    Use use;
    std::vector<Written> written;
    bool has(const char* at, std::size_t bytes) const { return at >= begin && at + bytes <= end; }
  };
  char* base_;
  std::size_t used_ = 0, last_ = 0;
  std::vector<Array> arrays_;
};

}  // namespace emulator
