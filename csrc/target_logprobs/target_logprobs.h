// Arguments of target_logprobs. No torch in here.
#pragma once

#include "../common/types.h"

namespace minserve {

struct TargetArgs {
  const float* logits = nullptr;  // [rows, vocab], rows row_stride apart
  std::int64_t row_stride = 0;
  std::int64_t rows = 0;
  std::int64_t vocab = 0;
  const std::int64_t* targets = nullptr;  // [rows]
  float* logprobs = nullptr;              // [rows]
  bool* is_greedy = nullptr;              // [rows]
};

}  // namespace minserve
