// MinGru on the CPU. Compiled once per instruction set; see common/vec.h.
#include "cell.h"
#include "../common/scan_cpu.h"
#include "../common/kernels.h"

namespace minserve {
namespace MS_ISA {

ScanFn mingru_kernel(Dtype dtype, bool backward) {
  switch (dtype) {
    case Dtype::f32:
      return backward ? &run_scan<MinGruBackwardCell<float>> : &run_scan<MinGruCell<float>>;
    case Dtype::f64:
      return backward ? &run_scan<MinGruBackwardCell<double>> : &run_scan<MinGruCell<double>>;
    case Dtype::bf16:
      return backward ? &run_scan<MinGruBackwardCell<bf16>> : &run_scan<MinGruCell<bf16>>;
    case Dtype::f16:
      return backward ? &run_scan<MinGruBackwardCell<f16>> : &run_scan<MinGruCell<f16>>;
  }
  return nullptr;
}

}  // namespace MS_ISA
}  // namespace minserve
