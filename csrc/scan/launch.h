// Starting a scan on the device of its tensors.
#pragma once

#include "../core/tensor_checks.h"
#include "args.h"

namespace minserve {

enum class Recurrence { linear, mingru, minlstm };

// `like`: a tensor of the operator's dtype, on its device.
void run_scan(ScanArgs args, Recurrence recurrence, Dtype dtype, bool backward, const Tensor& like);

}  // namespace minserve
