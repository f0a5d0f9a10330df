// Scans of minLSTM on the CPU. Compiled once per instruction set; see core/vec.h.
#include "../cells/minlstm.h"
#include "scan_cpu.h"

namespace minserve {
namespace MS_ISA {

ScanFn minlstm_kernel(Dtype dtype, bool backward) {
  return backward ? scan_for<MinLstmBackwardCell>(dtype) : scan_for<MinLstmCell>(dtype);
}

}  // namespace MS_ISA
}  // namespace minserve
