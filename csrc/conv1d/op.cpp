// conv_scan and conv_step: checks, outputs, arguments, the choice of the device's kernel.
#include <algorithm>

#include "../core/operators.h"
#include "args.h"

namespace minserve {

namespace {

// `like`: a tensor of the operator's dtype, on its device.
void run_conv(ConvArgs args, Dtype dtype, const Tensor& like) {
  const Layout& lay = args.layout;
  if (lay.channels == 0 || lay.sequences + lay.tokens == 0) return;
  if (like.is_cpu()) {
    const ConvFn kernel = MS_BY_ISA(conv_kernel)(dtype);
    Tensor rows = torch::stable::new_empty(like, {args.taps + 1, lay.channels}, ScalarType::Float);
    args.weight_rows = static_cast<float*>(rows.mutable_data_ptr());
    kernel(args, ConvPhase::weights, 0, 1);
    const std::int64_t grain = std::max<std::int64_t>(1, kGrainElements / lay.channels);
    for (const ConvPhase phase : {ConvPhase::outputs, ConvPhase::states}) {
      torch::stable::parallel_for(
          0, phase == ConvPhase::outputs ? lay.tokens : lay.sequences, grain,
          [&](std::int64_t begin, std::int64_t end) { kernel(args, phase, begin, end); });
    }
    return;
  }
#ifdef MINSERVE_CUDA
  cuda::conv(args, dtype, like.get_device_index(), current_stream(like));
#else
  no_cuda();
#endif
}

Tensor convolve(const Check& check, const Tensor& x, const Tensor& weight_given,
                const MaybeTensor& bias_given, const Tensor* cu, const Tensor& state,
                const Tensor& slots, bool silu) {
  const Dtype dtype = check.dtype(false);
  const std::int64_t channels = x.size(1);
  check.tensor(weight_given, "weight", x.scalar_type(), {channels, -1}, "[channels, taps]");
  const std::int64_t taps = weight_given.size(1);
  check.require(taps >= 1, "weight must have at least one tap, got ", describe(weight_given));
  if (bias_given) check.tensor(*bias_given, "bias", x.scalar_type(), {channels}, "[channels]");
  check.tensor(state, "state", ScalarType::Float, {-1, taps - 1, channels},
               "[num_slots, taps - 1, channels]");
  check.require(channels <= 1 || state.stride(2) == 1,
                "state is changed in place, so its last dimension must be contiguous, got stride ",
                state.stride(2));
  const Tensor weight = torch::stable::contiguous(weight_given);
  MaybeTensor bias;
  if (bias_given) bias = torch::stable::contiguous(*bias_given);
  Tensor out = torch::stable::new_empty(x, {x.size(0), channels});
  ConvArgs args;
  args.layout = cu ? packed_layout(check, *cu, &slots, state.size(0), x.size(0), channels)
                   : step_layout(check, slots, state.size(0), x.size(0), channels);
  args.taps = taps;
  args.x = rows_of(x);
  args.weight = weight.const_data_ptr();
  args.bias = bias ? bias->const_data_ptr() : nullptr;
  args.state = static_cast<float*>(state.mutable_data_ptr());
  args.slot_stride = state.stride(0);
  args.tap_stride = state.stride(1);
  args.out = out.mutable_data_ptr();
  args.silu = silu;
  run_conv(args, dtype, x);
  return out;
}

}  // namespace

Tensor conv_scan(const Tensor& x, const Tensor& weight, const MaybeTensor& bias,
                 const Tensor& cu_seqlens, const Tensor& state, const Tensor& slots, bool silu) {
  const Check check("conv_scan", x, "x");
  check.require(x.dim() == 2, "x must be [tokens, channels], got ", describe(x));
  const Tensor cu = torch::stable::contiguous(cu_seqlens);
  return convolve(check, with_rows(x), weight, bias, &cu, state, torch::stable::contiguous(slots),
                  silu);
}

Tensor conv_step(const Tensor& x, const Tensor& weight, const MaybeTensor& bias,
                 const Tensor& state, const Tensor& slots, bool silu) {
  const Check check("conv_step", x, "x");
  check.require(x.dim() == 2, "x must be [batch, channels], got ", describe(x));
  return convolve(check, with_rows(x), weight, bias, nullptr, state,
                  torch::stable::contiguous(slots), silu);
}

}  // namespace minserve
