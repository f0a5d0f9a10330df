// Arguments of a decode step of up to about a hundred sequences through a small model; shared by
// host and device code.
#pragma once

#include <cstdint>

#include "../cells/kind.h"
#include "../core/types.h"

namespace minserve {

constexpr int kClusterBlocks = 16;                     // which have all weights, a part each
constexpr int kMostClusterLayers = 32;                 // all arguments fit into those of a kernel
constexpr int kClusterWidthUnit = 8 * kClusterBlocks;  // a multiple of it is the residual stream's
constexpr int kMostClusterWidth = 4 * kClusterWidthUnit;
constexpr int kMostClusterTaps = 4;  // of a convolution

constexpr int kComputingWarps = 12, kPairs = kComputingWarps / 2;

constexpr int divided_up_by(int n, int by) {
  return (n + by - 1) / by;
}

// Weights come in tiles of 16 rows by 16 inputs, as lanes of a warp hold them for the tensor cores.
// Every pair of a block's warps has a stream of tiles of its own, in chunks.
constexpr int kTileBytes = 16 * 16 * 2;
constexpr int kChunkTiles = 8, kChunkBytes = kChunkTiles * kTileBytes;

// The tiles of one product in a pair's stream, and how many of them are a chunk.
struct Run {
  int tiles, of_chunk;
};

// Which products a model has, and what they are to a block. vocabulary: 0 without a head.
struct ClusterShape {
  int width = 0, inner = 0, hidden = 0, taps = 0, gates = 0, vocabulary = 0;

  // A unit of rows is a tile of them, of which a block's pairs have one in turn; of gates it is
  // eight channels, two gates to a tile.
  constexpr int mix_units() const {
    return taps > 0 ? divided_up_by(width / kClusterBlocks, 16) : 0;
  }
  constexpr int gate_units() const { return inner / kClusterBlocks / 8; }
  constexpr int up_units() const { return hidden / kClusterBlocks / 16; }
  constexpr int head_units() const { return divided_up_by(vocabulary, kClusterBlocks * 16); }
  constexpr int gate_rows() const { return divided_up_by(gates, 2); }
  // Tiles of the residual stream's rows that a warp has.
  constexpr int tiles_of_warp() const { return divided_up_by(width / 16, kComputingWarps); }
  // Steps of 16 inputs of this block's, of which a chunk has some.
  constexpr int out_steps() const { return inner / kClusterBlocks / 16; }
  constexpr int down_steps() const { return hidden / kClusterBlocks / 16; }
  constexpr int steps_of_chunk() const { return kChunkTiles / 2 / tiles_of_warp(); }

  static constexpr int kRuns = 5;  // of a layer
  constexpr Run run(int number, int pair) const {
    switch (number) {
      case 0:
        return rows(mix_units(), pair);
      case 1:
        return rows(gate_units(), pair, gate_rows());
      case 2:
        return part(out_steps());
      case 3:
        return rows(up_units(), pair);
      default:
        return part(down_steps());
    }
  }
  constexpr Run head_run(int pair) const { return rows(head_units(), pair); }
  constexpr std::int64_t tiles(int layers, int pair) const {
    std::int64_t all = 0;
    for (int number = 0; number < kRuns; ++number) all += run(number, pair).tiles;
    return all * layers + head_run(pair).tiles;
  }

 private:
  constexpr Run rows(int units, int pair, int rows_of_unit = 1) const {
    const int own = units > pair ? divided_up_by(units - pair, kPairs) : 0;
    return {own * rows_of_unit * (width / 16), kChunkTiles};
  }
  constexpr Run part(int steps) const {
    const int of_step = 2 * tiles_of_warp();
    return {steps * of_step, steps_of_chunk() * of_step};
  }
};

// What a layer's results are added to, or null: bfloat16 of as many numbers as it has channels.
struct ClusterLayer {
  const void *taps, *taps_bias, *mix_bias;  // taps [width, taps]
  const void *gates_bias, *out_bias, *up_bias, *down_bias;
};

// The cells that a model may have.
using ClusterDecodeCells = CellList<CellKind::mingru, CellKind::minlstm>;

struct ClusterDecodeArgs {
  CellKind cell_kind = {};
  ClusterShape shape = {};  // taps: 0 without convolutions; hidden: 0 without MLPs
  int batch = 0, layers = 0;
  int ids = 0;     // rows of the table
  int stages = 0;  // of each pair's ring of weights
  bool linear_candidate = false, normalize_gates = true;
  float eps = 0.0f;

  const std::int32_t* tokens = nullptr;  // [batch]
  const std::int32_t* slots = nullptr;   // [batch]
  const void* weights = nullptr;         // [kClusterBlocks, kPairs, stream_bytes]
  std::int64_t stream_bytes = 0;
  const void* table = nullptr;      // [ids, width]
  const void* head_bias = nullptr;  // [vocabulary] or null
  float* cell = nullptr;            // [layers, num_slots, inner]
  std::int64_t cell_layer_stride = 0, cell_slot_stride = 0;
  float* conv = nullptr;  // [layers, num_slots, taps - 1, width]
  std::int64_t conv_layer_stride = 0, conv_slot_stride = 0, conv_tap_stride = 0;
  int num_slots = 0;
  float* logits = nullptr;  // [batch, vocabulary]
  // Without a head: the results, [batch, width], of the last norm, whose weight is [width].
  void* hidden_states = nullptr;
  const void* norm = nullptr;

  ClusterLayer layer[kMostClusterLayers + 1];  // the head comes after the last one
};

// Where things are in a block's shared memory, in bytes, for so many sequences of its cluster.
struct ClusterLayout {
  int stream;     // what all blocks read next: the residual stream, [width / 8, tokens, 8]
  int convolved;  // the same of what comes out of a convolution
  // Sums over this block's part of the inputs, fp32 [width, tokens], on their way to the others;
  // before, what the warps of a pair tell each other.
  int outgoing;
  int incoming;  // all blocks' sums of this block's channels, [kClusterBlocks, own, tokens]
  int own;       // the residual stream's own channels, in pairs
  int state;     // this block's channels of the recurrence
  int hidden;    // of an MLP
  int ring;      // chunks of weights, a ring for each pair

  constexpr ClusterLayout(const ClusterShape& shape, int tokens)
      : stream(0),
        convolved(stream + shape.width * tokens * 2),
        outgoing(convolved + (shape.taps > 0 ? shape.width * tokens * 2 : 0)),
        incoming(outgoing + outgoing_bytes(shape, tokens)),
        own(incoming + shape.width * tokens * 4),
        state(own + own_bytes(shape, tokens)),
        hidden(state + shape.inner / kClusterBlocks * tokens * 2),
        ring(hidden + shape.hidden / kClusterBlocks * tokens * 2) {}

  // Of a block's channels.
  static constexpr int own_bytes(const ClusterShape& shape, int tokens) {
    return shape.width / kClusterBlocks * tokens * 2;
  }
  // What a lane tells the other warp's: of a tile of tokens two sums of each row, and squares.
  static constexpr int floats_of_lane(const ClusterShape& shape, int tokens) {
    return tokens / 8 * (2 * shape.gate_rows() + 1);
  }

 private:
  static constexpr int outgoing_bytes(const ClusterShape& shape, int tokens) {
    const int sums = shape.width * tokens * 4;
    const int told = kComputingWarps * 32 * floats_of_lane(shape, tokens) * 4;
    return sums > told ? sums : told;
  }
};

}  // namespace minserve
