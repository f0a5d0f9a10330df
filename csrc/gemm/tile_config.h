// The forms of a linear map's kernel. No CUDA in here, so that the choice can be tested anywhere.
#pragma once

namespace minserve {

enum class Form {
  tokens_8,  // 64 rows of weights (or of channels, with all gates) by so many tokens
  tokens_16,
  tokens_32,
  tokens_64,   // one block to a multiprocessor, with a longer ring
  wide_64_32,  // persistent_kernel.cuh: rows of weights by tokens
  wide_64_64,
  wide_128_64,
  wide_192_64,
  wide_192_96,
  wide_128_128,
  wide_192_128,
  wide_256_128,
};

struct Choice {
  Form form;
  int parts;      // blocks that share the inputs
  int turns = 1;  // parts of them that each block takes in turn (heuristics_deterministic.h)
};

}  // namespace minserve
