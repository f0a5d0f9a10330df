// Linear on the CPU. Compiled once per instruction set; see common/vec.h.
#include "cell.h"
#include "../common/scan_cpu.h"
#include "../common/kernels.h"

namespace minserve {
namespace MS_ISA {

ScanFn linear_kernel(Dtype dtype, bool backward) {
  switch (dtype) {
    case Dtype::f32:
      return backward ? &run_scan<LinearBackwardCell<float>> : &run_scan<LinearCell<float>>;
    case Dtype::f64:
      return backward ? &run_scan<LinearBackwardCell<double>> : &run_scan<LinearCell<double>>;
    case Dtype::bf16:
      return backward ? &run_scan<LinearBackwardCell<bf16>> : &run_scan<LinearCell<bf16>>;
    case Dtype::f16:
      return backward ? &run_scan<LinearBackwardCell<f16>> : &run_scan<LinearCell<f16>>;
  }
  return nullptr;
}

}  // namespace MS_ISA
}  // namespace minserve
