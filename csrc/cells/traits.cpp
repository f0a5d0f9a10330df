#include "traits.h"

#include "../core/operators.h"
#include "dispatch.h"

namespace minserve {

namespace {

template <template <class> class CellOf>
constexpr CellTraits traits(const char* name) {
  using Cell = CellOf<float>;
  return {name,          Cell::kPreactivations, Cell::kInputs,    Cell::kParameters,
          Cell::kStates, Cell::kOutputs,        Cell::kHasOptions};
}

constexpr CellTraits kTraits[] = {
#define MINSERVE_CELL(name, Forward, Backward) traits<generic::Forward>(#name),
#include "cells.def"
#undef MINSERVE_CELL
};

// Names of those that `has` accepts, or of all.
std::string names(bool (*has)(CellKind) = nullptr) {
  std::string all;
  for (int n = 0; n < kCells; ++n) {
    if (has && !has(static_cast<CellKind>(n))) continue;
    all += (all.empty() ? "" : ", ") + std::string(kTraits[n].name);
  }
  return all;
}

int number_of(const std::string& name) {
  for (int n = 0; n < kCells; ++n) {
    if (name == kTraits[n].name) return n;
  }
  return -1;
}

std::string unknown(const std::string& name) {
  return "cell must be one of " + names() + ", got " + name;
}

}  // namespace

const CellTraits& traits_of(CellKind kind) {
  return kTraits[static_cast<int>(kind)];
}

void check_options(const Check& check, CellKind kind, bool linear_candidate, bool normalize_gates) {
  const CellTraits& traits = traits_of(kind);
  check.require(traits.has_options || (!linear_candidate && normalize_gates), "the cell ",
                traits.name, " has no linear_candidate and no normalize_gates");
}

void no_kernel_of(CellKind kind) {
  throw std::runtime_error(std::string("minserve: no kernel of the cell ") + traits_of(kind).name);
}

CellKind cell_named(const Check& check, const std::string& name) {
  const int number = number_of(name);
  if (number < 0) check.require(false, unknown(name));
  return static_cast<CellKind>(number);
}

std::tuple<std::int64_t, std::int64_t> cell_traits(const std::string& cell) {
  const int number = number_of(cell);
  if (number < 0) throw std::runtime_error("minserve::cell_traits: " + unknown(cell));
  return {number, kTraits[number].preactivations};
}

void detail::refuse_cell(const Check& check, CellKind kind, bool (*has)(CellKind)) {
  check.require(false, "has no kernel of the cell ", traits_of(kind).name, ", only of ",
                names(has));
  no_kernel_of(kind);
}

}  // namespace minserve
