// A packed language model in memory, and the work of one call on it. No torch in here.
//
// All weights lie in one block of memory (engine/models/backends/cpu.py writes it), each matrix as
// csrc/cpu_product/matrix.h has it. Vectors (biases, scales, norms) are fp32, padded with zeros to
// whole panels and in the order of the panels.
#pragma once

#include "../cells/kind.h"
#include "../core/types.h"
#include "../cpu_product/isa.h"
#include "../cpu_product/matrix.h"
#include "../cpu_product/thread_team.h"
#include "../gated_rnn/args.h"
#include "../selective/args.h"
#include "../ssd/args.h"

namespace minserve {

// A causal depthwise convolution.
struct Convolution {
  const float* taps = nullptr;  // [taps, padded channels]; null: there is none
  const float* bias = nullptr;
  std::int64_t channels = 0;
};

// The cells that layers may have. One that reads fewer pre-activations than it has (HGRN) has an
// output gate: the last pre-activation.
using CpuModelCells = CellList<CellKind::mingru, CellKind::minlstm, CellKind::hgrn>;
constexpr std::int64_t kGatedInputs = 2;  // that a cell with an output gate reads
constexpr std::int64_t kMostGateTaps = 8;

struct LayerPlan {
  Convolution conv;
  Matrix pointwise;
  const float* cell_norm = nullptr;
  Matrix gates;
  Convolution gate_convs[kGatedInputs];  // of the pre-activations that the cell reads
  const float* parameter = nullptr;      // of the cell, [inner]; null: it has none
  const float* output_norm = nullptr;    // [inner]; null: the cell has no output gate
  // Of Mamba's layers, whose `gates` give x | z and whose gate_convs[0] is that of x:
  Matrix select, dt;         // inner -> dt | B | C, and dt -> inner
  const float* A = nullptr;  // [inner, states]; of Mamba-2 [heads]
  const float* D = nullptr;  // [inner]; of Mamba-2 [heads]
  // Of Mamba-2's layers, whose `gates` give z | x B C | dt, each in whole panels, and whose
  // gate_convs[0] is that of x B C:
  const float* dt_bias = nullptr;     // [heads]
  const float* gated_norm = nullptr;  // [inner]
  // Of GRU's and LSTM's layers, whose `gates` give W x + b: U and c.
  Matrix recurrent;
  Matrix out;  // no data: identity
  const float* mlp_norm = nullptr;
  Matrix up, down;  // no data: no MLP
};

enum class MlpActivation : std::int64_t { gelu = 0, swiglu = 1 };

struct Plan {
  std::int64_t layers = 0, width = 0, inner = 0, hidden = 0, vocab = 0, taps = 0, gate_taps = 0;
  MlpActivation activation = MlpActivation::gelu;
  CellKind cell = {};
  std::int64_t states = 0;  // of a channel of Mamba's layers; 0: layers have a cell
  std::int64_t rank = 0;    // of their dt
  float selection_eps = 0;  // of the norms of their dt, B and C; 0: there are none
  // Of Mamba-2's layers; 0: there are none.
  std::int64_t heads = 0, head_dim = 0;
  std::int64_t groups = 0;          // which divide the heads
  float least_dt = 0, most_dt = 0;  // behind softplus
  // Of GRU's and LSTM's layers, gates of a unit; 0: these are others. They have no norms and no
  // residual stream, and their input may be wider or narrower than they are.
  std::int64_t rnn_gates = 0;
  std::int64_t embedding_width = 0;  // `width`, but for these
  bool linear_candidate = false, normalize_gates = true;
  bool half = false;  // what is multiplied with weights is rounded to bfloat16
  float eps = 0;
  // Rows [vocab, embedding_width] as `embedding_stored`; null: the head's matrix holds them.
  const char* embedding = nullptr;
  const float* embedding_scale = nullptr;
  Kind embedding_stored = Kind::f32;
  const float* norm = nullptr;
  Matrix head;
};

MS_HD std::int64_t selected_row_bytes(const Plan& plan, std::int64_t element) {
  return fed_row_bytes(plan.rank, element) + up_to(2 * plan.states, kPanel) * 4;
}

// Columns of x | B | C of Mamba-2, and of x | B | C | dt, the former in whole panels.
MS_HD std::int64_t ssd_convolved(const Plan& plan) {
  return plan.inner + 2 * plan.groups * plan.states;
}
MS_HD std::int64_t ssd_columns(const Plan& plan) {
  return up_to(ssd_convolved(plan), kPanel) + up_to(plan.heads, kPanel);
}

// Rows of activations; those of buffers that feed matrices lie fed_row_bytes() apart, and all
// buffers begin at cache lines.
struct Buffers {
  float* x = nullptr;     // [rows, embedding_width]: the residual stream
  char* fed = nullptr;    // [rows, width or embedding_width]: what a matrix of so many inputs reads
  char* h = nullptr;      // [rows, inner]
  char* mlp = nullptr;    // [rows, hidden]
  char* own = nullptr;    // per thread [kOwnRows, width]
  float* gate = nullptr;  // [rows, inner], of Mamba and Mamba-2: silu(z)
  // Of Mamba-2's layers; y takes the place of x.
  float* ssd = nullptr;   // [rows, x | B | C | dt]: what the recurrence reads
  char* own_h = nullptr;  // per thread kOwnRows of `h`
  // Of Mamba's layers, whose u and y are in `h`:
  float* selection = nullptr;  // [rows, rank + 2 states]: the product dt | B | C
  // Rows of dt, as a matrix reads it, and B | C, as floats, selected_row_bytes() apart; and per
  // thread kOwnRows of them.
  char* selected = nullptr;
  char* own_selected = nullptr;
  float* own_states = nullptr;  // per thread those of a group of panels, where `cell` is bfloat16
  // Of GRU's and LSTM's layers, which write h to `h` and `fed` in turn:
  float* pre = nullptr;     // [rows, panels of gates]: W x + b
  char* carried = nullptr;  // [layers, 2, runs, inner]: h before a step, and after it
  // Of cells with an output gate:
  float* squares = nullptr;  // [rows, panels of inner]: sums over h * h
  float* scales = nullptr;   // per thread [rows]
};

// Up to this many rows every thread prepares a matrix' input for itself, which costs less than
// waiting for each other.
constexpr std::int64_t kOwnRows = 4;

// The inputs that convolutions carry on, [layers, slots, taps - 1, channels].
struct Windows {
  float* data = nullptr;
  std::int64_t layer = 0, slot = 0, tap = 0;  // strides

