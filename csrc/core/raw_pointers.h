// Addresses that operators of whole models find in a plan, and what they ask of a state's.
#pragma once

#include <cstdint>

#include "operators.h"

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
