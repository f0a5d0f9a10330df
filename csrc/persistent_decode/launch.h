// The entry points of the persistent decode kernel, for its operators.
#pragma once

#include "args.h"

namespace minserve {

constexpr int kTensorMapBytes = 128;

#ifdef MINSERVE_CUDA
namespace cuda {

// Blocks that a step runs in: one on each multiprocessor.
int persistent_decode_blocks(int device);

// Writes the tensor map of a matrix [rows, inputs], kTensorMapBytes aligned to 64.
void encode_weight_map(void* map, const void* weight, WeightType type, std::int64_t rows,
                       std::int64_t inputs, int device);

// Enqueued on the stream; all blocks run at once. Sets `stages` and `in_flight`.
void persistent_decode(PersistentDecodeArgs& args, int device, void* stream);

}  // namespace cuda
#endif

}  // namespace minserve
