// Starting scans, convolutions and draws on the device of their tensors.
#pragma once

#include "../core/tensor_checks.h"

namespace minserve {

enum class Recurrence { linear, mingru, minlstm };

// `like`: a tensor of the operator's dtype, on its device.
void run_scan(ScanArgs args, Recurrence recurrence, Dtype dtype, bool backward, const Tensor& like);
void run_conv(const ConvArgs& args, Dtype dtype, const Tensor& like);
// `logits`: those of the arguments.
void run_adjust(const AdjustArgs& args, const Tensor& logits);
void run_draw(const DrawArgs& args, const Tensor& logits);
// `like` is on the device that copies.
void run_copy_words(const CopyArgs& args, const Tensor& like);
void run_target_logprobs(const TargetArgs& args, const Tensor& logits);

#ifdef MINSERVE_CUDA
// The stream that torch enqueues on now, on the GPU of a tensor.
void* current_stream(const Tensor& like);
#endif

// The instruction set chosen on this machine. avx512_bf16 (with VBMI) and amx have kernels of their
// own for products only; all else runs those of avx512.
enum class Isa { generic, avx2, avx512, avx512_bf16, amx };
Isa isa();
// Its name.
const char* cpu_isa();

}  // namespace minserve
