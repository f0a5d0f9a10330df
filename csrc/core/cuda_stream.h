// The stream on which torch enqueues now; or why there is none.
#pragma once

#include "tensor_checks.h"

namespace minserve {

#ifdef MINSERVE_CUDA
// On the GPU of a tensor: a cudaStream_t.
void* current_stream(const Tensor& like);
#else
// Throws: the tensors are on a GPU, and this build has no kernels for one.
[[noreturn]] void no_cuda();
#endif

}  // namespace minserve
