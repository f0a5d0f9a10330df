// Scans of minGRU on the CPU. Compiled once per instruction set; see core/vec.h.
#include "../cells/mingru.h"
#include "scan_cpu.h"

namespace minserve {
namespace MS_ISA {

ScanFn mingru_kernel(Dtype dtype, bool backward) {
  return backward ? scan_for<MinGruBackwardCell>(dtype) : scan_for<MinGruCell>(dtype);
}

}  // namespace MS_ISA
}  // namespace minserve
