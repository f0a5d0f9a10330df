// What is asked of the heuristics in builds of every kind.
#include "../core/operators.h"
#include "heuristics_deterministic.h"

namespace minserve {

std::int64_t linear_one_part_rows() {
  return BatchInvariantHeuristic::kOnePartRows;
}

}  // namespace minserve
