// A cluster decode step on Hopper: checks, the plan, arguments. CUDA only.
#include <cstdint>

#include "../cells/traits.h"
#include "../core/operators.h"
#include "../core/require_sm90.h"
#include "../core/state_alignment.h"
#include "launch.h"

namespace minserve {

namespace {

// What a layer's results are added to: for each, which of `vectors` it is, or -1.
enum Field { kTaps, kTapsBias, kMixBias, kGatesBias, kOutBias, kUpBias, kDownBias, kFields };

class LayerVectors {
 public:
  LayerVectors(const Check& check, const std::vector<Tensor>& vectors, const ClusterShape& shape,
               int device)
      : check_(check), vectors_(vectors), shape_(shape), device_(device) {}

  ClusterLayer of(int layer, const std::int64_t* from) const {
    const std::int64_t width = shape_.width, hidden = shape_.hidden;
    check_.require((from[kTaps] >= 0) == (shape_.taps > 0), "all layers have taps, or none; layer ",
                   layer, " does not fit conv");
    return {find(from[kTaps], "taps", width, shape_.taps),
            find(from[kTapsBias], "taps_bias", width),
            find(from[kMixBias], "mix_bias", width),
            find(from[kGatesBias], "gates_bias", shape_.gates * std::int64_t{shape_.inner}),
            find(from[kOutBias], "out_bias", width),
            find(from[kUpBias], "up_bias", hidden),
            find(from[kDownBias], "down_bias", width)};
  }

 private:
  // A vector, or with `columns` a matrix.
  const void* find(std::int64_t index, const char* name, std::int64_t rows,
                   std::int64_t columns = 0) const {
    if (index < 0) return nullptr;
    check_.require(index < static_cast<std::int64_t>(vectors_.size()), "plan names vector ", index,
                   " of ", vectors_.size());
    const Tensor& t = vectors_[static_cast<std::size_t>(index)];
    const bool fits = t.dim() == (columns == 0 ? 1 : 2) && t.size(0) == rows &&
                      (columns == 0 || t.size(1) == columns) &&
                      t.scalar_type() == ScalarType::BFloat16 && t.is_contiguous() &&
                      reinterpret_cast<std::uintptr_t>(t.const_data_ptr()) % 4 == 0;
    if (!fits) {  // hundreds are looked at, and words cost more than that
      check_.require(false, name, " must be contiguous bfloat16 [", rows,
                     columns == 0 ? "" : ", " + std::to_string(columns),
                     "], aligned to 4 bytes, got ", describe(t));
    }
    if (t.is_cpu() || t.get_device_index() != device_) check_.same_device(t, name);
    return t.const_data_ptr();
  }

