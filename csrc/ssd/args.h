// Arguments of Mamba-2's recurrence, and the entry points of its kernels. No torch in here.
#pragma once

#include "../core/cpu_isa.h"
#include "../core/types.h"

namespace minserve {

constexpr std::int64_t kMostSsdStates = 1024;  // N

// A number for each head, of the operator's dtype or fp32.
struct HeadVector {
  const void* data = nullptr;
  bool is_float = false;  // fp32, whatever the operator's dtype is
};

// A step has no cu_seqlens, and row r is all of sequence r. Streams have the operator's dtype; the
// columns of a head or group lie side by side.
struct SsdArgs {
  Layout layout;  // channels: heads * head_dim
  std::int64_t heads = 0, head_dim = 0;
  std::int64_t groups = 0;   // which divide the heads
  std::int64_t states = 0;   // N, 1 to kMostSsdStates
  Stream x;                  // [tokens, heads, head_dim]
  Stream dt;                 // [tokens, heads]
  Stream B, C;               // [tokens, groups, states]
  Stream y;                  // [tokens, heads, head_dim]; on the CPU it may be x
  const float* A = nullptr;  // [heads]
  HeadVector D, dt_bias;
  float least_dt = 0, most_dt = 0;  // behind softplus
  // Rows [heads, head_dim, states], each contiguous, slot_stride elements apart: fp32 or bf16.
  void* state = nullptr;
  std::int64_t slot_stride = 0;
  bool half_state = false;    // bf16
  void* workspace = nullptr;  // of a scan on CUDA: of cuda::ssd_workspace_bytes()
};

// Does a run of a head's rows for some sequences on the CPU: items [begin, end). How items are
// numbered is told in cpu.cpp.
using SsdFn = void (*)(const SsdArgs&, std::int64_t begin, std::int64_t end);

// Rows [states] of a head's state that an item has, and how many numbers these are at most.
constexpr std::int64_t kMostSsdRows = 64, kSsdRunStates = 16384;
constexpr std::int64_t ssd_run_rows(std::int64_t states) {
  return kMostSsdRows * states <= kSsdRunStates ? kMostSsdRows : kSsdRunStates / states;
}
// How many items there are. The sequence after the last of a scan is the padding tail.
MS_HD std::int64_t ssd_items(const SsdArgs& args) {
  const std::int64_t sequences = args.layout.sequences + (args.layout.cu_seqlens ? 1 : 0);
  return sequences * args.heads * divided_up(args.head_dim, ssd_run_rows(args.states));
}

MS_DECLARE_PER_ISA(SsdFn ssd_kernel(Dtype dtype);)

#ifdef MINSERVE_CUDA
namespace cuda {
std::int64_t ssd_workspace_bytes(const SsdArgs& args, Dtype dtype, int device);
// Enqueues on the stream: a scan, or a step where the layout has no cu_seqlens.
void ssd(const SsdArgs& args, Dtype dtype, int device, void* stream);
}  // namespace cuda
#endif

}  // namespace minserve
