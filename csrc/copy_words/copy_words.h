// Arguments of copy_words_; shared by host and device code.
#pragma once

#include <cstdint>

namespace minserve {

struct CopyArgs {
  std::int32_t* to = nullptr;  // [count]
  std::int32_t* from = nullptr;
  std::int64_t count = 0;
  std::int64_t first_zero = 0, zeros = 0;  // words of `from` that are 0 afterwards
  bool to_host = false, from_host = false;
};

}  // namespace minserve
