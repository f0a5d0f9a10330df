// What a step does, phase by phase: the integers that Python writes, checked and laid out for the
// blocks of a GPU. Host code without CUDA, so that every build can say which models the kernel
// takes.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../cells/traits.h"
#include "../core/tensor_checks.h"
#include "../gemm/args.h"
#include "../gemm/heuristics_deterministic.h"
#include "args.h"

namespace minserve {

// The plan's phases, each with its part of the exchange and its share of the blocks. Their tensors
// are left out: whoever has them fills their addresses in. Throws where the kernel takes no such
// model, and says why.
class Plan {
 public:
  // Numbers of a phase (engine/ops/persistent_decode.py writes them).
  enum Field {
    kKind,
    kLayer,
    kChannels,
    kInputs,
    kTapCount,  // of the convolution that reads the residual stream next, or 0
    // Which of the tensors that come with the plan is its weight, and so on; -1: none.
    kWeight,
    kScale,
    kBias,
    kNorm,
    kTaps,
    kTapsBias,
    kBound,
    kOutputNorm,
    kFields
  };

  // Throws unless it is a table of such rows.
  static const std::int64_t* numbers_of(const Check& check, const Tensor& plan) {
    check.require(plan.is_cpu() && plan.scalar_type() == ScalarType::Long && plan.dim() == 2 &&
                      plan.size(1) == kFields && plan.is_contiguous(),
                  "plan must be int64 [phases, ", static_cast<int>(kFields), "] on the CPU, got ",
                  describe(plan));
    return static_cast<const std::int64_t*>(plan.const_data_ptr());
  }

  Plan(const Check& check, const std::int64_t* numbers, std::int64_t phases,
       std::int64_t weight_type, const std::string& cell, bool batch_invariant, int blocks)
      : check_(check), blocks_(blocks) {
    check.require(weight_type >= 0 && weight_type <= static_cast<int>(WeightType::fp8),
                  "weight_type must be 0, 1 or 2, got ", weight_type);
    args.cell_kind = require_cell<PersistentDecodeCells>(check, cell);
    const CellTraits& traits = traits_of(args.cell_kind);
    gates_ = traits.preactivations;
    output_gate_ = traits.preactivations > traits.inputs;
    has_bound_ = traits.parameters > 0;
    args.weights = static_cast<WeightType>(weight_type);
    if (batch_invariant || args.weights != WeightType::bf16) most_batch_ = kColumns;
    args.batch_invariant = batch_invariant;
    check.require(!batch_invariant || args.weights == WeightType::bf16,
                  "fixed_order is for weights in bfloat16");
    check.require(phases >= 2 && phases <= kMostPhases, "a plan has 2 to ", kMostPhases,
                  " phases, got ", phases);
    for (std::int64_t n = 0; n < phases; ++n) add(numbers + n * kFields);
    check.require(kind_of(args.phases - 1) == PhaseKind::logits, "the last phase must be logits");
  }

  PersistentDecodeArgs args;
  std::int64_t inner = 0, vocabulary = 0, layers = 0, conv_layers = 0;

  PhaseKind kind_of(int n) const { return static_cast<PhaseKind>(args.phase[n].kind); }
  std::int64_t gates_of(PhaseKind kind) const {
    return kind == PhaseKind::gates ? gates_ : kind == PhaseKind::swiglu ? 2 : 1;
  }

  // Rows that a batch may have.
  int most_batch() const { return most_batch_; }