  float* at(std::int64_t l, std::int64_t s) const { return data + l * layer + s * slot; }
};

// A call: a step, a prefill, or the head alone.
struct Work {
  const Plan* plan = nullptr;
  const LayerPlan* layers = nullptr;
  Buffers buffers;
  std::int64_t rows = 0;
  const void* tokens = nullptr;  // read when not null: rows of the embedding -> x
  bool long_tokens = false;
  // Of the sequences that rows are of, each one's in a step; their states move on.
  Layout layout;
  // The same for GRU and LSTM; in a step every row is a run, with or without a slot.
  const GatedRun* runs = nullptr;
  std::int64_t run_count = 0;
  const SkippedRows* skipped = nullptr;
  std::int64_t skipped_count = 0;
  // [layers, slots, inner]; of Mamba and Mamba-2 [layers, slots, inner, states], fp32 or bfloat16.
  void* cell = nullptr;
  bool half_cell = false;
  std::int64_t cell_layer = 0, cell_slot = 0;
  float* memory = nullptr;  // c of an LSTM, [layers, slots, inner], whose h is in `cell`
  std::int64_t memory_layer = 0, memory_slot = 0;
  Windows conv;                      // of width
  Windows gate_convs[kGatedInputs];  // of inner; of Mamba-2 x | B | C
  SsdFn ssd = nullptr;               // Mamba-2's recurrence, of fp32 streams
  float* normed = nullptr;           // [rows, width]: the final norm's output, when wanted
  const float* hidden = nullptr;     // [rows, width]: when given, only the head is applied to it
  float* logits = nullptr;           // [rows, vocab], when wanted
};

using CpuModelFn = void (*)(const Work&, ThreadTeam&, std::int64_t thread);

// fed_bytes: of an element that feeds matrices; instruction sets differ in how they keep bfloat16.
MS_DECLARE_PER_PRODUCT_ISA(void run_cpu_model(const Work& work, ThreadTeam& team,
                                              std::int64_t thread);
                           std::int64_t fed_bytes(bool half);)

}  // namespace minserve
