// Arguments of a whole decode step in one kernel; shared by host and device code.
#pragma once

#include <cstdint>

#include "../cells/kind.h"
#include "../core/types.h"

namespace minserve {

// What is made of a product's rows. `embed` has no product: it looks rows of a table up. The
// numbers are also those of the plan that Python writes (engine/ops/persistent_decode.py).
enum class PhaseKind : int { embed, residual, gates, gelu, logits, swiglu };

// What all weights of products are.
enum class WeightType : int { bf16, int8, fp8 };  // fp8: e4m3

// Inputs of each product come in blocks: what 128 bytes of a row of weights have.
constexpr int kBlockBytes = 128;
constexpr int inputs_of_block(WeightType type) {
  return kBlockBytes / (type == WeightType::bf16 ? 2 : 1);
}

// One product, and what its results go through before the next one reads them. Channels come in
// units of eight neighbours.
struct DecodePhase {
  const void* weight;  // tensor map of [gates * channels, inputs]; embed: the table [ids, channels]
  // What the sums of 8-bit weights are multiplied with, [gates * channels]; embed: the rows of an
  // 8-bit table, [ids]; or null.
  const float* scale;
  const void* bias;  // [gates * channels] or null
  const void* norm;  // weights of its inputs' norm, [inputs], or null
  // Of a convolution that reads the residual stream next, or null: [channels, taps], [channels].
  const void *taps, *taps_bias;
  std::int32_t kind;
  std::int32_t layer;  // of the state rows that move on: the recurrence's, or the convolution's
  std::int32_t units, inputs;
  std::int32_t each;   // neighbouring units that a block has, as long as there are any
  std::int32_t shift;  // the block whose number this is has the first ones
  std::int32_t parts;  // in batch-invariant mode: of the inputs, each summed from zero
  // Blocks of the inputs that are in shared memory at a time: all of them but where some inputs
  // come in pieces, each of which adds to the sums of those before. There are none of a norm
  // that sums their squares.
  std::int32_t at_once;
  // Where in a column tile's set of the exchange, in bytes: units, [tokens, 8] in bfloat16 each.
  std::int32_t in, out;
  // Of a cell whose outputs are gated and normed, in the exchange as well: sums of squares of these
  // outputs, which `gates` writes and the residual phase after it divides by. Else 0.
  std::int32_t squares;
  const float* bound;       // gates: the cell's parameter, [channels], or null: zeros
  const void* output_norm;  // gates: weights of that norm, [channels], or null: ones
};

constexpr int kUnit = 8;         // channels
constexpr int kMostTokens = 16;  // rows of a batch, at most
// Rows are taken eight at a time, a column tile: each column tile has columns of the tensor cores'
// products, lines of the exchange and epilogue warps of its own, and weights are loaded
// once for all.
constexpr int kColumns = 8;
constexpr int kMostColumnTiles = 2;
static_assert(kMostTokens == kMostColumnTiles * kColumns);
constexpr int column_tiles_of(int batch) {
  return (batch + kColumns - 1) / kColumns;
}
constexpr int kMostPhases = 224;   // of a step, at most: all arguments fit into those of a kernel
constexpr int kMostTaps = 4;       // of a convolution, at most
constexpr int kMostKeptUnits = 3;  // of the residual stream in a block, at most
constexpr int kMostSplitK = 8;     // of the inputs, in batch-invariant mode
constexpr int kMostSquares = 64;   // sums of squares of a token, in batch-invariant mode
constexpr int kMostInputBytes = 64 * 1024;  // of all tokens' inputs at a time, at most
// Where the sums of three gates and two column tiles leave no room for as many.
constexpr int kFewInputBytes = 32 * 1024;
constexpr int kMostDividedTiles = 2;  // of a block, where inputs come in pieces: sums have to wait
constexpr int kMostPieces = 4;  // of inputs, in batch-invariant mode: each has some of the parts
constexpr int kTaking = 16;     // warps, each of which takes every so manyth block of inputs
constexpr int kUnitLine = kUnit * kColumns * 2;  // bytes: 128, as a line of the caches

// Sums of squares of a unit: of eight channels of each token, or in batch-invariant mode of four
// and four, fp32 [units][tokens] or [units][tokens][2].
constexpr int bytes_of_squares(bool batch_invariant) {
  return kColumns * 4 * (batch_invariant ? 2 : 1);
}

// Whether 8-bit weights are multiplied as they are, by inputs in two 8-bit parts
// (activation_tiles.cuh). To widen weights is a work per weight, to split inputs one per token.
constexpr int kMostSplit = 2;  // tokens
constexpr bool splits(WeightType type, int batch) {
  return type != WeightType::bf16 && batch <= kMostSplit;
}
// From a unit's values in the exchange to the next one's. Two units of one or two tokens share a
// line: whoever asks for all of them has fewer lines to ask for.
constexpr int bytes_of_unit(bool split) {
  return split ? kUnitLine / 2 : kUnitLine;
}
static_assert(bytes_of_unit(true) >= kMostSplit * kUnit * 2, "room for all tokens");
constexpr int input_room(int gates, int batch) {
  return gates > 2 && batch > kColumns ? kFewInputBytes : kMostInputBytes;
}
// Rows that there is room for in shared memory: of several column tiles each has all.
constexpr int rows_with_room(int batch) {
  return batch <= kColumns ? batch : column_tiles_of(batch) * kColumns;
}
// What a block of the inputs of so many rows of a column tile takes there.
constexpr int bytes_of_block(WeightType type, bool split, int rows) {
  return rows * inputs_of_block(type) * 2 + (split ? 16 * kMostSplit : 0);
}

// The cells that a model may have.
using PersistentDecodeCells = CellList<CellKind::mingru, CellKind::minlstm, CellKind::hgrn>;

struct PersistentDecodeArgs {
  int phases = 0;
  int batch = 0;
  bool in_pieces = false;        // some inputs have no room at once
  bool batch_invariant = false;  // sums are the bits of gemm/ in batch-invariant mode; bf16 only
  WeightType weights = WeightType::bf16;
  CellKind cell_kind = {};
  int taps = 0;         // 0: no convolutions
  int ids = 0;          // rows of the table
  int width = 0;        // of the residual stream
  int input_bytes = 0;  // of a column tile's inputs at a time, at most
  int stages = 0;       // of the ring of weights
  int in_flight = 0;    // of these, that are on their way at once
  bool linear_candidate = false, normalize_gates = true;
  float eps = 0.0f;

  const std::int32_t* tokens = nullptr;  // [batch]
  const std::int32_t* slots = nullptr;   // [batch]
  float* cell = nullptr;                 // [layers, num_slots, inner]
  std::int64_t cell_layer_stride = 0, cell_slot_stride = 0;
  float* conv = nullptr;  // [layers, num_slots, taps - 1, width]
  std::int64_t conv_layer_stride = 0, conv_slot_stride = 0, conv_tap_stride = 0;
  int num_slots = 0;
  float* logits = nullptr;  // [batch, vocabulary]

  unsigned long long* ended = nullptr;  // how many blocks have ended, of all steps
  // Two sets, each of a column tile after the other; all bits are set before the first step.
  unsigned char* exchange = nullptr;
  std::int64_t column_tile_bytes = 0, set_bytes = 0;

  DecodePhase phase[kMostPhases];
};

}  // namespace minserve
