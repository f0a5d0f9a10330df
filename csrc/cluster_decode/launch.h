// The entry point of the cluster decode kernel, for its operator.
#pragma once

#include "args.h"

namespace minserve {

#ifdef MINSERVE_CUDA
namespace cuda {

// Enqueued on the stream. Sets `stages`.
void cluster_decode(ClusterDecodeArgs& args, int device, void* stream);

}  // namespace cuda
#endif

}  // namespace minserve
