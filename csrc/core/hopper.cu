#include "hopper.h"

#include "launch.cuh"

namespace minserve {
namespace cuda {

bool is_hopper(int device) {
  int major = 0;
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "capability");
  return major == 9;
}

}  // namespace cuda
}  // namespace minserve
