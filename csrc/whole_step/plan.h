// What operators of whole models read of a plan, and ask of a state.
#pragma once

#include <cstdint>

#include "../common/operators.h"

namespace minserve {

inline const void* pointer(std::int64_t address) {
  return reinterpret_cast<const void*>(static_cast<std::uintptr_t>(address));
}

// Whether two neighbouring channels can be read at once in every row.
inline bool in_pairs(const Tensor& state) {
  bool even = reinterpret_cast<std::uintptr_t>(state.const_data_ptr()) % 8 == 0;
  for (std::int64_t dim = 0; dim + 1 < state.dim(); ++dim)
    even = even && state.stride(dim) % 2 == 0;
  return even && state.stride(state.dim() - 1) == 1;
}

}  // namespace minserve
