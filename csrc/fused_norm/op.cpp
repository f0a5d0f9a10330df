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

Tensor normed_step(const Tensor& x, double eps, const Tensor& y, const MaybeTensor& bias,
                   const MaybeTensor& ahead, const Tensor& state, const Tensor& slots_given,
                   const std::string& cell, bool linear_candidate, bool normalize_gates) {
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
