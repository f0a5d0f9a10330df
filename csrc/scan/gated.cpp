// Scan, step and training scan of a gated cell: checks, outputs, arguments.
#include "gated.h"

namespace minserve {

namespace {

std::int64_t check_pre(const Check& check, const Gated& cell, const Tensor& pre) {
  check.require(pre.dim() == 2 && pre.size(1) % cell.gates == 0, "pre must be ", cell.pre_shape,
                ", got ", describe(pre));
  return pre.size(1) / cell.gates;
}

ScanArgs gate_args(const Gated& cell, const Layout& layout, const Tensor& pre) {
  ScanArgs args;
  args.layout = layout;
  for (std::int64_t gate = 0; gate < cell.gates; ++gate) {
    args.inputs[gate] = input_stream(pre, gate * layout.channels);
  }
  args.linear_candidate = cell.linear_candidate;
  args.normalize_gates = cell.normalize_gates;
  return args;
}

void use_state(ScanArgs& args, const Tensor& state) {
  args.initial = args.last = state.mutable_data_ptr();
  args.initial_stride = args.last_stride = state.stride(0);
}

// [sequences, channels] in the accumulation type, or null.
MaybeTensor rows_per_sequence(const Check& check, const MaybeTensor& given, const char* name,
                              ScalarType type, std::int64_t sequences, std::int64_t channels) {
  if (!given) return std::nullopt;
  check.tensor(*given, name, type, {sequences, channels}, "[sequences, channels]");
  return torch::stable::contiguous(*given);
}

}  // namespace

Tensor gated_scan(const char* op, const Gated& cell, const Tensor& pre_given,
                  const Tensor& cu_given, const Tensor& state, const Tensor& slots_given) {
  const Check check(op, pre_given, "pre");
  const Dtype dtype = check.dtype(false);
  const std::int64_t channels = check_pre(check, cell, pre_given);
  check_state(check, state, channels);
  const Tensor pre = torch::stable::contiguous(pre_given), cu = torch::stable::contiguous(cu_given);
  const Tensor slots = torch::stable::contiguous(slots_given);
  ScanArgs args =
      gate_args(cell, packed_layout(check, cu, &slots, state.size(0), pre.size(0), channels), pre);
  use_state(args, state);
  Tensor out = torch::stable::new_empty(pre, {pre.size(0), channels});
  args.outputs[0] = output_stream(out);
  run_scan(args, cell.recurrence, dtype, false, pre);
  return out;
}

Tensor gated_step(const char* op, const Gated& cell, const Tensor& pre_given, const Tensor& state,
                  const Tensor& slots_given) {
  const Check check(op, pre_given, "pre");
  const Dtype dtype = check.dtype(false);
  const std::int64_t channels = check_pre(check, cell, pre_given);
  check_state(check, state, channels);
  const Tensor pre = torch::stable::contiguous(pre_given),
               slots = torch::stable::contiguous(slots_given);
  ScanArgs args =
      gate_args(cell, step_layout(check, slots, state.size(0), pre.size(0), channels), pre);
  use_state(args, state);
  Tensor out = torch::stable::new_empty(pre, {pre.size(0), channels});
  args.outputs[0] = output_stream(out);
  run_scan(args, cell.recurrence, dtype, false, pre);
  return out;
}

std::tuple<Tensor, Tensor> gated_train(const char* op, const Gated& cell, const Tensor& pre_given,
                                       const Tensor& cu_given, const MaybeTensor& h0_given) {
  const Check check(op, pre_given, "pre");
  const Dtype dtype = check.dtype(true);
  const std::int64_t channels = check_pre(check, cell, pre_given);
  const Tensor pre = torch::stable::contiguous(pre_given), cu = torch::stable::contiguous(cu_given);
  const ScalarType type = accumulation_type(dtype);
  ScanArgs args = gate_args(cell, packed_layout(check, cu, nullptr, 0, pre.size(0), channels), pre);
  const std::int64_t sequences = args.layout.sequences;
  const MaybeTensor h0 = rows_per_sequence(check, h0_given, "h0", type, sequences, channels);
  Tensor out = torch::stable::new_empty(pre, {pre.size(0), channels});
  Tensor last = torch::stable::new_empty(pre, {sequences, channels}, type);
  args.initial = h0 ? h0->const_data_ptr() : nullptr;
  args.last = last.mutable_data_ptr();
  args.initial_stride = args.last_stride = channels;
  args.outputs[0] = output_stream(out);
  run_scan(args, cell.recurrence, dtype, false, pre);
  return {out, last};
}

std::tuple<Tensor, Tensor> gated_train_backward(const char* op, const Gated& cell,
                                                const Tensor& grad_given,
                                                const MaybeTensor& grad_last_given,
                                                const Tensor& pre_given, const Tensor& h_given,
                                                const Tensor& cu_given,
                                                const MaybeTensor& h0_given) {
  const Check check(op, pre_given, "pre");
  const Dtype dtype = check.dtype(true);
  const std::int64_t channels = check_pre(check, cell, pre_given);
  const Tensor pre = torch::stable::contiguous(pre_given), cu = torch::stable::contiguous(cu_given);
  const ScalarType type = accumulation_type(dtype);
  ScanArgs args = gate_args(cell, packed_layout(check, cu, nullptr, 0, pre.size(0), channels), pre);
  args.layout.reverse = true;
  const std::int64_t sequences = args.layout.sequences;
  check.tensor(grad_given, "grad_h", pre.scalar_type(), {pre.size(0), channels},
               "[tokens, channels]");
  check.tensor(h_given, "h", pre.scalar_type(), {pre.size(0), channels}, "[tokens, channels]");
  const Tensor grad = torch::stable::contiguous(grad_given), h = torch::stable::contiguous(h_given);
  const MaybeTensor h0 = rows_per_sequence(check, h0_given, "h0", type, sequences, channels);
  const MaybeTensor grad_last =
      rows_per_sequence(check, grad_last_given, "grad_h_last", type, sequences, channels);
  Tensor grad_pre = torch::stable::new_empty(pre, pre.sizes());
  Tensor grad_h0 = torch::stable::new_empty(pre, {sequences, channels}, type);
  args.inputs[cell.gates] = input_stream(grad);
  args.inputs[cell.gates + 1] = input_stream(h);
  args.h0 = h0 ? h0->const_data_ptr() : nullptr;
  args.initial = grad_last ? grad_last->const_data_ptr() : nullptr;
  args.last = grad_h0.mutable_data_ptr();
  args.initial_stride = args.last_stride = channels;
  for (std::int64_t gate = 0; gate < cell.gates; ++gate) {
    args.outputs[gate] = output_stream(grad_pre, gate * channels);
  }
  run_scan(args, cell.recurrence, dtype, true, pre);
  return {grad_pre, grad_h0};
}

}  // namespace minserve
