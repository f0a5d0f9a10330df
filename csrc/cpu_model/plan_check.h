// Reads the numbers that describe a packed model, and refuses a plan that leads out of its memory.
#pragma once

#include <vector>

#include "../core/tensor_checks.h"
#include "plan.h"

namespace minserve {

struct PackedModel {
  Plan plan;
  std::vector<LayerPlan> layers;
  std::int64_t weight_bytes = 0;
};

// `weights`: uint8 [bytes] that begins at a cache line; `plan`: int64, as
// engine/models/backends/cpu.py writes it. Throws std::runtime_error.
PackedModel read_plan(const Check& check, const Tensor& weights, const Tensor& plan);

}  // namespace minserve
