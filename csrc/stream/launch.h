// What the kernel of a whole step gives to its operator.
#pragma once

#include "args.h"

#ifdef MINSERVE_CUDA
namespace minserve {
namespace cuda {

// Enqueued on the stream; all blocks run at once, one to a multiprocessor. Sets `stages`.
void stream_step(StreamArgs& args, int gates, int device, void* stream);

}  // namespace cuda
}  // namespace minserve
#endif
