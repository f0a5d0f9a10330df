// What operators ask of a cell before a kernel runs: its name and the shapes of what it reads. Host
// code only.
#pragma once

#include <string>

#include "../core/tensor_checks.h"
#include "kind.h"

namespace minserve {

// The numbers of the cell's struct (gates.h says what they mean), for all of a channel.
struct CellTraits {
  const char* name;
  int preactivations, inputs, parameters, states, outputs;
  bool has_options;
};
const CellTraits& traits_of(CellKind kind);

// Throws for options that a cell does not have.
void check_options(const Check& check, CellKind kind, bool linear_candidate, bool normalize_gates);

// The cell of this name. Throws for a name that no cell has, and says which there are.
CellKind cell_named(const Check& check, const std::string& name);

namespace detail {
[[noreturn]] void refuse_cell(const Check& check, CellKind kind, bool (*has)(CellKind));
}

// The same for one of Cells; throws for others, and says which there are kernels of.
template <class Cells>
CellKind require_cell(const Check& check, const std::string& name) {
  const CellKind kind = cell_named(check, name);
  if (!Cells::has(kind)) detail::refuse_cell(check, kind, &Cells::has);
  return kind;
}

}  // namespace minserve
