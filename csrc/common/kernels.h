// What the kernel files give to the operators: one entry per operator, instruction set and device.
#pragma once

#include "types.h"

namespace minserve {

#define MS_DECLARE_KERNELS(isa)                      \
  namespace isa {                                    \
  ScanFn linear_kernel(Dtype dtype, bool backward);  \
  ScanFn mingru_kernel(Dtype dtype, bool backward);  \
  ScanFn minlstm_kernel(Dtype dtype, bool backward); \
  ConvFn conv_kernel(Dtype dtype);                   \
  }

MS_DECLARE_KERNELS(generic)
MS_DECLARE_KERNELS(avx2)
MS_DECLARE_KERNELS(avx512)
#undef MS_DECLARE_KERNELS

#ifdef MINSERVE_CUDA
// Enqueue on the stream. split: cut time into chunks that run side by side (needs the workspace).
namespace cuda {
void linear_scan(const ScanArgs& args, Dtype dtype, bool backward, bool split, int device,
                 void* stream);
void mingru(const ScanArgs& args, Dtype dtype, bool backward, bool split, int device, void* stream);
void minlstm(const ScanArgs& args, Dtype dtype, bool backward, bool split, int device,
             void* stream);
void conv(const ConvArgs& args, Dtype dtype, int device, void* stream);
}  // namespace cuda
#endif

}  // namespace minserve
