// sru_scan, sru_step and the training scan: checks, outputs, arguments, the choice of the device's
// kernel.
#include "../core/operators.h"
#include "args.h"

namespace minserve {

namespace {

// Runs of channels, each of every sequence; the grain is what is worth a thread.
std::int64_t items_of(const Layout& lay) {
  return (lay.sequences + 1) * divided_up(lay.channels, kSruRun);
}
std::int64_t grain_of(const Layout& lay) {
  return divided_up(kGrainElements * items_of(lay), lay.tokens * lay.channels);
}

void run_sru(const SruArgs& args, Dtype dtype, const Tensor& like) {
  const Layout& lay = args.layout;
  if (lay.channels == 0 || lay.tokens == 0) return;
  if (like.is_cpu()) {
    const SruFn kernel = MS_BY_ISA(sru_kernel)(dtype);
    torch::stable::parallel_for(
        0, items_of(lay), grain_of(lay),
        [&](std::int64_t begin, std::int64_t end) { kernel(args, begin, end); });
    return;
  }
#ifdef MINSERVE_CUDA
  cuda::sru(args, dtype, like.get_device_index(), current_stream(like));
#else
  no_cuda();
#endif
}

struct Given {  // the arguments that all operators share
  const Tensor& u;
  const MaybeTensor &x, &weight_c;
  const Tensor& bias;
  double scale;
  bool tanh;
};

// The arguments with their tensors as kernels read them, which live as long as this does.
class Inputs {
 public:
  Inputs(const Check& check, const Given& given, std::int64_t channels, const char* rows)
      : u_(with_rows(given.u)), bias_(torch::stable::contiguous(given.bias)) {
    const Tensor& u = given.u;
    const std::int64_t tokens = u.size(0), planes = channels ? u.size(1) / channels : 0;
    check.require(
        channels == 0 ? u.size(1) == 0 : u.size(1) % channels == 0 && (planes == 3 || planes == 4),
        "u must be [", rows, ", 3 or 4 * channels] with ", channels, " channels, got ",
        describe(u));
    check.require(planes != 4 || !given.x,
                  "x must be None where u has four parts: the last is the highway's input");
    check.tensor(given.bias, "bias", ScalarType::Float, {2 * channels}, "[2 * channels]");
    if (given.weight_c) {
      check.tensor(*given.weight_c, "weight_c", ScalarType::Float, {2 * channels},
                   "[2 * channels] or None");
      weight_c_ = torch::stable::contiguous(*given.weight_c);
      args_.weight_c = static_cast<const float*>(weight_c_->const_data_ptr());
    }
    args_.bias = static_cast<const float*>(bias_.const_data_ptr());
    args_.u = rows_of(u_);
    args_.tanh = given.tanh;
    if (given.x) {
      check.tensor(*given.x, "x", u.scalar_type(), {tokens, channels},
                   "[tokens, channels] or None");
      x_ = with_rows(*given.x);
      args_.highway = rows_of(*x_);
      args_.scale = static_cast<float>(given.scale);
    } else if (planes == 4) {
      args_.highway = {static_cast<char*>(args_.u.data) + 3 * channels * bytes_of(u),
                       args_.u.stride};
    }
  }
  Inputs(const Inputs&) = delete;
  Inputs& operator=(const Inputs&) = delete;

  SruArgs args() const { return args_; }

