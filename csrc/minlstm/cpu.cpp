// MinLstm on the CPU. Compiled once per instruction set; see common/vec.h.
#include "cell.h"
#include "../common/scan_cpu.h"
#include "../common/kernels.h"

namespace minserve {
namespace MS_ISA {

ScanFn minlstm_kernel(Dtype dtype, bool backward) {
  switch (dtype) {
    case Dtype::f32:
      return backward ? &run_scan<MinLstmBackwardCell<float>> : &run_scan<MinLstmCell<float>>;
    case Dtype::f64:
      return backward ? &run_scan<MinLstmBackwardCell<double>> : &run_scan<MinLstmCell<double>>;
    case Dtype::bf16:
      return backward ? &run_scan<MinLstmBackwardCell<bf16>> : &run_scan<MinLstmCell<bf16>>;
    case Dtype::f16:
      return backward ? &run_scan<MinLstmBackwardCell<f16>> : &run_scan<MinLstmCell<f16>>;
  }
  return nullptr;
}

}  // namespace MS_ISA
}  // namespace minserve
