// The alignment that kernels of whole models need of a state's rows.
#pragma once

#include <cstdint>

#include "tensor_checks.h"

namespace minserve {

// Whether two neighbouring channels can be read at once in every row.
inline bool in_pairs(const Tensor& state) {
  bool even = reinterpret_cast<std::uintptr_t>(state.const_data_ptr()) % 8 == 0;
  for (std::int64_t dim = 0; dim + 1 < state.dim(); ++dim)
    even = even && state.stride(dim) % 2 == 0;
  return even && state.stride(state.dim() - 1) == 1;
}

}  // namespace minserve
