// Arguments of the argmax head; shared by host and device code.
#pragma once

#include <cstdint>

#include "args.h"

namespace minserve {

// Rows of weights of a tile, which has a best of each token; PART of engine/ops/gemm.py.
constexpr int kArgmaxColumns = 256;

struct ArgmaxHeadArgs : DeferredNorm {
  std::int64_t tokens = 0;
  std::int64_t channels = 0;    // rows of weights
  std::int64_t vocabulary = 0;  // of these; the others are padding
  std::int64_t inputs = 0;
  std::int64_t tiles = 0;         // of kArgmaxColumns rows of weights
  const void* bias = nullptr;     // [channels], or null
  std::uint64_t* best = nullptr;  // [tokens, tiles], as ArgmaxKey
};

}  // namespace minserve
