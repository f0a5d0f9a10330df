// Which cell: for arguments of kernels. No torch and no std templates in here (see core/vec.h).
#pragma once

namespace minserve {

enum class CellKind : int {
#define MINSERVE_CELL(name, Forward, Backward) name,
#include "cells.def"
#undef MINSERVE_CELL
};

constexpr int kCells = 0
#define MINSERVE_CELL(name, Forward, Backward) +1
#include "cells.def"
#undef MINSERVE_CELL
    ;

// The cells that a family of kernels computes. Each family names its own: what is not in the list
// is neither compiled nor computed.
template <CellKind... kKinds>
struct CellList {
  static constexpr bool has(CellKind kind) { return ((kind == kKinds) || ...); }
};

// Throws; for callers that have not asked require_cell() (traits.h) first.
[[noreturn]] void no_kernel_of(CellKind kind);

}  // namespace minserve
