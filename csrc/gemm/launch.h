// What the kernels of linear maps give to their operators.
#pragma once

#include "args.h"
#include "argmax_head_args.h"
#include "tile_config.h"

namespace minserve {

#ifdef MINSERVE_CUDA
namespace cuda {

// weight [gates * channels, inputs] and input [tokens, inputs], contiguous; enqueued on the stream.
void linear(const GemmArgs& args, const void* weight, const void* input, int gates, int device,
            void* stream);

// The same in a wide form, as `choice` says.
void gemm_persistent(const GemmConfig& choice, const GemmArgs& args, const void* weight,
                     const void* input, int gates, int device, void* stream);

// The bests of input [tokens, inputs] times weight [channels, inputs].
void linear_best(const ArgmaxHeadArgs& args, const void* weight, const void* input, int device,
                 void* stream);

void embed(const EmbedArgs& args, int device, void* stream);

}  // namespace cuda
#endif

}  // namespace minserve
