// The cells of linear_scan on the CPU. Compiled once per instruction set; see common/vec.h.
#include "../common/kernels.h"
#include "../common/scan_cpu.h"
#include "../common/turned_cpu.h"
#include "cell.h"

namespace minserve {
namespace MS_ISA {

ScanFn linear_kernel(Dtype dtype, bool backward) {
  return backward ? scan_for<LinearBackwardCell>(dtype) : scan_for<LinearCell>(dtype);
}

ScanFn linear_row_kernel(Dtype dtype, bool backward) {
  return backward ? scan_for<LinearBackwardCell, TurnedTile>(dtype)
                  : scan_for<LinearCell, TurnedTile>(dtype);
}

}  // namespace MS_ISA
}  // namespace minserve
