// Arguments of a GEMM with its epilogue; shared by host and device code.
#pragma once

#include <cstdint>

#include "../cells/kind.h"
#include "../core/types.h"

namespace minserve {

// What is made of a product y = W x (scaled, bias added) before it is written, where no step of a
// recurrence follows.
enum class Epilogue : int {
  plain,     // y
  gelu,      // y Phi(y), exact
  logits,    // y in fp32
  residual,  // x += y; x times the next norm's weight; sums of squares of x; x += ahead
  swiglu,    // silu(gate) * up, of two rows of W for each channel: gate | up
  // Of up to kMostSmallBatch tokens:
  wide_residual,  // residual, of an x in fp32; x times the next norm's weight is rounded
  convolve,       // of some channels one step of a causal convolution and SiLU of it, of others y
};
constexpr std::int64_t kMostSmallBatch = 64;
constexpr int kConvolvedTaps = 4;

// The cells whose step an epilogue computes.
using GemmCells = CellList<CellKind::mingru, CellKind::minlstm, CellKind::hgrn>;

// Channels whose squares are summed together; a norm adds these sums up in their order.
constexpr int kSquareRows = 64;

// The input is x norm_weight, and its RMS norm's division is left for the product's sums. Behind
// a cell with an output gate it is h times the gate, and the norm's weight is in W.
struct DeferredNorm {
  const float* squares = nullptr;  // [blocks, tokens]; null: there is no norm
  int square_blocks = 0;
  float width = 1.0f;  // what the sum of squares is divided by
  float eps = 0.0f;
};

struct GemmArgs : DeferredNorm {
  Epilogue epilogue = Epilogue::plain;
  std::int64_t tokens = 0;
  std::int64_t channels = 0;  // of the output: rows of W, over the gates
  std::int64_t inputs = 0;

  const void* bias = nullptr;  // [rows of W]
  void* out = nullptr;         // [tokens, channels]

  void* x = nullptr;                  // residual: [tokens, channels], in place
  const void* norm_weight = nullptr;  // residual: [channels], of the norm that comes next
  void* scaled = nullptr;             // residual: [tokens, channels], or null: x itself, or none
  // [channels / kSquareRows, tokens]. residual: of x, or null; a step with an output gate: of h.
  float* squares_out = nullptr;
  const void* ahead = nullptr;  // residual: [channels], added to x after that; or null

  float* state = nullptr;  // steps: [num_slots, channels] with rows state_stride apart
  std::int64_t state_stride = 0, num_slots = 0;
  const std::int32_t* slots = nullptr;  // [tokens]
  const float* parameter = nullptr;     // [channels], of cells that have one; or null: zeros
  bool linear_candidate = false, normalize_gates = true;

  // convolve: of channels from first_convolved on. Their state rows [kConvolvedTaps - 1, convolved]
  // have inputs tap_stride apart, oldest first; what comes of them is in convolved_out.
  std::int64_t first_convolved = 0, convolved = 0, tap_stride = 0;
  const void* filter = nullptr;       // [convolved, kConvolvedTaps]
  const void* filter_bias = nullptr;  // [convolved], or null
  void* convolved_out = nullptr;      // [tokens, convolved]

  bool batch_invariant = false;  // sums in an order that the number of tokens has no part in
  int serial_split_k = 1;        // parts of the inputs that a block takes one after another
};

struct EmbedArgs {
  std::int64_t tokens = 0, channels = 0, vocabulary = 0;
  const std::int32_t* ids = nullptr;  // [tokens]; out of range: zeros
  const void* table = nullptr;        // [vocabulary, channels]
  void* x = nullptr;
  const void* norm_weight = nullptr;
  void* scaled = nullptr;    // or null: of ones, or no norm comes next
  float* squares = nullptr;  // or null
};

}  // namespace minserve
