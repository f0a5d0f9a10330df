// linear_scan; scan, step and training scan of the cells; and their backwards: checks, outputs,
// arguments.
#include "../cells/traits.h"
#include "../core/operators.h"
#include "launch.h"

namespace minserve {

namespace {

// --- linear_scan
//
// The layout of `a` decides on that of the other tensors: channels contiguous, or time. In the
// second, tensors are handled as [batch, channels, time] throughout.

// h0 in the accumulation type; the caller keeps the result alive.
MaybeTensor initial_state(const Check& check, const MaybeTensor& h0, const Tensor& a,
                          ScalarType type) {
  if (!h0) return std::nullopt;
  const ScalarType given = h0->scalar_type();
  check.require(h0->dim() == 2 && h0->size(0) == a.size(0) && h0->size(1) == a.size(2),
                "h0 must be [", a.size(0), ", ", a.size(2), "] (batch, channels), got ",
                describe(*h0));
  check.require(given == a.scalar_type() || given == type,
                "h0 must have the dtype of a or the accumulation type, got ", describe(*h0),
                " with a ", describe(a));
  check.same_device(*h0, "h0");
  return torch::stable::contiguous(torch::stable::to(*h0, type));
}

// Whether channels lie apart by a whole row of time steps. The fake functions say the same.
bool time_contiguous(const Tensor& a) {
  return a.stride(1) == 1 && a.stride(2) == a.size(1) && a.size(1) > 1 && a.size(2) > 1 &&
         (a.size(0) <= 1 || a.stride(0) == a.size(1) * a.size(2));
}

// The tensors of one call, [batch, time, channels] outside.
class Tensors {
 public:
  Tensors(const Tensor& a, bool reverse) : a_(a), by_time_(time_contiguous(a)) {
    layout_.sequences = a.size(0);
    layout_.time = a.size(1);
    layout_.tokens = layout_.sequences * layout_.time;
    layout_.channels = a.size(2);
    layout_.reverse = reverse;
  }
  const Layout& layout() const { return layout_; }

  // The caller keeps the result alive.
  Tensor input(const Tensor& given) const {
    return torch::stable::contiguous(by_time_ ? torch::stable::transpose(given, 1, 2) : given);
  }
  Tensor output() const {
    if (!by_time_) return torch::stable::new_empty(a_, a_.sizes());
    return torch::stable::new_empty(a_, {layout_.sequences, layout_.channels, layout_.time});
  }
  // A stride of 1 between time steps says that time is contiguous.
  Stream read(const Tensor& input) const { return with_stride(input_stream(input)); }
  Stream write(const Tensor& output) const { return with_stride(output_stream(output)); }

  // The output as the caller is to see it, with the strides of a.
  Tensor result(const Tensor& output) const {
    return by_time_ ? torch::stable::transpose(output, 1, 2) : output;
  }

 private:
  Stream with_stride(Stream stream) const {
    stream.stride = by_time_ ? 1 : layout_.channels;
    return stream;
  }

  const Tensor& a_;
  bool by_time_;
  Layout layout_;
};

// --- cells: all map pre [tokens, kPreactivations * channels] to h [tokens, channels] and differ in
// what they read of it, the recurrence and its options.

struct Gated {
  CellKind kind;
  bool linear_candidate = false;
  bool normalize_gates = true;
  MaybeTensor parameter = std::nullopt;  // [channels], made contiguous by check_parameter()
  const char* parameter_name = "";

