// linear_scan and its backward: checks, outputs, arguments of the scan.
//
// The layout of `a` decides on that of the other tensors: channels contiguous, or time. In the
// second, tensors are handled as [batch, channels, time] throughout.
#include "../core/operators.h"

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
  run_scan(args, Recurrence::linear, dtype, false, a);
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
  run_scan(args, Recurrence::linear, dtype, true, a);
  return {tensors.result(grad_a), tensors.result(grad_b), grad_h0};
}

}  // namespace minserve
