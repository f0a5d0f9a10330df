// Starting a scan on the device of its tensors.
#pragma once

#include <optional>

#include "../cells/kind.h"
#include "../core/tensor_checks.h"
#include "args.h"

namespace minserve {

// `cell`: none: a and b are given. `like`: a tensor of the operator's dtype, on its device.
void run_scan(ScanArgs args, std::optional<CellKind> cell, Dtype dtype, bool backward,
              const Tensor& like);

}  // namespace minserve
