// A whole decode step on Hopper: checks, the plan, arguments. CUDA only.
#include <cstdint>
#include <cstring>

#include "../core/operators.h"
#include "../core/require_sm90.h"
#include "../core/state_alignment.h"
#include "launch.h"
#include "plan.h"

namespace minserve {

namespace {

// The tensors that a plan's phases name, checked.
class PhaseTensors {
 public:
  PhaseTensors(const Check& check, const std::vector<Tensor>& tensors, const Tensor& maps,
               const Plan& plan, int device)
      : check_(check), tensors_(tensors), plan_(plan), device_(device) {
    check.tensor(maps, "maps", ScalarType::Byte, {plan.args.phases, kTensorMapBytes},
                 "[phases, 128], uint8");
    check.require(maps.is_contiguous() && address_of(maps) % 64 == 0,
                  "maps must be contiguous and begin at a multiple of 64 bytes");
    maps_ = static_cast<const unsigned char*>(maps.const_data_ptr());
  }

  // Fills the addresses of phase n in, whose numbers are `from`.
  void fill(DecodePhase& phase, int n, const std::int64_t* from) const {
    const PhaseKind kind = plan_.kind_of(n);
    const bool embed = kind == PhaseKind::embed;
    const std::int64_t channels = from[Plan::kChannels], inputs = from[Plan::kInputs];
    const std::int64_t rows = embed ? inputs : plan_.gates_of(kind) * channels;
    const Tensor& weight = at(n, from[Plan::kWeight]);
    const bool narrow = from[Plan::kScale] >= 0;
    const Need need{n, rows, embed ? channels : inputs};
    require(weight, "weight", narrow ? type_of_weights() : ScalarType::BFloat16, need,
            embed ? 4 : 16);
    phase.weight = embed ? weight.const_data_ptr() : maps_ + n * kTensorMapBytes;
    phase.scale = static_cast<const float*>(
        optional(from[Plan::kScale], "scale", ScalarType::Float, {n, rows}, 8));
    phase.bias = optional(from[Plan::kBias], "bias", ScalarType::BFloat16, {n, rows}, 4);
    phase.norm = optional(from[Plan::kNorm], "norm", ScalarType::BFloat16, {n, inputs}, 16);
    const std::int64_t taps = from[Plan::kTapCount];
    check_.require((taps > 0) == (from[Plan::kTaps] >= 0), "phase ", n, " lacks taps");
    phase.taps =
        optional(from[Plan::kTaps], "taps", ScalarType::BFloat16, {n, plan_.args.width, taps}, 2);
    phase.taps_bias = optional(from[Plan::kTapsBias], "taps_bias", ScalarType::BFloat16,
                               {n, plan_.args.width}, 4);
    phase.bound = static_cast<const float*>(
        optional(from[Plan::kBound], "bound", ScalarType::Float, {n, channels}, 8));
    phase.output_norm =
        optional(from[Plan::kOutputNorm], "output_norm", ScalarType::BFloat16, {n, channels}, 4);
  }

 private:
  // What a tensor of a phase has to be: a vector of `rows`, or a matrix.
  struct Need {
    int phase;
    std::int64_t rows, columns = 0;
  };

  static std::uintptr_t address_of(const Tensor& t) {
    return reinterpret_cast<std::uintptr_t>(t.const_data_ptr());
  }
  ScalarType type_of_weights() const {
    return plan_.args.weights == WeightType::int8 ? ScalarType::Char : ScalarType::Float8_e4m3fn;
  }
  const Tensor& at(int n, std::int64_t index) const {
    check_.require(index >= 0 && index < static_cast<std::int64_t>(tensors_.size()), "phase ", n,
                   " names tensor ", index, " of ", tensors_.size());
    return tensors_[static_cast<std::size_t>(index)];
  }
  void require(const Tensor& t, const char* name, ScalarType type, const Need& need,
               unsigned alignment) const {
    const bool vector = need.columns == 0;
    const bool fits = t.dim() == (vector ? 1 : 2) && t.size(0) == need.rows &&
                      (vector || t.size(1) == need.columns) && t.scalar_type() == type &&
                      t.is_contiguous() && address_of(t) % alignment == 0;
    if (!fits) {  // hundreds are looked at, and words cost more than that
      check_.require(false, name, " of phase ", need.phase, " must be contiguous [", need.rows,
                     vector ? "" : ", " + std::to_string(need.columns), "], aligned to ", alignment,
                     " bytes, in the type of the plan; got ", describe(t));
    }
    if (t.is_cpu() || t.get_device_index() != device_) check_.same_device(t, name);
  }
  const void* optional(std::int64_t index, const char* name, ScalarType type, const Need& need,
                       unsigned alignment) const {
    if (index < 0) return nullptr;
    const Tensor& t = at(need.phase, index);
    require(t, name, type, need, alignment);
    return t.const_data_ptr();
  }

  const Check& check_;
  const std::vector<Tensor>& tensors_;
  const Plan& plan_;
  const int device_;
  const unsigned char* maps_;
};

}  // namespace

void persistent_decode_map(const Tensor& weight, const Tensor& map) {
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
  cuda::encode_weight_map(bytes, weight.const_data_ptr(), type, weight.size(0), weight.size(1),
                          weight.get_device_index());
  std::memcpy(map.mutable_data_ptr(), bytes, sizeof(bytes));
}

Tensor persistent_decode(const Tensor& tokens, const Tensor& slots_given,
                         const std::vector<Tensor>& tensors, const Tensor& maps,
                         const Tensor& plan_numbers, const Tensor& cell, const MaybeTensor& conv,
                         const Tensor& exchange, const Tensor& ended, std::int64_t weight_type,
                         const std::string& kind, double eps, bool linear_candidate,
                         bool normalize_gates, bool batch_invariant) {
  const Check check("whole_step", tokens, "tokens");
  require_hopper(check, tokens);
  const int device = tokens.get_device_index();
  const std::int64_t* numbers = Plan::numbers_of(check, plan_numbers);
  Plan plan(check, numbers, plan_numbers.size(0), weight_type, kind, batch_invariant,
            cuda::persistent_decode_blocks(device));
  PersistentDecodeArgs& args = plan.args;
  const PhaseTensors of_phases(check, tensors, maps, plan, device);
  for (int n = 0; n < args.phases; ++n) {
    of_phases.fill(args.phase[n], n, numbers + n * Plan::kFields);
  }
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
    check.tensor(*conv, "conv", ScalarType::Float,
                 {plan.conv_layers, cell.size(1), args.taps - 1, args.width},
                 "[layers, num_slots, taps - 1, d_model]");
    check.require(in_pairs(*conv),
                  "channels of conv must lie together, rows at multiples of 8 bytes");
    args.conv = static_cast<float*>(conv->mutable_data_ptr());
    args.conv_layer_stride = conv->stride(0);
    args.conv_slot_stride = conv->stride(1);
    args.conv_tap_stride = conv->stride(2);
  }
  check.tensor(exchange, "exchange", ScalarType::Byte, {2 * args.set_bytes}, "two sets of lines");
  check.tensor(ended, "ended", ScalarType::Long, {1}, "[1], int64");
  check.require(exchange.is_contiguous(), "exchange must be contiguous");

  check_options(check, args.cell_kind, linear_candidate, normalize_gates);
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
  cuda::persistent_decode(args, device, current_stream(tokens));
  return logits;
}

}  // namespace minserve
