// The operators between two library products: checks, outputs, arguments. CUDA only.
#include <cstdint>

#include "../cells/traits.h"
#include "../core/operators.h"
#include "args.h"

namespace minserve {

namespace {

constexpr std::uintptr_t kAlignment = 16;

void check_vectors(const Check& check, const Tensor& t, const char* name) {
  check.require(t.is_contiguous() && t.size(t.dim() - 1) % 8 == 0 &&
                    reinterpret_cast<std::uintptr_t>(t.const_data_ptr()) % kAlignment == 0,
                name, " must be contiguous, begin at a multiple of ", kAlignment,
                " bytes and have rows of a multiple of 8, got ", describe(t));
}

const bf16* vector(const Check& check, const MaybeTensor& t, const char* name, std::int64_t size) {
  if (!t) return nullptr;
  check.tensor(*t, name, ScalarType::BFloat16, {size}, "one number for each column");
  check_vectors(check, *t, name);
  return static_cast<const bf16*>(t->const_data_ptr());
}

NormedArgs normed_args(const Check& check, const Tensor& x, double eps, const Tensor& y,
                       const MaybeTensor& bias, const MaybeTensor& ahead) {
  check.tensor(x, "x", ScalarType::BFloat16, {-1, -1}, "[rows, width]");
  check.tensor(y, "y", ScalarType::BFloat16, {x.size(0), -1}, "[rows, columns]");
  check_vectors(check, x, "x");
  check_vectors(check, y, "y");
  check.require(x.size(1) > 0 && y.size(1) > 0, "rows must not be empty, got ", describe(x),
                " and ", describe(y));
  check.require(!overlap(x, y), "x and y are changed in place, so they must not share memory");
  NormedArgs args;
  args.rows = x.size(0);
  args.width = x.size(1);
  args.channels = y.size(1);
  args.eps = static_cast<float>(eps);
  args.x = static_cast<bf16*>(x.mutable_data_ptr());
  args.ahead = vector(check, ahead, "ahead", args.width);
  args.y = static_cast<bf16*>(y.mutable_data_ptr());
  args.bias = vector(check, bias, "bias", args.channels);
  return args;
}

}  // namespace

Tensor rms_norm(const Tensor& x, double eps, const Tensor& weight) {
  const Check check("rms_norm", x, "x");
  const Tensor out = torch::stable::new_empty(x, x.sizes());
  NormedArgs args = normed_args(check, x, eps, out, {}, {});
  args.weight = vector(check, weight, "weight", args.width);
  if (args.rows > 0) cuda::rms_norm(args, x.get_device_index(), current_stream(x));
  return out;
}

void normed_gelu(const Tensor& x, double eps, const Tensor& y, const MaybeTensor& bias,
                 const MaybeTensor& ahead) {
  const Check check("normed_gelu_", x, "x");
  const NormedArgs args = normed_args(check, x, eps, y, bias, ahead);
  if (args.rows > 0) cuda::normed_gelu(args, x.get_device_index(), current_stream(x));
}

Tensor normed_swiglu(const Tensor& x, double eps, const Tensor& y, const MaybeTensor& bias,
                     const MaybeTensor& ahead) {
  const Check check("normed_swiglu_", x, "x");
  NormedArgs args = normed_args(check, x, eps, y, bias, ahead);
  check.require(args.channels % 16 == 0,
                "y must be [rows, gate | up], each of a multiple of 8, got ", describe(y));
  args.channels /= 2;
  const Tensor out = torch::stable::new_empty(x, {args.rows, args.channels});
  args.out = static_cast<bf16*>(out.mutable_data_ptr());
  if (args.rows > 0) cuda::normed_swiglu(args, x.get_device_index(), current_stream(x));
  return out;
}

Tensor added_rms_norm(const Tensor& x, const MaybeTensor& y, double eps, const Tensor& weight) {
  const Check check("added_rms_norm_", x, "x");
  const Dtype dtype = check.dtype(false);
  check.require(dtype != Dtype::f16, "x must be float32 or bfloat16, got ", describe(x));
  check.tensor(x, "x", x.scalar_type(), {-1, -1}, "[rows, width]");
  check_vectors(check, x, "x");
  AddedNormArgs args;
  args.rows = x.size(0);
  args.width = x.size(1);
  check.require(args.width > 0, "rows must not be empty, got ", describe(x));
  args.eps = static_cast<float>(eps);
  args.x = x.mutable_data_ptr();
  if (y) {
    check.tensor(*y, "y", ScalarType::BFloat16, {args.rows, args.width}, "[rows, width]");
    check_vectors(check, *y, "y");
    check.require(!overlap(x, *y), "x is changed in place, so it must not share memory with y");
    args.y = static_cast<const bf16*>(y->const_data_ptr());
  }
  args.weight = vector(check, weight, "weight", args.width);
  const Tensor out = torch::stable::new_empty(x, {args.rows, args.width}, ScalarType::BFloat16);
  args.out = static_cast<bf16*>(out.mutable_data_ptr());
  if (args.rows > 0) {
    cuda::added_rms_norm(args, dtype, x.get_device_index(), current_stream(x));
  }
  return out;
}

Tensor gated_rms_norm(const Tensor& h, const Tensor& gate, const MaybeTensor& weight, double eps,
                      std::int64_t groups, bool gate_first) {
  const Check check("gated_rms_norm", h, "h");
  const Dtype dtype = check.dtype(false);
  check.tensor(h, "h", h.scalar_type(), {-1, -1}, "[rows, channels]");
  check_vectors(check, h, "h");
  GatedNormArgs args;
  args.rows = h.size(0);
  args.channels = h.size(1);
  check.require(groups >= 1 && args.channels % (8 * groups) == 0, "the channels of h must be ",
                groups, " groups, each of a multiple of 8, got ", describe(h));
  args.groups = groups;
  args.gate_first = gate_first;
  check.tensor(gate, "gate", h.scalar_type(), {args.rows, args.channels}, "[rows, channels]");
  args.gate_stride = gate.stride(0);
  const std::int64_t row_bytes = args.gate_stride * bytes_of(gate);
  check.require((args.channels <= 1 || gate.stride(1) == 1) &&
                    (args.rows <= 1 || row_bytes % static_cast<std::int64_t>(kAlignment) == 0) &&
                    reinterpret_cast<std::uintptr_t>(gate.const_data_ptr()) % kAlignment == 0,
                "channels of gate must lie together, its rows at multiples of ", kAlignment,
                " bytes, got ", describe(gate));
  if (weight) {
    check.tensor(*weight, "weight", h.scalar_type(), {args.channels}, "[channels]");
    check_vectors(check, *weight, "weight");
    args.weight = weight->const_data_ptr();
  }
  const Tensor out = torch::stable::new_empty(h, {args.rows, args.channels});
  args.eps = static_cast<float>(eps);
  args.h = h.const_data_ptr();
  args.gate = gate.const_data_ptr();
  args.out = out.mutable_data_ptr();
  if (args.rows > 0 && args.channels > 0) {
    cuda::gated_rms_norm(args, dtype, h.get_device_index(), current_stream(h));
  }
  return out;
}

Tensor swiglu(const Tensor& y) {
  const Check check("swiglu", y, "y");
  const Dtype dtype = check.dtype(false);
  check.tensor(y, "y", y.scalar_type(), {-1, -1}, "[rows, gate | up]");
  check_vectors(check, y, "y");
  check.require(y.size(1) % 16 == 0, "y must be [rows, gate | up], each of a multiple of 8, got ",
                describe(y));
  SwigluArgs args;
  args.rows = y.size(0);
  args.channels = y.size(1) / 2;
  const Tensor out = torch::stable::new_empty(y, {args.rows, args.channels});
  args.y = y.const_data_ptr();
  args.out = out.mutable_data_ptr();
  if (args.rows > 0 && args.channels > 0) {
    cuda::swiglu(args, dtype, y.get_device_index(), current_stream(y));
  }
  return out;
}

Tensor normed_step(const Tensor& x, double eps, const Tensor& y, const MaybeTensor& bias,
                   const MaybeTensor& ahead, const Tensor& state, const Tensor& slots_given,
                   const std::string& cell, bool linear_candidate, bool normalize_gates,
                   const MaybeTensor& lower_bound, const MaybeTensor& norm_weight) {
  const Check check("normed_step_", x, "x");
  NormedArgs args = normed_args(check, x, eps, y, bias, ahead);
  check.require(state.dim() == 2, "state must be [num_slots, channels], got ", describe(state));
  const CellKind kind = require_cell<NormedCells>(check, cell);
  const std::int64_t channels = state.size(1), gates = traits_of(kind).preactivations;
  check.require(gates * channels == args.channels && channels % 8 == 0, "y must have ", gates,
                " columns for each channel of state, a multiple of 8; got ", describe(y), " and ",
                describe(state));
  check_state(check, state, channels);
  check.require(state.stride(0) % 4 == 0 &&
                    reinterpret_cast<std::uintptr_t>(state.const_data_ptr()) % kAlignment == 0,
                "rows of state must be aligned to 16 bytes");
  const CellTraits& traits = traits_of(kind);
  const bool gated = traits.preactivations > traits.inputs;
  check.require(traits.parameters > 0 || !lower_bound, "the cell ", traits.name,
                " has no lower_bound");
  check.require(gated || !norm_weight, "the cell ", traits.name, " has no norm_weight");
  check_options(check, kind, linear_candidate, normalize_gates);
  if (lower_bound) {
    check.tensor(*lower_bound, "lower_bound", ScalarType::Float, {channels}, "[channels]");
    check_vectors(check, *lower_bound, "lower_bound");
    args.lower_bound = static_cast<const float*>(lower_bound->const_data_ptr());
  }
  args.weight = vector(check, norm_weight, "norm_weight", channels);
  const Tensor slots = torch::stable::contiguous(slots_given);
  const Layout layout = step_layout(check, slots, state.size(0), args.rows, channels);
  args.channels = channels;
  args.state = static_cast<float*>(state.mutable_data_ptr());
  args.state_stride = state.stride(0);
  args.num_slots = layout.num_slots;
  args.slots = layout.slots;
  args.linear_candidate = linear_candidate;
  args.normalize_gates = normalize_gates;
  const Tensor out = torch::stable::new_empty(x, {args.rows, channels});
  args.out = static_cast<bf16*>(out.mutable_data_ptr());
  if (args.rows > 0) {
    cuda::normed_step(args, kind, x.get_device_index(), current_stream(x));
  }
  return out;
}

}  // namespace minserve
