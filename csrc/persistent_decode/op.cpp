// A whole decode step on Hopper: checks, the plan, arguments. CUDA only.
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "../core/operators.h"
#include "../gemm/heuristics_deterministic.h"
#include "../core/require_sm90.h"
#include "launch.h"
#include "../core/raw_pointers.h"

namespace minserve {

namespace {

// Numbers of a phase in the plan.
enum Field {
  kKind,
  kLayer,
  kChannels,
  kInputs,
  kWeight,
  kScale,
  kBias,
  kNorm,
  kTaps,
  kTapsBias,
  kFields
};

// The plan's phases, each with its part of the exchange and its share of the blocks.
class Plan {
 public:
  Plan(const Check& check, const Tensor& plan, std::int64_t weight_type, std::int64_t gates,
       bool fixed_order, int blocks)
      : check_(check), gates_(gates), blocks_(blocks) {
    check.require(weight_type >= 0 && weight_type <= static_cast<int>(WeightType::fp8),
                  "weight_type must be 0, 1 or 2, got ", weight_type);
    check.require(gates == 2 || gates == 3, "gates must be 2 or 3, got ", gates);
    args.weights = static_cast<WeightType>(weight_type);
    if (fixed_order || args.weights != WeightType::bf16) most_batch_ = kEight;
    args.fixed_order = fixed_order;
    check.require(!fixed_order || args.weights == WeightType::bf16,
                  "fixed_order is for weights in bfloat16");
    check.require(plan.is_cpu() && plan.scalar_type() == ScalarType::Long && plan.dim() == 2 &&
                      plan.size(1) == kFields && plan.is_contiguous() && plan.size(0) >= 2 &&
                      plan.size(0) <= kMostPhases,
                  "plan must be int64 [phases, ", static_cast<int>(kFields),
                  "] on the CPU, of 2 to ", kMostPhases, " phases, got ", describe(plan));
    const auto* numbers = static_cast<const std::int64_t*>(plan.const_data_ptr());
    for (std::int64_t n = 0; n < plan.size(0); ++n) add(numbers + n * kFields);
    args.phases = static_cast<int>(plan.size(0));
    check.require(kind_of(args.phases - 1) == PhaseKind::logits, "the last phase must be logits");
  }

  WholeStepArgs args;
  std::int64_t inner = 0, vocabulary = 0, layers = 0, conv_layers = 0;

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
      WholeStepPhase& phase = args.phase[n];
      const int blocks = phase.inputs / block;
      phase.at_once = blocks;
      if (args.fixed_order) {
        while (phase.at_once > room) phase.at_once /= 2;
      } else {  // whole rounds of warps
        const std::int64_t rounds = divided_up(blocks, kTaking);
        const std::int64_t pieces = blocks <= room ? 1 : divided_up(rounds, room / kTaking);
        phase.at_once = static_cast<int>(divided_up(rounds, pieces)) * kTaking;
      }
      args.in_pieces |= phase.at_once < blocks;
      most_blocks = std::max(most_blocks, std::min(phase.at_once, blocks));
    }
    args.set_bytes = eights_of(args.batch) * args.eight_bytes;
    args.input_bytes = most_blocks * bytes_of_block(args.weights, splits(args.weights, args.batch),
                                                    std::min(args.batch, kEight));
  }

 private:
  PhaseKind kind_of(int n) const { return static_cast<PhaseKind>(args.phase[n].kind); }
  std::int64_t gates_of(PhaseKind kind) const { return kind == PhaseKind::gates ? gates_ : 1; }

  // Rows whose inputs have room all at once: of more than an eight, for all that two eights have.
  int whole_rows(int inputs) const {
    const int row = 2 * inputs, all = input_room(static_cast<int>(gates_), kMostTokens) / row;
    return all >= kMostTokens ? kMostTokens : std::min(kMostInputBytes / row, kEight);
  }

  // Inputs of more than there is room for come in pieces, if the sums of all tiles can wait in
  // registers and no norm needs all inputs first; in a fixed order in halves or quarters, that have
  // as many parts each.
  int most_batch_of(const WholeStepPhase& phase) const {
    const int whole = whole_rows(phase.inputs);
    const auto tiles = phase.each * gates_of(static_cast<PhaseKind>(phase.kind));
    if (phase.norm || tiles > kMostDividedTiles) return whole;
    if (args.weights != WeightType::bf16 && whole < kMostSplit) return whole;  // split ones do not
    if (!args.fixed_order) return kMostTokens;
    const int blocks = phase.inputs / inputs_of_block(args.weights);
    return phase.parts % kMostPieces || blocks % phase.parts ? whole : kMostPieces * whole;
  }

