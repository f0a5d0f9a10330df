// Arguments of fetch_; shared by host and device code.
#pragma once

#include <cstdint>

namespace minserve {

struct FetchArgs {
  std::int32_t* words = nullptr;  // [count], on the device
  std::int32_t* host = nullptr;   // [count]
  std::int64_t count = 0;
  std::int64_t first_zero = 0, zeros = 0;  // words that are 0 afterwards
};
}  // namespace minserve
