// What the kernel of a wide step gives to its operator.
#pragma once

#include "args.h"

namespace minserve {

#ifdef MINSERVE_CUDA
namespace cuda {

// Enqueued on the stream.
void wide_step(const ClusterStepArgs& args, int device, void* stream);

}  // namespace cuda
#endif

}  // namespace minserve