  void add(const std::int64_t* from) {
    const int n = args.phases++;
    WholeStepPhase& phase = args.phase[n] = {};
    const auto kind = static_cast<PhaseKind>(from[kKind]);
    const std::int64_t channels = from[kChannels], inputs = from[kInputs];
    check_.require(from[kKind] >= 0 && from[kKind] <= static_cast<int>(PhaseKind::logits) &&
                       (kind == PhaseKind::embed) == (n == 0),
                   "phase ", n, " has the kind ", from[kKind]);
    check_.require(channels > 0 && channels % kUnit == 0 && channels <= (1 << 24),
                   "channels of phase ", n, " must be a multiple of ", kUnit, ", got ", channels);
    check_.require(from[kWeight] != 0 && from[kLayer] >= 0, "phase ", n, " lacks a weight");
    phase.weight = pointer(from[kWeight]);
    const bool scaled = args.weights != WeightType::bf16;
    check_.require(from[kScale] != 0 ? scaled : !scaled || kind == PhaseKind::embed, "phase ", n,
                   " has a scale, or lacks one");
    phase.scale = static_cast<const float*>(pointer(from[kScale]));
    phase.bias = pointer(from[kBias]);
    phase.norm = pointer(from[kNorm]);
    phase.taps = pointer(from[kTaps]);
    phase.taps_bias = pointer(from[kTapsBias]);
    phase.kind = static_cast<int>(kind);
    phase.layer = static_cast<int>(from[kLayer]);
    phase.units = static_cast<int>(channels / kUnit);
    phase.inputs = static_cast<int>(inputs);
    phase.out = static_cast<int>(args.eight_bytes);
    if (kind == PhaseKind::embed) {
      args.width = static_cast<int>(channels);
      args.ids = static_cast<int>(inputs);
      check_.require(divided_up(phase.units, blocks_) <= kMostKeptUnits, "a residual stream of ",
                     channels, " channels is too wide for ", blocks_, " multiprocessors");
      check_.require(!args.fixed_order ||
                         (channels % kSquareRows == 0 && channels <= kSquareRows * kMostSquares),
                     "a residual stream in a fixed order must be a multiple of ", kSquareRows,
                     " and at most ", kSquareRows * kMostSquares, " wide, got ", channels);
    } else {
      const WholeStepPhase& before = args.phase[n - 1];
      const int block = inputs_of_block(args.weights);
      check_.require(inputs == before.units * kUnit && inputs % block == 0, "inputs of phase ", n,
                     " must be the channels of the one before, a multiple of ", block, ", got ",
                     inputs);
      phase.in = before.out;
      if (args.fixed_order) {
        static_assert(kMostParts == FixedChooser::kMostParts);
        phase.parts = FixedChooser(channels, inputs, gates_of(kind), 1).parts();
      }
    }
    check_.require(!phase.norm || (inputs == args.width &&
                                   (kind == PhaseKind::gates || kind == PhaseKind::gelu ||
                                    kind == PhaseKind::logits)),
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
    if (phase.taps) conv_layers = std::max<std::int64_t>(conv_layers, from[kLayer] + 1);
    if (kind == PhaseKind::logits) {
      vocabulary = channels;
    } else {
      args.eight_bytes += static_cast<std::int64_t>(phase.units) * kUnitLine;
    }
    check_.require(args.eight_bytes < (std::int64_t{1} << 31), "the model is too wide");
    // What the residual stream keeps in registers stays where it is; all else is dealt from where
    // the phase before has stopped, so that the blocks without any go round.
    phase.each = static_cast<int>(divided_up(phase.units, blocks_));
    if (kind != PhaseKind::embed) most_batch_ = std::min(most_batch_, most_batch_of(phase));
    if (kind != PhaseKind::embed && kind != PhaseKind::residual) {
      phase.shift = next_block_;
      const int with_some = static_cast<int>(divided_up(phase.units, phase.each));
      next_block_ = (next_block_ + with_some) % blocks_;
    }
  }

  const Check& check_;
  std::int64_t gates_;
  int blocks_, next_block_ = 0;
  int most_batch_ = kMostTokens;
};

}  // namespace

