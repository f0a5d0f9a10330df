// The first check of every operator that runs on Hopper only.
#pragma once

#include <string_view>

#include "hopper.h"
#include "tensor_checks.h"

namespace minserve {

// The kernels' code is in the library only where it was built for this very architecture.
inline void require_hopper(const Check& check, const Tensor& t) {
  const bool built = std::string_view(MINSERVE_CUDA_ARCHS).find("90a") != std::string_view::npos;
  check.require(!t.is_cpu() && built && cuda::is_hopper(t.get_device_index()),
                "needs a Hopper GPU and kernels built for it (90a; built for " MINSERVE_CUDA_ARCHS
                "), got ",
                describe(t));
}

}  // namespace minserve
