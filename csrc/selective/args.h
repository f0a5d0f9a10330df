// Arguments of the selective recurrence, and the entry points of its kernels. No torch in here.
#pragma once

#include "../core/cpu_isa.h"
#include "../core/types.h"

namespace minserve {

constexpr std::int64_t kMostStates = 4096;  // of a channel

// A vector of channels, of the operator's dtype or fp32.
struct ChannelVector {
  const void* data = nullptr;
  bool is_float = false;  // fp32, whatever the operator's dtype is
};

// A step has no cu_seqlens, and row r is all of sequence r. Streams have the operator's dtype.
struct SelectiveArgs {
  Layout layout;
  std::int64_t states = 0;   // N, 1 to kMostStates
  Stream x, dt;              // [tokens, channels]
  Stream B, C;               // [tokens, states]
  Stream z;                  // [tokens, channels]; null data: there is no gate
  Stream y;                  // [tokens, channels]
  const float* A = nullptr;  // [channels, states]
  ChannelVector D, dt_bias;
  // Rows [channels, states], each contiguous, slot_stride elements apart: fp32 or bf16.
  void* state = nullptr;
  std::int64_t slot_stride = 0;
  bool half_state = false;  // bf16
};

// Does a run of channels of some sequences on the CPU; the sequence after the last is the padding
// tail. How items are numbered is told in cpu.cpp.
using SelectiveFn = void (*)(const SelectiveArgs&, std::int64_t begin, std::int64_t end);

// Channels of an item: a multiple of every vector's width, whose states and A stay in the
// first-level cache. Narrower ones read too little of each row at once.
constexpr std::int64_t kSelectiveRun = 64;

MS_DECLARE_PER_ISA(SelectiveFn selective_kernel(Dtype dtype);)

#ifdef MINSERVE_CUDA
namespace cuda {
// Enqueues on the stream: a scan, or a step where the layout has no cu_seqlens. Throws where a
// channel has more states than kMostStatesOnGpu (scan.cuh).
void selective(const SelectiveArgs& args, Dtype dtype, int device, void* stream);
}  // namespace cuda
#endif

}  // namespace minserve