  const CellTraits& traits() const { return traits_of(kind); }
};

Gated mingru(bool linear_candidate) {
  return {CellKind::mingru, linear_candidate};
}

Gated minlstm(bool linear_candidate, bool normalize_gates) {
  return {CellKind::minlstm, linear_candidate, normalize_gates};
}

Gated hgrn(const MaybeTensor& lower_bound) {
  return {CellKind::hgrn, false, true, lower_bound, "lower_bound"};
}

std::int64_t check_pre(const Check& check, const Gated& cell, const Tensor& pre) {
  const int columns = cell.traits().preactivations;
  check.require(pre.dim() == 2 && pre.size(1) % columns == 0, "pre must be [tokens, ", columns,
                " * channels], got ", describe(pre));
  return pre.size(1) / columns;
}

Gated check_parameter(const Check& check, Gated cell, std::int64_t channels) {
  if (!cell.parameter) return cell;
  check.tensor(*cell.parameter, cell.parameter_name, ScalarType::Float, {channels}, "[channels]");
  cell.parameter = torch::stable::contiguous(*cell.parameter);
  return cell;
}

ScanArgs gate_args(const Gated& cell, const Layout& layout, const Tensor& pre) {
  ScanArgs args;
  args.layout = layout;
  for (int gate = 0; gate < cell.traits().inputs; ++gate) {
    args.inputs[gate] = input_stream(pre, gate * layout.channels);
  }
  if (cell.parameter) {
    args.parameters[0] = static_cast<const float*>(cell.parameter->const_data_ptr());
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

Tensor gated_scan(const char* op, const Gated& given, const Tensor& pre_given,
                  const Tensor& cu_given, const Tensor& state, const Tensor& slots_given) {
  const Check check(op, pre_given, "pre");
  const Dtype dtype = check.dtype(false);
  const std::int64_t channels = check_pre(check, given, pre_given);
  const Gated cell = check_parameter(check, given, channels);
  check_state(check, state, channels);
  const Tensor pre = torch::stable::contiguous(pre_given), cu = torch::stable::contiguous(cu_given);
  const Tensor slots = torch::stable::contiguous(slots_given);
  ScanArgs args =
      gate_args(cell, packed_layout(check, cu, &slots, state.size(0), pre.size(0), channels), pre);
  use_state(args, state);
  Tensor out = torch::stable::new_empty(pre, {pre.size(0), channels});
  args.outputs[0] = output_stream(out);
  run_scan(args, cell.kind, dtype, false, pre);
  return out;
}

Tensor gated_step(const char* op, const Gated& given, const Tensor& pre_given, const Tensor& state,
                  const Tensor& slots_given) {
  const Check check(op, pre_given, "pre");
  const Dtype dtype = check.dtype(false);
  const std::int64_t channels = check_pre(check, given, pre_given);
  const Gated cell = check_parameter(check, given, channels);
  check_state(check, state, channels);
  const Tensor pre = torch::stable::contiguous(pre_given),
               slots = torch::stable::contiguous(slots_given);
  ScanArgs args =
      gate_args(cell, step_layout(check, slots, state.size(0), pre.size(0), channels), pre);
  use_state(args, state);
  Tensor out = torch::stable::new_empty(pre, {pre.size(0), channels});
  args.outputs[0] = output_stream(out);
  run_scan(args, cell.kind, dtype, false, pre);
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
  run_scan(args, cell.kind, dtype, false, pre);
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
  const int inputs = cell.traits().inputs;
  Tensor grad_pre = torch::stable::new_empty(pre, pre.sizes());
  Tensor grad_h0 = torch::stable::new_empty(pre, {sequences, channels}, type);
  args.inputs[inputs] = input_stream(grad);
  args.inputs[inputs + 1] = input_stream(h);
  args.h0 = h0 ? h0->const_data_ptr() : nullptr;
  args.initial = grad_last ? grad_last->const_data_ptr() : nullptr;
  args.last = grad_h0.mutable_data_ptr();
  args.initial_stride = args.last_stride = channels;
  for (int gate = 0; gate < inputs; ++gate) {
    args.outputs[gate] = output_stream(grad_pre, gate * channels);
  }
  run_scan(args, cell.kind, dtype, true, pre);
  return {grad_pre, grad_h0};
}

}  // namespace

Tensor linear_scan(const Tensor& a_given, const Tensor& b_given, const MaybeTensor& h0_given,
                   bool reverse) {
  const Check check("linear_scan", a_given, "a");
  const Dtype dtype = check.dtype(true);
  check.require(a_given.dim() == 3, "a must be [batch, time, channels], got ", describe(a_given));
  check.tensor(b_given, "b", a_given.scalar_type(),
               {a_given.size(0), a_given.size(1), a_given.size(2)}, "[batch, time, channels]");
  const MaybeTensor h0 = initial_state(check, h0_given, a_given, accumulation_type(dtype));
  const Tensors tensors(a_given, reverse);
  const Tensor a = tensors.input(a_given), b = tensors.input(b_given), out = tensors.output();
  ScanArgs args;
  args.layout = tensors.layout();
  args.inputs[0] = tensors.read(a);
  args.inputs[1] = tensors.read(b);
  args.initial = h0 ? h0->const_data_ptr() : nullptr;
  args.initial_stride = args.layout.channels;
  args.outputs[0] = tensors.write(out);
  run_scan(args, std::nullopt, dtype, false, a);
  return tensors.result(out);
}

std::tuple<Tensor, Tensor, Tensor> linear_scan_backward(const Tensor& grad_given,
                                                        const Tensor& a_given,
                                                        const Tensor& h_given,
                                                        const MaybeTensor& h0_given, bool reverse) {
  const Check check("linear_scan_backward", a_given, "a");
  const Dtype dtype = check.dtype(true);
  check.require(a_given.dim() == 3, "a must be [batch, time, channels], got ", describe(a_given));
  const std::initializer_list<std::int64_t> sizes = {a_given.size(0), a_given.size(1),
                                                     a_given.size(2)};
  check.tensor(grad_given, "grad_h", a_given.scalar_type(), sizes, "[batch, time, channels]");
  check.tensor(h_given, "h", a_given.scalar_type(), sizes, "[batch, time, channels]");
  const MaybeTensor h0 = initial_state(check, h0_given, a_given, accumulation_type(dtype));
  const Tensors tensors(a_given, !reverse);
  const Tensor a = tensors.input(a_given), grad = tensors.input(grad_given);
  const Tensor h = tensors.input(h_given);
  const Tensor grad_a = tensors.output(), grad_b = tensors.output();
  Tensor grad_h0 =
      torch::stable::new_empty(a, {a_given.size(0), a_given.size(2)}, accumulation_type(dtype));
  ScanArgs args;
  args.layout = tensors.layout();
  args.inputs[0] = tensors.read(a);
  args.inputs[1] = tensors.read(grad);
  args.inputs[2] = tensors.read(h);
  args.h0 = h0 ? h0->const_data_ptr() : nullptr;
  args.last = grad_h0.mutable_data_ptr();
  args.last_stride = args.layout.channels;
  args.outputs[0] = tensors.write(grad_a);
  args.outputs[1] = tensors.write(grad_b);
  run_scan(args, std::nullopt, dtype, true, a);
  return {tensors.result(grad_a), tensors.result(grad_b), grad_h0};
}

Tensor mingru_scan(const Tensor& pre, const Tensor& cu_seqlens, const Tensor& state,
                   const Tensor& slots, bool linear_candidate) {
  return gated_scan("mingru_scan", mingru(linear_candidate), pre, cu_seqlens, state, slots);
}

Tensor mingru_step(const Tensor& pre, const Tensor& state, const Tensor& slots,
                   bool linear_candidate) {
  return gated_step("mingru_step", mingru(linear_candidate), pre, state, slots);
}

std::tuple<Tensor, Tensor> mingru_scan_train(const Tensor& pre, const Tensor& cu_seqlens,
                                             const MaybeTensor& h0, bool linear_candidate) {
  return gated_train("mingru_scan_train", mingru(linear_candidate), pre, cu_seqlens, h0);
}

std::tuple<Tensor, Tensor> mingru_scan_train_backward(
    const Tensor& grad_h, const MaybeTensor& grad_h_last, const Tensor& pre, const Tensor& h,
    const Tensor& cu_seqlens, const MaybeTensor& h0, bool linear_candidate) {
  return gated_train_backward("mingru_scan_train_backward", mingru(linear_candidate), grad_h,
                              grad_h_last, pre, h, cu_seqlens, h0);
}

Tensor minlstm_scan(const Tensor& pre, const Tensor& cu_seqlens, const Tensor& state,
                    const Tensor& slots, bool linear_candidate, bool normalize_gates) {
  return gated_scan("minlstm_scan", minlstm(linear_candidate, normalize_gates), pre, cu_seqlens,
                    state, slots);
}

Tensor minlstm_step(const Tensor& pre, const Tensor& state, const Tensor& slots,
                    bool linear_candidate, bool normalize_gates) {
  return gated_step("minlstm_step", minlstm(linear_candidate, normalize_gates), pre, state, slots);
}

std::tuple<Tensor, Tensor> minlstm_scan_train(const Tensor& pre, const Tensor& cu_seqlens,
                                              const MaybeTensor& h0, bool linear_candidate,
                                              bool normalize_gates) {
  return gated_train("minlstm_scan_train", minlstm(linear_candidate, normalize_gates), pre,
                     cu_seqlens, h0);
}

std::tuple<Tensor, Tensor> minlstm_scan_train_backward(
    const Tensor& grad_h, const MaybeTensor& grad_h_last, const Tensor& pre, const Tensor& h,
    const Tensor& cu_seqlens, const MaybeTensor& h0, bool linear_candidate, bool normalize_gates) {
  return gated_train_backward("minlstm_scan_train_backward",
                              minlstm(linear_candidate, normalize_gates), grad_h, grad_h_last, pre,
                              h, cu_seqlens, h0);
}

Tensor hgrn_scan(const Tensor& pre, const Tensor& cu_seqlens, const Tensor& state,
                 const Tensor& slots, const MaybeTensor& lower_bound) {
  return gated_scan("hgrn_scan", hgrn(lower_bound), pre, cu_seqlens, state, slots);
}

Tensor hgrn_step(const Tensor& pre, const Tensor& state, const Tensor& slots,
                 const MaybeTensor& lower_bound) {
  return gated_step("hgrn_step", hgrn(lower_bound), pre, state, slots);
}

}  // namespace minserve
