// The driver's call that makes a tensor map: TMA's description of a matrix.
#pragma once

#include <cuda.h>

#include <stdexcept>

#include "launch.cuh"

namespace minserve {
namespace cuda {

using EncodeTensorMap = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*,
                                     const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
                                     const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                                     CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// The driver is not linked: the runtime knows where it is.
inline EncodeTensorMap encode_tensor_map() {
  static const EncodeTensorMap found = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult result;
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000,
                                           cudaEnableDefault, &result),
          "cuTensorMapEncodeTiled");
    if (!entry) throw std::runtime_error("minserve: the driver has no cuTensorMapEncodeTiled");
    return reinterpret_cast<EncodeTensorMap>(entry);
  }();
  return found;
}

}  // namespace cuda
}  // namespace minserve
