// selective_scan and selective_step: checks, outputs, arguments, the choice of the device's kernel.
#include "../core/operators.h"
#include "args.h"
#include "selected_args.h"

namespace minserve {

namespace {

// `like`: a tensor of the operator's dtype, on its device.
void run_selective(const SelectiveArgs& args, Dtype dtype, const Tensor& like) {
  const Layout& lay = args.layout;
  if (lay.channels == 0 || lay.tokens == 0) return;
  if (like.is_cpu()) {
    const SelectiveFn kernel = MS_BY_ISA(selective_kernel)(dtype);
    const std::int64_t items = (lay.sequences + 1) * divided_up(lay.channels, kSelectiveRun);
    const std::int64_t states = lay.tokens * lay.channels * args.states;  // of all tokens
    const std::int64_t grain = divided_up(kGrainElements * items, states);
    torch::stable::parallel_for(
        0, items, grain, [&](std::int64_t begin, std::int64_t end) { kernel(args, begin, end); });
    return;
  }
#ifdef MINSERVE_CUDA
  cuda::selective(args, dtype, like.get_device_index(), current_stream(like));
#else
  no_cuda();
#endif
}

struct Given {  // the arguments that scan and step share
  const Tensor &x, &dt, &A, &B, &C, &D, &dt_bias;
  const MaybeTensor& z;
  const Tensor &state, &slots;
};

void check_vector(const Check& check, const Tensor& t, const char* name, const Tensor& x) {
  const bool is_float = t.scalar_type() == ScalarType::Float;
  check.require(is_float || t.scalar_type() == x.scalar_type(), name,
                " must be float32 or have the dtype of x, got ", describe(t));
  check.tensor(t, name, t.scalar_type(), {x.size(1)}, "[channels]");
}

void check_state_rows(const Check& check, const Tensor& state, std::int64_t channels,
                      std::int64_t states) {
  const bool half = state.scalar_type() == ScalarType::BFloat16;
  check.require(half || state.scalar_type() == ScalarType::Float,
                "state must be float32 or bfloat16, got ", describe(state));
  check.tensor(state, "state", state.scalar_type(), {-1, channels, states},
               "[num_slots, channels, states]");
  check.require(
      (states <= 1 || state.stride(2) == 1) && (channels <= 1 || state.stride(1) == states),
      "state is changed in place, so its rows [channels, states] must be contiguous, got "
      "strides [",
      state.stride(0), ", ", state.stride(1), ", ", state.stride(2), "]");
}

Tensor recur(const Check& check, const Given& given, const Tensor* cu_seqlens) {
  const Tensor& x = given.x;
  check.require(x.dim() == 2, "x must be [", cu_seqlens ? "tokens" : "batch", ", channels], got ",
                describe(x));
  const Dtype dtype = check.dtype(false);
  const ScalarType type = x.scalar_type();
  const std::int64_t tokens = x.size(0), channels = x.size(1);
  check.tensor(given.dt, "dt", type, {tokens, channels}, "[tokens, channels]");
  check.tensor(given.A, "A", ScalarType::Float, {channels, -1}, "[channels, states]");
  const std::int64_t states = given.A.size(1);
  check.require(states >= 1 && states <= kMostStates, "A must have 1 to ", kMostStates,
                " states, got ", describe(given.A));
  check.tensor(given.B, "B", type, {tokens, states}, "[tokens, states]");
  check.tensor(given.C, "C", type, {tokens, states}, "[tokens, states]");
  check_vector(check, given.D, "D", x);
  check_vector(check, given.dt_bias, "dt_bias", x);
  if (given.z) check.tensor(*given.z, "z", type, {tokens, channels}, "[tokens, channels]");
  check_state_rows(check, given.state, channels, states);

  const Tensor rows_x = with_rows(x), rows_dt = with_rows(given.dt), rows_b = with_rows(given.B),
               rows_c = with_rows(given.C);
  MaybeTensor rows_z;
  if (given.z) rows_z = with_rows(*given.z);
  const Tensor a = torch::stable::contiguous(given.A), d = torch::stable::contiguous(given.D),
               bias = torch::stable::contiguous(given.dt_bias),
               slots = torch::stable::contiguous(given.slots);
  MaybeTensor cu;
  if (cu_seqlens) cu = torch::stable::contiguous(*cu_seqlens);
  Tensor y = torch::stable::new_empty(x, {tokens, channels});

  SelectiveArgs args;
  args.layout = cu ? packed_layout(check, *cu, &slots, given.state.size(0), tokens, channels)
                   : step_layout(check, slots, given.state.size(0), tokens, channels);
  args.states = states;
  args.x = rows_of(rows_x);
  args.dt = rows_of(rows_dt);
  args.B = rows_of(rows_b);
  args.C = rows_of(rows_c);
  if (rows_z) args.z = rows_of(*rows_z);
  args.y = output_stream(y);
  args.A = static_cast<const float*>(a.const_data_ptr());
  args.D = {d.const_data_ptr(), d.scalar_type() == ScalarType::Float};
  args.dt_bias = {bias.const_data_ptr(), bias.scalar_type() == ScalarType::Float};
  args.state = given.state.mutable_data_ptr();
  args.slot_stride = given.state.stride(0);
  args.half_state = given.state.scalar_type() == ScalarType::BFloat16;
  run_selective(args, dtype, x);
  return y;
}

}  // namespace

Tensor selective_scan(const Tensor& x, const Tensor& dt, const Tensor& A, const Tensor& B,
                      const Tensor& C, const Tensor& D, const Tensor& dt_bias, const MaybeTensor& z,
                      const Tensor& cu_seqlens, const Tensor& state, const Tensor& slots) {
  const Check check("selective_scan", x, "x");
  return recur(check, {x, dt, A, B, C, D, dt_bias, z, state, slots}, &cu_seqlens);
}

Tensor selective_step(const Tensor& x, const Tensor& dt, const Tensor& A, const Tensor& B,
                      const Tensor& C, const Tensor& D, const Tensor& dt_bias, const MaybeTensor& z,
                      const Tensor& state, const Tensor& slots) {
  const Check check("selective_step", x, "x");
  return recur(check, {x, dt, A, B, C, D, dt_bias, z, state, slots}, nullptr);
}

#ifdef MINSERVE_CUDA
Tensor selected_step(const Tensor& x, const Tensor& selection, const Tensor& dt_weight,
                     const Tensor& A, const Tensor& D, const Tensor& dt_bias, const MaybeTensor& z,
                     const Tensor& state, const Tensor& slots_given,
                     std::optional<double> norm_eps) {
  constexpr std::int64_t kStates = kSelectedStates;
  const Check check("selected_step", x, "x");
  const ScalarType type = ScalarType::BFloat16;
  check.tensor(x, "x", type, {-1, -1}, "[batch, channels]");
  const std::int64_t batch = x.size(0), channels = x.size(1);
  check.tensor(dt_weight, "dt_weight", type, {-1, channels, kDtChunk}, "[rank / 8, channels, 8]");
  const std::int64_t rank = dt_weight.size(0) * kDtChunk;
  check.tensor(selection, "selection", type, {batch, rank + 2 * kStates}, "[batch, dt | B | C]");
  check.tensor(A, "A", ScalarType::Float, {channels, kStates}, "[channels, 16]");
  check_vector(check, D, "D", x);
  check_vector(check, dt_bias, "dt_bias", x);
  if (z) check.tensor(*z, "z", type, {batch, channels}, "[batch, channels]");
  check_state_rows(check, state, channels, kStates);
  const bool half = state.scalar_type() == type;
  const auto placed = [&](const Tensor& t, const char* name, std::int64_t bytes) {
    check.require(
        reinterpret_cast<std::uintptr_t>(t.const_data_ptr()) % static_cast<std::size_t>(bytes) ==
                0 &&
            t.stride(0) * bytes_of(t) % bytes == 0,
        name, " must have rows that begin at multiples of ", bytes, " bytes, got ", describe(t));
  };
  // A copy of a weight would be written by the kernel before, which may not have ended when the
  // step reads it.
  check.require(dt_weight.is_contiguous() && A.is_contiguous() && D.is_contiguous() &&
                    dt_bias.is_contiguous(),
                "dt_weight, A, D and dt_bias must be contiguous");
  placed(dt_weight, "dt_weight", 16);
  placed(A, "A", 16);
  placed(state, "state", half ? 8 : 16);
  const Tensor rows_x = with_rows(x), chosen = with_rows(selection);
  placed(chosen, "selection", 16);
  MaybeTensor rows_z;
  if (z) rows_z = with_rows(*z);
  const Tensor slots = torch::stable::contiguous(slots_given);
  Tensor y = torch::stable::new_empty(x, {batch, channels});

  SelectedArgs args;
  SelectiveArgs& step = args.step;
  step.layout = step_layout(check, slots, state.size(0), batch, channels);
  step.states = kStates;
  step.x = rows_of(rows_x);
  step.dt = step.B = step.C = rows_of(chosen);
  step.B.data = static_cast<bf16*>(step.dt.data) + rank;
  step.C.data = static_cast<bf16*>(step.dt.data) + rank + kStates;
  if (rows_z) step.z = rows_of(*rows_z);
  step.y = output_stream(y);
  step.A = static_cast<const float*>(A.const_data_ptr());
  step.D = {D.const_data_ptr(), D.scalar_type() == ScalarType::Float};
  step.dt_bias = {dt_bias.const_data_ptr(), dt_bias.scalar_type() == ScalarType::Float};
  step.state = state.mutable_data_ptr();
  step.slot_stride = state.stride(0);
  step.half_state = half;
  args.rank = static_cast<int>(rank);
  args.dt_weight = static_cast<const bf16*>(dt_weight.const_data_ptr());
  args.normed = norm_eps.has_value();
  args.norm_eps = static_cast<float>(norm_eps.value_or(0.0));
  if (batch > 0 && channels > 0) {
    cuda::selected_step(args, x.get_device_index(), current_stream(x));
  }
  return y;
}
#endif

}  // namespace minserve
