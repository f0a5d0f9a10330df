// The cells of minlstm on CUDA: scans and steps.
#include "scan_launch.cuh"
#include "../cells/minlstm.h"

namespace minserve {
namespace cuda {

void minlstm(const ScanArgs& args, Dtype dtype, bool backward, int device, void* stream) {
  launch_by_dtype<MinLstmCell, MinLstmBackwardCell>(args, dtype, backward, device, stream);
}

}  // namespace cuda
}  // namespace minserve
