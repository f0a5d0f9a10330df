// Linear on CUDA: its cells in the general scan.
#include "../common/kernels.h"
#include "../common/scan.cuh"
#include "cell.h"

namespace minserve {
namespace cuda {

void linear_scan(const ScanArgs& args, Dtype dtype, bool backward, bool split, int device,
                 void* stream) {
  launch_by_dtype<LinearCell, LinearBackwardCell>(args, dtype, backward, split, device, stream);
}

}  // namespace cuda
}  // namespace minserve
