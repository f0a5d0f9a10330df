// The entry points of the GEMM kernels, for their operators.
#pragma once

#include <optional>

#include "args.h"
#include "argmax_head_args.h"
#include "tile_config.h"

namespace minserve {

#ifdef MINSERVE_CUDA
namespace cuda {

// weight [gates * channels, inputs] and input [tokens, inputs], contiguous; enqueued on the stream.
// `cell`: whose step is the epilogue, of GemmCells; none: `args.epilogue` is (of one row per
// channel, or two for SwiGLU).
void gemm(const GemmArgs& args, const void* weight, const void* input, std::optional<CellKind> cell,
          int device, void* stream);

// The same by a persistent kernel, as `config` says.
void gemm_persistent(const GemmConfig& config, const GemmArgs& args, const void* weight,
                     const void* input, std::optional<CellKind> cell, int device, void* stream);

// The best of each tile of the logits of input [tokens, inputs] times weight [channels, inputs].
void argmax_head(const ArgmaxHeadArgs& args, const void* weight, const void* input, int device,
                 void* stream);

void embed(const EmbedArgs& args, int device, void* stream);

}  // namespace cuda
#endif

}  // namespace minserve
