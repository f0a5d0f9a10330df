// Arguments of every scan, and the entry points of its kernels. No torch in here.
#pragma once

#include "../core/cpu_isa.h"
#include "../core/types.h"

namespace minserve {

constexpr int kMaxInputs = 5;
constexpr int kMaxOutputs = 3;
constexpr int kMaxParameters = 1;

// One struct for all scans. What the streams mean is the cell's business (csrc/cells); all
// have the operator's dtype.
struct ScanArgs {
  Layout layout;
  Stream inputs[kMaxInputs];
  Stream outputs[kMaxOutputs];
  const float* parameters[kMaxParameters] = {};  // of the cell, [channels] each; null: zeros
  // State before the first element, for backward cells that read the previous state: rows
  // [sequences, channels], accumulation type; null: zero.
  const void* h0 = nullptr;
  // Carry into the first chunk (null: zero) and out of the last (null: not wanted), by slot.
  const void* initial = nullptr;
  std::int64_t initial_stride = 0;
  void* last = nullptr;
  std::int64_t last_stride = 0;
  bool linear_candidate = false;
  bool normalize_gates = true;
  // Whether all streams and parameters, and the rows of initial and last, allow 16-byte accesses;
  // set by launchers.
  bool aligned = false;
  bool aligned_state = false;
  // On CUDA: sequences of at most so many positions, not over kScanChunk, are left to
  // short_sequences.cuh, and only longer ones to the tiles; -1: all are theirs.
  std::int64_t short_length = -1;
  MS_HD bool is_short(std::int64_t s) const {
    return layout.end(s) - layout.begin(s) <= short_length;
  }
  // Workspace: on the CPU rows of the accumulation type (scan_cpu.h), on CUDA the words described
  // in scan.cuh.
  void* workspace = nullptr;
};

// Work on the CPU is handed out in runs of channels: multiples of a cache line of two-byte floats,
// and no wider than what a thread keeps of each channel has room for in its caches.
constexpr std::int64_t kNarrowestItem = 32;
constexpr std::int64_t kWidestItem = 2048;

enum class Phase { serial, aggregate, carry, output };

// How a scan is handed out on the CPU.
struct CpuTiling {
  std::int64_t width = 0;    // channels of an item, a multiple of kNarrowestItem
  bool past_caches = false;  // what is written has left the caches by the time anyone reads it
  // Where time is cut: the chunks of this wave, of at most wave_chunks, and the channels of a row
  // of the workspace, a multiple of kNarrowestItem.
  std::int64_t first_chunk = 0, last_chunk = 0, wave_chunks = 0, row_channels = 0;
};

// Does items [begin, end) of a phase on the CPU; how items are numbered is told in scan_cpu.h.
using ScanFn = void (*)(const ScanArgs&, const CpuTiling&, Phase, std::int64_t begin,
                        std::int64_t end);

MS_DECLARE_PER_ISA(
    // scan_cpu.h; linear_row_kernel: where the streams' stride is 1, channels lying layout.time
    // elements apart.
    ScanFn linear_kernel(Dtype dtype, bool backward);
    ScanFn linear_row_kernel(Dtype dtype, bool backward);)
// NAME_kernel of each cell.
#define MINSERVE_CELL(name, Forward, Backward) \
  MS_DECLARE_PER_ISA(ScanFn name##_kernel(Dtype dtype, bool backward);)
#include "../cells/cells.def"
#undef MINSERVE_CELL

#ifdef MINSERVE_CUDA
// All enqueue on the stream.
namespace cuda {
// What a scan needs as ScanArgs::workspace.
std::int64_t scan_workspace_bytes(const Layout& layout, Dtype dtype);
void linear_scan(const ScanArgs& args, Dtype dtype, bool backward, int device, void* stream);
// linear_scan where the streams' stride is 1: channels lie layout.time elements apart.
std::int64_t row_scan_workspace_bytes(const Layout& layout, Dtype dtype);
void linear_scan_rows(const ScanArgs& args, Dtype dtype, bool backward, int device, void* stream);
// A function of each cell, of its name.
#define MINSERVE_CELL(name, Forward, Backward) \
  void name(const ScanArgs& args, Dtype dtype, bool backward, int device, void* stream);
#include "../cells/cells.def"
#undef MINSERVE_CELL
}  // namespace cuda
#endif

}  // namespace minserve
