// MinLstm on CUDA: its cells in the general scan.
#include "../common/kernels.h"
#include "../common/scan.cuh"
#include "cell.h"

namespace minserve {
namespace cuda {

void minlstm(const ScanArgs& args, Dtype dtype, bool backward, bool split, int device,
             void* stream) {
  launch_by_dtype<MinLstmCell, MinLstmBackwardCell>(args, dtype, backward, split, device, stream);
}

}  // namespace cuda
}  // namespace minserve
