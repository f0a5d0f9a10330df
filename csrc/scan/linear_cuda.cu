// The cells of linear_scan on CUDA: scans and steps.
#include "scan_launch.cuh"
#include "../cells/linear_scan.h"

namespace minserve {
namespace cuda {

std::int64_t scan_workspace_bytes(const Layout& layout, Dtype dtype) {
  const std::int64_t bytes = workspace_bytes(
      layout, dtype == Dtype::f64 ? sizeof(LookbackWord<double>) : sizeof(LookbackWord<float>));
  if (layout.cu_seqlens) return bytes;
  const std::int64_t rows = row_scan_workspace_bytes(layout, dtype);  // time may be contiguous
  return bytes < rows ? rows : bytes;
}

void linear_scan(const ScanArgs& args, Dtype dtype, bool backward, int device, void* stream) {
  if (args.inputs[0].stride == 1 && args.layout.channels > 1) {
    return linear_scan_rows(args, dtype, backward, device, stream);
  }
  launch_by_dtype<LinearCell, LinearBackwardCell>(args, dtype, backward, device, stream);
}

}  // namespace cuda
}  // namespace minserve