  const Check& check_;
  const std::vector<Tensor>& vectors_;
  const ClusterShape& shape_;
  const int device_;
};

void read_plan(const Check& check, const std::vector<Tensor>& vectors, const Tensor& plan,
               int device, ClusterDecodeArgs& args) {
  check.require(plan.is_cpu() && plan.scalar_type() == ScalarType::Long && plan.dim() == 2 &&
                    plan.size(1) == kFields && plan.is_contiguous() && plan.size(0) >= 1 &&
                    plan.size(0) <= kMostClusterLayers,
                "plan must be int64 [layers, ", static_cast<int>(kFields), "] on the CPU, of 1 to ",
                kMostClusterLayers, " layers, got ", describe(plan));
  const auto* from = static_cast<const std::int64_t*>(plan.const_data_ptr());
  const LayerVectors of_layers(check, vectors, args.shape, device);
  args.layers = static_cast<int>(plan.size(0));
  for (int n = 0; n < args.layers; ++n) args.layer[n] = of_layers.of(n, from + n * kFields);
}

}  // namespace

Tensor cluster_decode(const Tensor& tokens, const Tensor& slots_given, const Tensor& weights,
                      const Tensor& table, const MaybeTensor& head_bias, const MaybeTensor& norm,
                      const std::vector<Tensor>& vectors, const Tensor& plan, const Tensor& cell,
                      const MaybeTensor& conv, std::int64_t hidden, std::int64_t vocabulary,
                      const std::string& kind, double eps, bool linear_candidate,
                      bool normalize_gates) {
  const Check check("cluster_step", tokens, "tokens");
  require_hopper(check, tokens);
  ClusterDecodeArgs args;
  check.tensor(tokens, "tokens", ScalarType::Int, {-1}, "[batch], int32");
  const std::int64_t batch = tokens.size(0);
  check.tensor(slots_given, "slots", ScalarType::Int, {batch}, "[batch], int32");
  check.require(tokens.is_contiguous() && batch >= 1 && batch <= (1 << 24),
                "tokens must be contiguous, of at least one row, got ", describe(tokens));
  const Tensor slots = torch::stable::contiguous(slots_given);
  args.cell_kind = require_cell<ClusterDecodeCells>(check, kind);
  check.tensor(table, "table", ScalarType::BFloat16, {-1, -1}, "[ids, width]");
  check.require(plan.dim() == 2, "plan must be [layers, ", static_cast<int>(kFields), "], got ",
                describe(plan));
  check.tensor(cell, "cell", ScalarType::Float, {plan.size(0), -1, -1},
               "[layers, num_slots, inner]");
  const std::int64_t width = table.size(1), inner = cell.size(2);
  check.require(
      table.is_contiguous() && reinterpret_cast<std::uintptr_t>(table.const_data_ptr()) % 16 == 0,
      "table must be contiguous and begin at a multiple of 16 bytes");
  check.require(in_pairs(cell) && cell.size(1) > 0,
                "channels of cell must lie together, rows at multiples of 8 bytes, and be there");
  if (conv) {
    check.tensor(*conv, "conv", ScalarType::Float, {plan.size(0), cell.size(1), -1, width},
                 "[layers, num_slots, taps - 1, width]");
    check.require(in_pairs(*conv),
                  "channels of conv must lie together, rows at multiples of 8 bytes, got ",
                  describe(*conv));
    args.shape.taps = static_cast<int>(conv->size(2)) + 1;
    args.conv = static_cast<float*>(conv->mutable_data_ptr());
    args.conv_layer_stride = conv->stride(0);
    args.conv_slot_stride = conv->stride(1);
    args.conv_tap_stride = conv->stride(2);
  }
  const std::string refusal =
      cluster_decode_refusal(plan.size(0), width, inner, hidden, conv ? conv->size(2) + 1 : 0);
  check.require(refusal.empty(), refusal);
  check.require(vocabulary >= 0 && vocabulary <= (1 << 20), "vocabulary must be 0 to ", 1 << 20,
                ", got ", vocabulary);
  args.batch = static_cast<int>(batch);
  args.shape.gates = traits_of(args.cell_kind).preactivations;
  args.shape.width = static_cast<int>(width);
  args.shape.inner = static_cast<int>(inner);
  args.shape.hidden = static_cast<int>(hidden);
  read_plan(check, vectors, plan, tokens.get_device_index(), args);
  args.ids = static_cast<int>(table.size(0));
  args.shape.vocabulary = static_cast<int>(vocabulary);
  args.stream_bytes = args.shape.tiles(args.layers, 0) * kTileBytes;  // the longest stream's
  check.tensor(weights, "weights", ScalarType::BFloat16,
               {kClusterBlocks, kPairs, args.stream_bytes / 2}, "[blocks, streams, weights]");
  check.require(weights.is_contiguous() &&
                    reinterpret_cast<std::uintptr_t>(weights.const_data_ptr()) % 16 == 0,
                "weights must be contiguous and begin at a multiple of 16 bytes");
  const bool headless = vocabulary == 0;
  check.require(headless == static_cast<bool>(norm), "there must be a vocabulary or a norm");
  if (norm) {
    check.tensor(*norm, "norm", ScalarType::BFloat16, {width}, "[width]");
    check.require(
        norm->is_contiguous() && reinterpret_cast<std::uintptr_t>(norm->const_data_ptr()) % 4 == 0,
        "norm must be contiguous and begin at a multiple of 4 bytes");
    args.norm = norm->const_data_ptr();
  }
  if (head_bias) {
    check.tensor(*head_bias, "head_bias", ScalarType::BFloat16, {vocabulary}, "[vocabulary]");
    check.require(head_bias->is_contiguous(), "head_bias must be contiguous");
    args.head_bias = head_bias->const_data_ptr();
  }
  args.weights = weights.const_data_ptr();
  args.table = table.const_data_ptr();
  args.linear_candidate = linear_candidate;
  args.normalize_gates = normalize_gates;
  args.eps = static_cast<float>(eps);
  args.tokens = static_cast<const std::int32_t*>(tokens.const_data_ptr());
  args.slots = static_cast<const std::int32_t*>(slots.const_data_ptr());
  args.cell = static_cast<float*>(cell.mutable_data_ptr());
  args.cell_layer_stride = cell.stride(0);
  args.cell_slot_stride = cell.stride(1);
  args.num_slots = static_cast<int>(cell.size(1));
  const Tensor result = headless ? torch::stable::new_empty(table, {batch, width})
                                 : torch::stable::new_empty(cell, {batch, vocabulary});
  if (headless) {
    args.hidden_states = result.mutable_data_ptr();
  } else {
    args.logits = static_cast<float*>(result.mutable_data_ptr());
  }
  cuda::cluster_decode(args, tokens.get_device_index(), current_stream(tokens));
  return result;
}

}  // namespace minserve
