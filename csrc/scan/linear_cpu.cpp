// The linear scan on the CPU. Compiled once per instruction set; see core/vec.h.
#include "../cells/linear_scan.h"
#include "scan_cpu.h"
#include "transposed_cpu.h"

namespace minserve {
namespace MS_ISA {

ScanFn linear_kernel(Dtype dtype, bool backward) {
  return backward ? scan_for<LinearBackwardCell>(dtype) : scan_for<LinearCell>(dtype);
}

ScanFn linear_row_kernel(Dtype dtype, bool backward) {
  return backward ? scan_for<LinearBackwardCell, TransposedTile>(dtype)
                  : scan_for<LinearCell, TransposedTile>(dtype);
}

}  // namespace MS_ISA
}  // namespace minserve
