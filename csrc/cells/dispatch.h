// From a cell's kind to its code, for kernels that are templates of the cell.
#pragma once

#include "hgrn.h"
#include "kind.h"
#include "mingru.h"
#include "minlstm.h"

namespace minserve {
namespace MS_ISA {

// A cell as an argument, from which function templates deduce it.
template <template <class> class CellOf>
struct CellTag {
  using Traits = CellOf<float>;
};

// Calls f with the CellTag of a cell, which must be one of Cells.
template <class Cells, class F>
inline void with_cell(CellKind kind, F&& f) {
  switch (kind) {
#define MINSERVE_CELL(name, Forward, Backward)                              \
  case CellKind::name:                                                      \
    if constexpr (Cells::has(CellKind::name)) return f(CellTag<Forward>{}); \
    break;
#include "cells.def"
#undef MINSERVE_CELL
  }
  no_kernel_of(kind);
}

}  // namespace MS_ISA
}  // namespace minserve