  // Says how many inputs are in shared memory at a time: all of them, or as many as there is room
  // for.
  void set_batch(std::int64_t batch) {
    check_.require(batch >= 1 && batch <= most_batch_, "batch must be 1 to ", most_batch_, ", got ",
                   batch);
    args.batch = static_cast<int>(batch);
    const int block = inputs_of_block(args.weights);
    const int room =
        input_room(static_cast<int>(gates_), args.batch) / (rows_with_room(args.batch) * block * 2);
    int most_blocks = 0;
    for (int n = 1; n < args.phases; ++n) {
      DecodePhase& phase = args.phase[n];
      const int blocks = phase.inputs / block;
      phase.at_once = blocks;
      if (args.batch_invariant) {
        while (phase.at_once > room) phase.at_once /= 2;
      } else {  // whole rounds of warps
        const std::int64_t rounds = divided_up(blocks, kTaking);
        const std::int64_t pieces = blocks <= room ? 1 : divided_up(rounds, room / kTaking);
        phase.at_once = static_cast<int>(divided_up(rounds, pieces)) * kTaking;
      }
      args.in_pieces |= phase.at_once < blocks;
      most_blocks = std::max(most_blocks, std::min(phase.at_once, blocks));
    }
    args.set_bytes = column_tiles_of(args.batch) * args.column_tile_bytes;
    args.input_bytes = most_blocks * bytes_of_block(args.weights, splits(args.weights, args.batch),
                                                    std::min(args.batch, kColumns));
  }

 private:
  // Rows whose inputs have room all at once: of more than one column tile, for all that two have.
  int whole_rows(int inputs) const {
    const int row = 2 * inputs, all = input_room(static_cast<int>(gates_), kMostTokens) / row;
    return all >= kMostTokens ? kMostTokens : std::min(kMostInputBytes / row, kColumns);
  }

  // Inputs of more than there is room for come in pieces, if the sums of all tiles can wait in
  // registers and no norm needs all inputs first; in batch-invariant mode in halves or quarters,
  // that have as many parts each. A norm of a cell's outputs, whose sums of squares come with them,
  // needs all only in that mode.
  int most_batch_of(const DecodePhase& phase, bool normed) const {
    const int whole = whole_rows(phase.inputs);
    const auto tiles = phase.each * gates_of(static_cast<PhaseKind>(phase.kind));
    const bool all = normed || (phase.squares && args.batch_invariant);
    if (all || tiles > kMostDividedTiles) return whole;
    if (args.weights != WeightType::bf16 && whole < kMostSplit) return whole;  // split ones do not
    if (!args.batch_invariant) return kMostTokens;
    const int blocks = phase.inputs / inputs_of_block(args.weights);
    return phase.parts % kMostPieces || blocks % phase.parts ? whole : kMostPieces * whole;
  }