void whole_step_map(const Tensor& weight, const Tensor& map) {
  const Check check("whole_step_map", weight, "weight");
  require_hopper(check, weight);
  const ScalarType scalar = weight.scalar_type();
  const WeightType type = scalar == ScalarType::BFloat16 ? WeightType::bf16
                          : scalar == ScalarType::Char   ? WeightType::int8
                                                         : WeightType::fp8;
  check.require(
      (type != WeightType::fp8 || scalar == ScalarType::Float8_e4m3fn) && weight.dim() == 2 &&
          weight.is_contiguous() && weight.size(0) > 0 && weight.size(0) % kUnit == 0 &&
          weight.size(1) > 0 && weight.size(1) % inputs_of_block(type) == 0 &&
          reinterpret_cast<std::uintptr_t>(weight.const_data_ptr()) % 16 == 0,
      "weight must be a contiguous matrix of bfloat16, int8 or float8_e4m3fn, rows a multiple of ",
      kUnit, ", inputs of ", inputs_of_block(type), ", beginning at a multiple of 16 bytes; got ",
      describe(weight));
  check.require(map.is_cpu() && map.scalar_type() == ScalarType::Byte && map.is_contiguous() &&
                    map.numel() == kTensorMapBytes,
                "map must be uint8[", kTensorMapBytes, "] on the CPU, got ", describe(map));
  alignas(64) unsigned char bytes[kTensorMapBytes];
  cuda::map_weight(bytes, weight.const_data_ptr(), type, weight.size(0), weight.size(1),
                   weight.get_device_index());
  std::memcpy(map.mutable_data_ptr(), bytes, sizeof(bytes));
}

Tensor whole_step(const Tensor& tokens, const Tensor& slots_given, const Tensor& plan_numbers,
                  const Tensor& cell, const MaybeTensor& conv, const Tensor& exchange,
                  const Tensor& ended, std::int64_t weight_type, std::int64_t gates, double eps,
                  bool linear_candidate, bool normalize_gates, bool fixed_order) {
  const Check check("whole_step", tokens, "tokens");
  require_hopper(check, tokens);
  const int device = tokens.get_device_index();
  Plan plan(check, plan_numbers, weight_type, gates, fixed_order, cuda::whole_step_blocks(device));
  WholeStepArgs& args = plan.args;
  const std::int64_t batch = tokens.dim() == 1 ? tokens.size(0) : 0;
  check.tensor(tokens, "tokens", ScalarType::Int, {-1}, "[batch], int32");
  check.tensor(slots_given, "slots", ScalarType::Int, {batch}, "[batch], int32");
  check.require(tokens.is_contiguous(), "tokens must be contiguous");
  const Tensor slots = torch::stable::contiguous(slots_given);
  plan.set_batch(batch);
  check.tensor(cell, "cell", ScalarType::Float, {plan.layers, -1, plan.inner},
               "[layers, num_slots, inner]");
  check.require(in_pairs(cell), "channels of cell must lie together, rows at multiples of 8 bytes");
  check.require(plan.layers == 0 || cell.size(1) > 0, "cell must have a slot");
  check.require(static_cast<bool>(conv) == (plan.conv_layers > 0),
                "conv must be given for a plan with convolutions, and only then");
  if (conv) {
    check.tensor(*conv, "conv", ScalarType::Float, {plan.conv_layers, cell.size(1), -1, args.width},
                 "[layers, num_slots, taps - 1, d_model]");
    check.require(conv->size(2) >= 1 && conv->size(2) < kMostTaps, "conv must have 2 to ",
                  kMostTaps, " taps, got ", conv->size(2) + 1);
    check.require(in_pairs(*conv),
                  "channels of conv must lie together, rows at multiples of 8 bytes");
    args.taps = static_cast<int>(conv->size(2)) + 1;
    args.conv = static_cast<float*>(conv->mutable_data_ptr());
    args.conv_layer_stride = conv->stride(0);
    args.conv_slot_stride = conv->stride(1);
    args.conv_tap_stride = conv->stride(2);
  }
  check.tensor(exchange, "exchange", ScalarType::Byte, {2 * args.set_bytes}, "two sets of lines");
  check.tensor(ended, "ended", ScalarType::Long, {1}, "[1], int64");
  check.require(exchange.is_contiguous(), "exchange must be contiguous");

  args.gates = static_cast<int>(gates);
  args.linear_candidate = linear_candidate;
  args.normalize_gates = normalize_gates;
  args.eps = static_cast<float>(eps);
  args.tokens = static_cast<const std::int32_t*>(tokens.const_data_ptr());
  args.slots = static_cast<const std::int32_t*>(slots.const_data_ptr());
  args.cell = static_cast<float*>(cell.mutable_data_ptr());
  args.cell_layer_stride = cell.stride(0);
  args.cell_slot_stride = cell.stride(1);
  args.num_slots = static_cast<int>(cell.size(1));
  args.ended = static_cast<unsigned long long*>(ended.mutable_data_ptr());
  args.exchange = static_cast<unsigned char*>(exchange.mutable_data_ptr());
  Tensor logits = torch::stable::new_empty(cell, {batch, plan.vocabulary});
  args.logits = static_cast<float*>(logits.mutable_data_ptr());
  cuda::whole_step(args, device, current_stream(tokens));
  return logits;
}

}  // namespace minserve
