// Arguments of GRU's and LSTM's recurrences, and the entry points of their kernels. No torch in
// here.
#pragma once

#include "../core/types.h"
#include "../cpu_product/isa.h"
#include "../cpu_product/matrix.h"
#include "../cpu_product/thread_team.h"

namespace minserve {

constexpr int kGruGates = 3, kLstmGates = 4;

// A vector of the operator's dtype or fp32; null data: there is none.
struct GateVector {
  const void* data = nullptr;
  bool is_float = false;  // fp32, whatever the operator's dtype is
};

// fp32 rows of the state, each contiguous, `stride` elements apart.
struct StateRows {
  float* data = nullptr;
  std::int64_t stride = 0;
};

// A step has no cu_seqlens, and row r is all of sequence r. Streams and the weight have the
// operator's dtype; layout.channels are hidden units.
struct GatedRnnArgs {
  Layout layout;
  Stream pre;        // [tokens, gates of units]
  Stream recurrent;  // of a step: U h + c, as pre
  Stream weight;     // of a scan: U [gates of units, units]
  GateVector bias;   // of a scan: c [gates of units]
  Stream h;          // [tokens, units]
  StateRows hidden;  // [num_slots, units]
  StateRows cell;    // of an LSTM; null data: a GRU

  MS_HD bool is_lstm() const { return cell.data != nullptr; }
  MS_HD std::int64_t gates() const { return is_lstm() ? kLstmGates : kGruGates; }
};

// A step that computes both of its products itself, on CUDA, for up to kDecodeRows rows.
struct GatedDecodeArgs {
  GatedRnnArgs step;  // whose weight and bias are U and c; there is neither pre nor recurrent
  Stream x;           // [batch, width]
  std::int64_t width = 0;
  Stream input_weight;    // W [gates of units, width]
  GateVector input_bias;  // b
  float* next = nullptr;  // [batch, units]
};

constexpr int kDecodeRows = 8;

// --- the CPU

// A sequence that a scan reads.
struct GatedRun {
  std::int64_t begin, length, slot;
};
// Rows of tokens that nobody reads, [begin, end).
struct SkippedRows {
  std::int64_t begin, end;
};

// A scan as a team of threads goes through it.
struct GatedScanWork {
  GatedRnnArgs args;
  const GatedRun* runs = nullptr;  // the longest first, so that those that go on are in front
  std::int64_t run_count = 0;
  const SkippedRows* skipped = nullptr;
  std::int64_t skipped_count = 0;
  Matrix matrix;  // the weight packed, of which `data` is to be written to `packed`
  char* packed = nullptr;
  char* fed = nullptr;  // two of [runs, units], whose rows are fed_row_bytes(units, 4) apart
};
using GatedScanFn = void (*)(const GatedScanWork&, ThreadTeam&, std::int64_t thread);
// Does a run of kGatedRun units of some rows of a step; item i is run i % runs of row i / runs.
using GatedStepFn = void (*)(const GatedRnnArgs&, std::int64_t begin, std::int64_t end);
constexpr std::int64_t kGatedRun = 256;

// float16 weights are packed as float32.
inline Kind packed_kind(Dtype dtype) {
  return dtype == Dtype::bf16 ? Kind::bf16 : Kind::f32;
}

MS_DECLARE_PER_PRODUCT_ISA(GatedScanFn gated_scan_kernel(Dtype dtype, bool lstm);
                           GatedStepFn gated_step_kernel(Dtype dtype, bool lstm);)

// --- CUDA

#ifdef MINSERVE_CUDA
namespace cuda {
// Bytes of memory on the device between the blocks of a scan.
std::int64_t gated_scan_exchange_bytes(const GatedRnnArgs& args, Dtype dtype);
// They enqueue on the stream.
void gated_scan(const GatedRnnArgs& args, Dtype dtype, void* exchange, int device, void* stream);
void gated_step(const GatedRnnArgs& args, Dtype dtype, int device, void* stream);
void gated_decode(const GatedDecodeArgs& args, Dtype dtype, int device, void* stream);
}  // namespace cuda
#endif

}  // namespace minserve
