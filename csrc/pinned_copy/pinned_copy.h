// Arguments of copy_words_; shared by host and device code.
#pragma once

#include <cstdint>

namespace minserve {

struct CopyArgs {
  std::int32_t* to = nullptr;  // [count]
  std::int32_t* source = nullptr;
  std::int64_t count = 0;
  std::int64_t first_zero = 0, zeros = 0;  // words of the source that are 0 afterwards
  bool to_on_host = false, source_on_host = false;
};

#ifdef MINSERVE_CUDA
namespace cuda {
// Enqueues on the stream. Throws if the device does not see the host's memory.
void copy_words(CopyArgs args, int device, void* stream);
}  // namespace cuda
#endif

}  // namespace minserve
