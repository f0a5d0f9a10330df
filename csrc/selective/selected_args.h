// Arguments of the selective step that projects its own time steps, on CUDA. No torch in here.
#pragma once

#include "args.h"

namespace minserve {

constexpr std::int64_t kSelectedStates = 16;
constexpr std::int64_t kDtChunk = 8;  // inputs of a channel whose weights lie together

// All numbers but those of `step`'s vectors, A and states are bf16; there are kSelectedStates
// states.
struct SelectedArgs {
  SelectiveArgs step;               // its dt are the inputs of the projection, [tokens, rank]
  int rank = 0;                     // a multiple of kDtChunk
  const bf16* dt_weight = nullptr;  // [rank / kDtChunk, channels, kDtChunk]
  // Inputs of dt, B and C are divided by their root mean squares, with this epsilon.
  bool normed = false;
  float norm_eps = 0.0f;
};

#ifdef MINSERVE_CUDA
namespace cuda {
void selected_step(const SelectedArgs& args, int device, void* stream);
}  // namespace cuda
#endif

}  // namespace minserve
