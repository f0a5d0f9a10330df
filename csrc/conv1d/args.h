// Arguments of the convolution, and the entry points of its kernels. No torch in here.
#pragma once

#include "../core/cpu_isa.h"
#include "../core/types.h"

namespace minserve {

struct ConvArgs {
  Layout layout;
  std::int64_t taps = 0;
  Stream x;                      // [tokens, channels]
  const void* weight = nullptr;  // [channels, taps]
  const void* bias = nullptr;    // [channels] or null
  float* state = nullptr;        // [num_slots, taps - 1, channels]
  std::int64_t slot_stride = 0;
  std::int64_t tap_stride = 0;
  void* out = nullptr;
  bool silu = false;  // of the sums, before they are rounded
  // CPU workspace: [taps + 1, channels], the weights transposed, then the bias.
  float* weight_rows = nullptr;
};

// On the CPU, in this order: weights to weight_rows; outputs, an item being a token row; states, an
// item being a sequence, whose last taps - 1 inputs are kept.
enum class ConvPhase { weights, outputs, states };
// Does items [begin, end) of a phase.
using ConvFn = void (*)(const ConvArgs&, ConvPhase, std::int64_t begin, std::int64_t end);

MS_DECLARE_PER_ISA(ConvFn conv_kernel(Dtype dtype);)

#ifdef MINSERVE_CUDA
namespace cuda {
// Enqueues on the stream.
void conv(const ConvArgs& args, Dtype dtype, int device, void* stream);
}  // namespace cuda
#endif

}  // namespace minserve
