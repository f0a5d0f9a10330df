// The cells of linear_scan on the CPU. Compiled once per instruction set; see core/vec.h.
#include "scan_cpu.h"
#include "transposed_cpu.h"
#include "../cells/linear_scan.h"

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
