// Which models a persistent decode step takes, for builds of every kind.
#include "../core/operators.h"
#include "plan.h"

namespace minserve {

std::tuple<std::int64_t, std::string, std::int64_t> persistent_decode_most_rows(
    const Tensor& plan_numbers, std::int64_t weight_type, const std::string& cell,
    bool batch_invariant, std::int64_t multiprocessors) {
  const Check check("whole_step", plan_numbers, "plan");
  const std::int64_t* numbers = Plan::numbers_of(check, plan_numbers);
  check.require(multiprocessors >= 1 && multiprocessors <= (1 << 16),
                "multiprocessors must be at least 1, got ", multiprocessors);
  try {
    const Plan plan(check, numbers, plan_numbers.size(0), weight_type, cell, batch_invariant,
                    static_cast<int>(multiprocessors));
    const int rows = plan.most_batch();
    return {rows, rows > 0 ? "" : "one row's inputs have no room in shared memory",
            2 * plan.args.column_tile_bytes};
  } catch (const std::runtime_error& refusal) {
    return {0, refusal.what(), 0};
  }
}

}  // namespace minserve
