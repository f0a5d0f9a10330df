// Rows of logits on the CPU, shared out to torch's threads.
#pragma once

#include <algorithm>

#include "../core/tensor_checks.h"

namespace minserve {

// kernel(args, begin, end) does rows [begin, end).
template <class Args, class Kernel>
void by_rows(const Args& args, const Kernel& kernel) {
  const std::int64_t grain = std::max<std::int64_t>(1, kGrainElements / args.vocab);
  torch::stable::parallel_for(
      0, args.rows, grain, [&](std::int64_t begin, std::int64_t end) { kernel(args, begin, end); });
}

}  // namespace minserve