  void add(const std::int64_t* from) {
    const int n = args.phases++;
    DecodePhase& phase = args.phase[n] = {};
    const auto kind = static_cast<PhaseKind>(from[kKind]);
    const std::int64_t channels = from[kChannels], inputs = from[kInputs];
    check_.require(from[kKind] >= 0 && from[kKind] <= static_cast<int>(PhaseKind::swiglu) &&
                       (kind == PhaseKind::embed) == (n == 0),
                   "phase ", n, " has the kind ", from[kKind]);
    check_.require(channels > 0 && channels % kUnit == 0 && channels <= (1 << 24),
                   "channels of phase ", n, " must be a multiple of ", kUnit, ", got ", channels);
    check_.require(from[kLayer] >= 0 && from[kLayer] < kMostPhases, "phase ", n, " has the layer ",
                   from[kLayer]);
    const bool scaled = args.weights != WeightType::bf16, normed = from[kNorm] >= 0;
    check_.require(from[kScale] >= 0 ? scaled : !scaled || kind == PhaseKind::embed, "phase ", n,
                   " has a scale, or lacks one");
    phase.kind = static_cast<int>(kind);
    phase.layer = static_cast<int>(from[kLayer]);
    phase.units = static_cast<int>(channels / kUnit);
    phase.inputs = static_cast<int>(inputs);
    phase.out = static_cast<int>(args.column_tile_bytes);
    if (kind == PhaseKind::embed) {
      args.width = static_cast<int>(channels);
      args.ids = static_cast<int>(inputs);
      check_.require(divided_up(phase.units, blocks_) <= kMostKeptUnits, "a residual stream of ",
                     channels, " channels is too wide for ", blocks_, " multiprocessors");
      check_.require(!args.batch_invariant ||
                         (channels % kSquareRows == 0 && channels <= kSquareRows * kMostSquares),
                     "a residual stream in a fixed order must be a multiple of ", kSquareRows,
                     " and at most ", kSquareRows * kMostSquares, " wide, got ", channels);
    } else {
      const DecodePhase& before = args.phase[n - 1];
      const int block = inputs_of_block(args.weights);
      check_.require(inputs == before.units * kUnit && inputs % block == 0, "inputs of phase ", n,
                     " must be the channels of the one before, a multiple of ", block, ", got ",
                     inputs);
      phase.in = before.out;
      if (args.batch_invariant) {
        static_assert(kMostSplitK == BatchInvariantHeuristic::kMostSplitK);
        phase.parts = BatchInvariantHeuristic(channels, inputs, gates_of(kind), 1).parts();
      }
    }
    check_.require(kind != PhaseKind::swiglu || output_gate_, "phase ", n,
                   " is swiglu, which comes with cells that have an output gate");
    if (output_gate_ && n > 0 && kind_of(n - 1) == PhaseKind::gates) {
      check_.require(kind == PhaseKind::residual, "phase ", n,
                     " must be residual, after gates of a cell that has an output gate");
      phase.squares = args.phase[n - 1].squares;
      check_.require(!args.batch_invariant || inputs <= kSquareRows * kMostSquares,
                     "outputs of a cell in a fixed order must be at most ",
                     kSquareRows * kMostSquares, " channels, got ", inputs);
    }
    check_.require(!normed || (inputs == args.width && kind != PhaseKind::embed &&
                               kind != PhaseKind::residual),
                   "phase ", n, " has a norm of what is not the residual stream");
    if (kind == PhaseKind::residual) {
      check_.require(channels == args.width, "phase ", n, " must have ", args.width,
                     " channels, got ", channels);
    }
    if (kind == PhaseKind::gates) {
      check_.require(inner == 0 || inner == channels, "phase ", n, " has other channels of state");
      inner = channels;
      layers = std::max<std::int64_t>(layers, from[kLayer] + 1);
    }
    check_.require(from[kBound] < 0 || (kind == PhaseKind::gates && has_bound_), "phase ", n,
                   " has a lower bound, but no cell that reads it");
    check_.require(from[kOutputNorm] < 0 || (kind == PhaseKind::gates && output_gate_), "phase ", n,
                   " has a norm of outputs, but no cell that has one");
    const std::int64_t taps = from[kTapCount];
    if (taps != 0) {
      check_.require(taps >= 2 && taps <= kMostTaps, "convolutions must have 2 to ", kMostTaps,
                     " taps, got ", taps);
      check_.require(args.taps == 0 || args.taps == taps,
                     "all convolutions must have the same number of taps");
      check_.require(kind == PhaseKind::embed || kind == PhaseKind::residual, "phase ", n,
                     " has a convolution, but is not the residual stream's");
      args.taps = static_cast<int>(taps);
      conv_layers = std::max<std::int64_t>(conv_layers, from[kLayer] + 1);
    }
    if (kind == PhaseKind::logits) {
      vocabulary = channels;
    } else {
      args.column_tile_bytes += static_cast<std::int64_t>(phase.units) * kUnitLine;
    }
    if (output_gate_ && kind == PhaseKind::gates) {
      phase.squares = static_cast<int>(args.column_tile_bytes);
      args.column_tile_bytes +=
          divided_up(phase.units * bytes_of_squares(args.batch_invariant), kUnitLine) * kUnitLine;
    }
    check_.require(args.column_tile_bytes < (std::int64_t{1} << 31), "the model is too wide");
    // What the residual stream keeps in registers stays where it is; all else is dealt from where
    // the phase before has stopped, so that the blocks without any go round.
    phase.each = static_cast<int>(divided_up(phase.units, blocks_));
    if (kind != PhaseKind::embed) most_batch_ = std::min(most_batch_, most_batch_of(phase, normed));
    if (kind != PhaseKind::embed && kind != PhaseKind::residual) {
      phase.shift = next_block_;
      const int with_some = static_cast<int>(divided_up(phase.units, phase.each));
      next_block_ = (next_block_ + with_some) % blocks_;
    }
  }

  const Check& check_;
  std::int64_t gates_ = 0;
  bool output_gate_ = false, has_bound_ = false;  // of the cell
  int blocks_, next_block_ = 0;
  int most_batch_ = kMostTokens;
};

}  // namespace minserve
