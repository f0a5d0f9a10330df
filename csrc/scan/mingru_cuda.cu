// The cells of mingru on CUDA: scans and steps.
#include "scan_launch.cuh"
#include "../cells/mingru.h"

namespace minserve {
namespace cuda {

void mingru(const ScanArgs& args, Dtype dtype, bool backward, int device, void* stream) {
  launch_by_dtype<MinGruCell, MinGruBackwardCell>(args, dtype, backward, device, stream);
}

}  // namespace cuda
}  // namespace minserve
