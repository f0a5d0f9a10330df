// linear_scan and its backward: checks, outputs, arguments of the scan.
#include "../common/operators.h"

namespace minserve {

namespace {

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

Layout uniform_layout(const Tensor& a, bool reverse) {
  Layout lay;
  lay.sequences = a.size(0);
  lay.time = a.size(1);
  lay.tokens = lay.sequences * lay.time;
  lay.channels = a.size(2);
  lay.reverse = reverse;
  return lay;
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
  const Tensor a = torch::stable::contiguous(a_given), b = torch::stable::contiguous(b_given);
  Tensor out = torch::stable::new_empty(a, a.sizes());
  ScanArgs args;
  args.layout = uniform_layout(a, reverse);
  args.inputs[0] = input_stream(a);
  args.inputs[1] = input_stream(b);
  args.initial = h0 ? h0->const_data_ptr() : nullptr;
  args.initial_stride = args.layout.channels;
  args.outputs[0] = output_stream(out);
  run_scan(args, Recurrence::linear, dtype, false, a);
  return out;
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
  const Tensor a = torch::stable::contiguous(a_given), h = torch::stable::contiguous(h_given);
  const Tensor grad = torch::stable::contiguous(grad_given);
  Tensor grad_a = torch::stable::new_empty(a, a.sizes()),
         grad_b = torch::stable::new_empty(a, a.sizes());
  Tensor grad_h0 = torch::stable::new_empty(a, {a.size(0), a.size(2)}, accumulation_type(dtype));
  ScanArgs args;
  args.layout = uniform_layout(a, !reverse);
  args.inputs[0] = input_stream(a);
  args.inputs[1] = input_stream(grad);
  args.inputs[2] = input_stream(h);
  args.h0 = h0 ? h0->const_data_ptr() : nullptr;
  args.last = grad_h0.mutable_data_ptr();
  args.last_stride = args.layout.channels;
  args.outputs[0] = output_stream(grad_a);
  args.outputs[1] = output_stream(grad_b);
  run_scan(args, Recurrence::linear, dtype, true, a);
  return {grad_a, grad_b, grad_h0};
}

}  // namespace minserve
