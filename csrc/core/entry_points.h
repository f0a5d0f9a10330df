// What the kernel files give to the operators: one entry per operator, instruction set and device.
#pragma once

#include "types.h"

namespace minserve {

struct AdjustArgs;   // sampling/logits_processor/logits_processor.h
struct CopyArgs;     // pinned_copy/pinned_copy.h
struct DrawArgs;     // sampling/sample.h
struct DrawKernels;  // sampling/sample.h
struct TargetArgs;   // sampling/logprobs/logprobs.h
// Do rows [begin, end) on the CPU.
using AdjustFn = void (*)(const AdjustArgs&, std::int64_t begin, std::int64_t end);
using TargetFn = void (*)(const TargetArgs&, std::int64_t begin, std::int64_t end);

// linear_row_kernel: where the streams' stride is 1, channels lying layout.time elements apart.
#define MS_DECLARE_KERNELS(isa)                         \
  namespace isa {                                       \
  ScanFn linear_kernel(Dtype dtype, bool backward);     \
  ScanFn linear_row_kernel(Dtype dtype, bool backward); \
  ScanFn mingru_kernel(Dtype dtype, bool backward);     \
  ScanFn minlstm_kernel(Dtype dtype, bool backward);    \
  ConvFn conv_kernel(Dtype dtype);                      \
  AdjustFn adjust_kernel(Dtype dtype);                  \
  DrawKernels draw_kernels(Dtype dtype);                \
  TargetFn target_kernel(Dtype dtype);                  \
  }

MS_DECLARE_KERNELS(generic)
MS_DECLARE_KERNELS(avx2)
MS_DECLARE_KERNELS(avx512)
#undef MS_DECLARE_KERNELS

#ifdef MINSERVE_CUDA
// All enqueue on the stream.
namespace cuda {
// What a scan needs as ScanArgs::workspace.
std::int64_t scan_workspace_bytes(const Layout& layout, Dtype dtype);
void linear_scan(const ScanArgs& args, Dtype dtype, bool backward, int device, void* stream);
// linear_scan where the streams' stride is 1: channels lie layout.time elements apart.
std::int64_t row_scan_workspace_bytes(const Layout& layout, Dtype dtype);
void linear_scan_rows(const ScanArgs& args, Dtype dtype, bool backward, int device, void* stream);
void mingru(const ScanArgs& args, Dtype dtype, bool backward, int device, void* stream);
void minlstm(const ScanArgs& args, Dtype dtype, bool backward, int device, void* stream);
void conv(const ConvArgs& args, Dtype dtype, int device, void* stream);
void adjust(const AdjustArgs& args, int device, void* stream);
void draw(const DrawArgs& args, int device, void* stream);
void draw_best(const DrawArgs& args, int device, void* stream);
// Throws if the device does not see the host's memory.
void copy_words(CopyArgs args, int device, void* stream);
void target_logprobs(const TargetArgs& args, int device, void* stream);
}  // namespace cuda
#endif

}  // namespace minserve
