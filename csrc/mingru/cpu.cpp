// The cells of mingru on the CPU. Compiled once per instruction set; see common/vec.h.
#include "../common/kernels.h"
#include "../common/scan_cpu.h"
#include "cell.h"

namespace minserve {
namespace MS_ISA {

ScanFn mingru_kernel(Dtype dtype, bool backward) {
  return backward ? scan_for<MinGruBackwardCell>(dtype) : scan_for<MinGruCell>(dtype);
}

}  // namespace MS_ISA
}  // namespace minserve