 private:
  const Tensor u_, bias_;
  MaybeTensor x_, weight_c_;
  SruArgs args_;
};

void check_matrix(const Check& check, const Tensor& u, const char* rows) {
  check.require(u.dim() == 2, "u must be [", rows, ", 3 or 4 * channels], got ", describe(u));
}

// Scans on CUDA whose gates do not see c may read a sequence's chunks side by side.
MaybeTensor carries_of(const SruArgs& args, const Tensor& u) {
  if (!u.is_cuda() || args.weight_c || !args.layout.cu_seqlens) return std::nullopt;
  return torch::stable::new_empty(u, {2, args.layout.chunk_bound(), args.layout.channels},
                                  ScalarType::Float);
}

Tensor recur(const Check& check, const Given& given, const Tensor* cu_seqlens, const Tensor& state,
             const Tensor& slots_given) {
  const Tensor& u = given.u;
  const char* const rows = cu_seqlens ? "tokens" : "batch";
  check_matrix(check, u, rows);
  const Dtype dtype = check.dtype(false);
  check.require(state.dim() == 2, "state must be [num_slots, channels], got ", describe(state));
  const std::int64_t tokens = u.size(0), channels = state.size(1);
  check_state(check, state, channels);
  const Inputs inputs(check, given, channels, rows);
  const Tensor slots = torch::stable::contiguous(slots_given);
  MaybeTensor cu;
  if (cu_seqlens) cu = torch::stable::contiguous(*cu_seqlens);
  Tensor h = torch::stable::new_empty(u, {tokens, channels});
  SruArgs args = inputs.args();
  args.layout = cu ? packed_layout(check, *cu, &slots, state.size(0), tokens, channels)
                   : step_layout(check, slots, state.size(0), tokens, channels);
  args.h = output_stream(h);
  args.state = static_cast<float*>(state.mutable_data_ptr());
  args.slot_stride = state.stride(0);
  const MaybeTensor carries = carries_of(args, u);
  if (carries) args.carries = static_cast<float*>(carries->mutable_data_ptr());
  run_sru(args, dtype, u);
  return h;
}

// [sequences, channels], or null.
MaybeTensor of_sequences(const Check& check, const MaybeTensor& given, const char* name,
                         std::int64_t sequences, std::int64_t channels) {
  if (!given) return std::nullopt;
  check.tensor(*given, name, ScalarType::Float, {sequences, channels}, "[sequences, channels]");
  return torch::stable::contiguous(*given);
}

std::int64_t channels_of(const Check& check, const Tensor& bias) {
  check.require(bias.dim() == 1 && bias.size(0) % 2 == 0, "bias must be [2 * channels], got ",
                describe(bias));
  return bias.size(0) / 2;
}

}  // namespace

Tensor sru_scan(const Tensor& u, const MaybeTensor& x, const MaybeTensor& weight_c,
                const Tensor& bias, const Tensor& cu_seqlens, const Tensor& state,
                const Tensor& slots, double scale_x, bool tanh) {
  const Check check("sru_scan", u, "u");
  return recur(check, {u, x, weight_c, bias, scale_x, tanh}, &cu_seqlens, state, slots);
}

Tensor sru_step(const Tensor& u, const MaybeTensor& x, const MaybeTensor& weight_c,
                const Tensor& bias, const Tensor& state, const Tensor& slots, double scale_x,
                bool tanh) {
  const Check check("sru_step", u, "u");
  return recur(check, {u, x, weight_c, bias, scale_x, tanh}, nullptr, state, slots);
}

std::tuple<Tensor, Tensor, Tensor> sru_scan_train(const Tensor& u, const MaybeTensor& x,
                                                  const MaybeTensor& weight_c, const Tensor& bias,
                                                  const Tensor& cu_given,
                                                  const MaybeTensor& c0_given, double scale_x,
                                                  bool tanh) {
  const Check check("sru_scan_train", u, "u");
  check_matrix(check, u, "tokens");
  const Dtype dtype = check.dtype(false);
  const std::int64_t tokens = u.size(0), channels = channels_of(check, bias);
  const Inputs inputs(check, {u, x, weight_c, bias, scale_x, tanh}, channels, "tokens");
  const Tensor cu = torch::stable::contiguous(cu_given);
  SruArgs args = inputs.args();
  args.layout = packed_layout(check, cu, nullptr, 0, tokens, channels);
  const std::int64_t sequences = args.layout.sequences;
  const MaybeTensor c0 = of_sequences(check, c0_given, "c0", sequences, channels);
  Tensor h = torch::stable::new_empty(u, {tokens, channels});
  Tensor c = torch::stable::new_empty(u, {tokens, channels}, ScalarType::Float);
  Tensor last = torch::stable::new_empty(u, {sequences, channels}, ScalarType::Float);
  if (c0) {
    torch::stable::copy_(last, *c0);
  } else {
    torch::stable::zero_(last);
  }
  args.h = output_stream(h);
  args.c = static_cast<float*>(c.mutable_data_ptr());
  args.state = static_cast<float*>(last.mutable_data_ptr());
  args.slot_stride = channels;
  run_sru(args, dtype, u);
  return {h, c, last};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> sru_scan_train_backward(
    const Tensor& grad_given, const MaybeTensor& grad_last_given, const Tensor& u,
    const MaybeTensor& x, const MaybeTensor& weight_c, const Tensor& bias, const Tensor& cu_given,
    const Tensor& c_given, const MaybeTensor& c0_given, double scale_x, bool tanh) {
  const Check check("sru_scan_train_backward", u, "u");
  check_matrix(check, u, "tokens");
  const Dtype dtype = check.dtype(false);
  const std::int64_t tokens = u.size(0), channels = channels_of(check, bias);
  const Inputs inputs(check, {u, x, weight_c, bias, scale_x, tanh}, channels, "tokens");
  check.tensor(grad_given, "grad_h", u.scalar_type(), {tokens, channels}, "[tokens, channels]");
  check.tensor(c_given, "c", ScalarType::Float, {tokens, channels}, "[tokens, channels]");
  const Tensor grad = with_rows(grad_given), c = torch::stable::contiguous(c_given);
  const Tensor cu = torch::stable::contiguous(cu_given);
  SruArgs args = inputs.args();
  args.layout = packed_layout(check, cu, nullptr, 0, tokens, channels);
  const std::int64_t sequences = args.layout.sequences;
  const MaybeTensor c0 = of_sequences(check, c0_given, "c0", sequences, channels);
  const MaybeTensor last = of_sequences(check, grad_last_given, "grad_last", sequences, channels);
  args.c = static_cast<float*>(c.mutable_data_ptr());  // read
  Tensor grad_u = torch::stable::new_empty(u, {tokens, u.size(1)});
  Tensor grad_x = torch::stable::new_empty(u, {x ? tokens : 0, channels});
  Tensor grad_c0 = torch::stable::new_empty(u, {sequences, channels}, ScalarType::Float);
  Tensor vectors = torch::stable::new_empty(u, {4, sequences, channels}, ScalarType::Float);
  SruGradients grads;
  grads.h = rows_of(grad);
  grads.u = output_stream(grad_u);
  if (x) {
    grads.highway = output_stream(grad_x);
  } else if (args.highway.data) {
    grads.highway = output_stream(grad_u, 3 * channels);
  }
  if (last) grads.last = static_cast<const float*>(last->const_data_ptr());
  if (c0) grads.c0 = static_cast<const float*>(c0->const_data_ptr());
  grads.of_c0 = static_cast<float*>(grad_c0.mutable_data_ptr());
  grads.vectors = static_cast<float*>(vectors.mutable_data_ptr());
  const Layout& lay = args.layout;
  if (channels > 0 && (tokens > 0 || sequences > 0)) {
    if (u.is_cpu()) {
      const SruBackwardFn kernel = MS_BY_ISA(sru_backward_kernel)(dtype);
      const std::int64_t grain = tokens > 0 ? grain_of(lay) : items_of(lay);
      torch::stable::parallel_for(
          0, items_of(lay), grain,
          [&](std::int64_t begin, std::int64_t end) { kernel(args, grads, begin, end); });
    } else {
#ifdef MINSERVE_CUDA
      cuda::sru_backward(args, grads, dtype, u.get_device_index(), current_stream(u));
#else
      no_cuda();
#endif
    }
  }
  return {grad_u, grad_x, grad_c0, vectors};
}

}  // namespace minserve
