// Linear maps in wide forms, for those that choose one.
#pragma once

#include "args.h"

namespace minserve {
namespace cuda {

// As linear(), in the form of this number of kWideForms; `stream` is a cudaStream_t.
void linear_wide(int form, const LinearArgs& args, const void* weight, const void* input, int gates,
                 Dtype dtype, int device, void* stream);

}  // namespace cuda
}  // namespace minserve
