// Arguments of the simple recurrent unit, and the entry points of its kernels. No torch in here.
#pragma once

#include "../core/cpu_isa.h"
#include "../core/types.h"

namespace minserve {

// A step has no cu_seqlens, and row r is all of sequence r. Streams have the operator's dtype.
struct SruArgs {
  Layout layout;
  Stream u;                         // [tokens, u0 | u1 | u2 ...], each of `channels` columns
  Stream highway;                   // [tokens, channels], not yet scaled; null data: h = r g(c)
  float scale = 1.0f;               // of the highway's input
  bool tanh = false;                // g
  const float* weight_c = nullptr;  // [forget | reset], or null: the gates do not see c
  const float* bias = nullptr;      // [forget | reset]
  Stream h;                         // [tokens, channels]
  float* state = nullptr;           // rows [channels], slot_stride elements apart
  std::int64_t slot_stride = 0;
  float* c = nullptr;        // [tokens, channels]: c of every token, or null
  float* carries = nullptr;  // [2, chunks, channels] on CUDA, for chunks side by side; or null
};

// The gradients of SruArgs, of which `u`, `highway`, the vectors, `c` and the layout are read.
struct SruGradients {
  Stream h;                     // of h; read
  Stream u;                     // [tokens, u0 | u1 | u2], written, zero for the padding tail
  Stream highway;               // written if there is one
  const float* last = nullptr;  // of the last c, [sequences, channels]; null: zeros
  const float* c0 = nullptr;    // the first c, [sequences, channels]; null: zeros
  float* of_c0 = nullptr;       // [sequences, channels]
  // [4, sequences, channels]: of weight_c, forget and reset, then of bias; to be summed over
  // sequences. Null in a padding tail alone.
  float* vectors = nullptr;
};

// Does a run of channels of some sequences on the CPU; the sequence after the last is the padding
// tail. How items are numbered is told in cpu.cpp.
using SruFn = void (*)(const SruArgs&, std::int64_t begin, std::int64_t end);
using SruBackwardFn = void (*)(const SruArgs&, const SruGradients&, std::int64_t begin,
                               std::int64_t end);

// Channels of an item: a multiple of every vector's width. Narrower ones read too little of each
// row at once.
constexpr std::int64_t kSruRun = 64;

MS_DECLARE_PER_ISA(SruFn sru_kernel(Dtype dtype); SruBackwardFn sru_backward_kernel(Dtype dtype);)

#ifdef MINSERVE_CUDA
namespace cuda {
// Enqueue on the stream: a scan, or a step where the layout has no cu_seqlens; the gradients.
void sru(const SruArgs& args, Dtype dtype, int device, void* stream);
void sru_backward(const SruArgs& args, const SruGradients& gradients, Dtype dtype, int device,
                  void* stream);
}  // namespace cuda
#endif

}  // namespace minserve
