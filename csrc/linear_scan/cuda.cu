// The cells of linear_scan on CUDA: scans and steps.
#include "../common/kernels.h"
#include "../common/scan.cuh"
#include "cell.h"

namespace minserve {
namespace cuda {

std::int64_t scan_workspace_bytes(const Layout& layout, Dtype dtype) {
  return workspace_bytes(layout, dtype == Dtype::f64 ? sizeof(Word<double>) : sizeof(Word<float>));
}

void linear_scan(const ScanArgs& args, Dtype dtype, bool backward, int device, void* stream) {
  launch_by_dtype<LinearCell, LinearBackwardCell>(args, dtype, backward, device, stream);
}

}  // namespace cuda
}  // namespace minserve
