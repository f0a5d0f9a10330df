// ssd_scan and ssd_step: checks, outputs, arguments, the choice of the device's kernel.
#include "../core/operators.h"
#include "args.h"

namespace minserve {

namespace {

void run_on_cpu(const SsdArgs& args, Dtype dtype) {
  const Layout& lay = args.layout;
  const SsdFn kernel = MS_BY_ISA(ssd_kernel)(dtype);
  const std::int64_t items = ssd_items(args);
  const std::int64_t states = lay.tokens * lay.channels * args.states;  // of all tokens
  const std::int64_t grain = divided_up(kGrainElements * items, states);
  torch::stable::parallel_for(
      0, items, grain, [&](std::int64_t begin, std::int64_t end) { kernel(args, begin, end); });
}

// `like`: a tensor of the operator's dtype, on its device.
void run_ssd(SsdArgs args, Dtype dtype, const Tensor& like) {
  if (args.layout.channels == 0 || args.layout.tokens == 0) return;
  if (like.is_cpu()) return run_on_cpu(args, dtype);
#ifdef MINSERVE_CUDA
  const int device = like.get_device_index();
  MaybeTensor workspace;
  if (const std::int64_t bytes = cuda::ssd_workspace_bytes(args, dtype, device)) {
    workspace = torch::stable::new_empty(like, {bytes}, ScalarType::Byte);
    args.workspace = workspace->mutable_data_ptr();
  }
  cuda::ssd(args, dtype, device, current_stream(like));
#else
  no_cuda();
#endif
}

// Rows of which each is contiguous; they may lie anywhere.
Tensor with_rows(const Tensor& t) {
  std::int64_t expected = 1;
  for (std::int64_t i = t.dim() - 1; i > 0; --i) {
    if (t.size(i) > 1 && t.stride(i) != expected) return torch::stable::contiguous(t);
    expected *= t.size(i);
  }
  return t;
}

Stream rows_of(const Tensor& t) {
  // Only ever read: Stream has one pointer type for both directions.
  return {const_cast<void*>(t.const_data_ptr()), t.stride(0)};
}

HeadVector vector_of(const Tensor& t) {
  return {t.const_data_ptr(), t.scalar_type() == ScalarType::Float};
}

struct Given {  // the arguments that scan and step share
  const Tensor &x, &dt, &A, &B, &C, &D, &dt_bias;
  const std::vector<double>& dt_limit;
  const Tensor &state, &slots;
};

void check_vector(const Check& check, const Tensor& t, const char* name, const Tensor& x) {
  const bool is_float = t.scalar_type() == ScalarType::Float;
  check.require(is_float || t.scalar_type() == x.scalar_type(), name,
                " must be float32 or have the dtype of x, got ", describe(t));
  check.tensor(t, name, t.scalar_type(), {x.size(1)}, "[heads]");
}

void check_state_rows(const Check& check, const Tensor& state, const Tensor& x,
                      std::int64_t states) {
  const bool half = state.scalar_type() == ScalarType::BFloat16;
  check.require(half || state.scalar_type() == ScalarType::Float,
                "state must be float32 or bfloat16, got ", describe(state));
  check.tensor(state, "state", state.scalar_type(), {-1, x.size(1), x.size(2), states},
               "[num_slots, heads, head_dim, states]");
  std::int64_t expected = 1;
  for (std::int64_t i = 3; i > 0; --i) {
    check.require(state.size(i) <= 1 || state.stride(i) == expected,
                  "state is changed in place, so its rows [heads, head_dim, states] must be "
                  "contiguous, got strides [",
                  state.stride(0), ", ", state.stride(1), ", ", state.stride(2), ", ",
                  state.stride(3), "]");
    expected *= state.size(i);
  }
}

Tensor recur(const Check& check, const Given& given, const Tensor* cu_seqlens) {
  const Tensor& x = given.x;
  check.require(x.dim() == 3, "x must be [", cu_seqlens ? "tokens" : "batch",
                ", heads, head_dim], got ", describe(x));
  const Dtype dtype = check.dtype(false);
  const ScalarType type = x.scalar_type();
  const std::int64_t tokens = x.size(0), heads = x.size(1), head_dim = x.size(2);
  check.tensor(given.dt, "dt", type, {tokens, heads}, "[tokens, heads]");
  check.tensor(given.A, "A", ScalarType::Float, {heads}, "[heads]");
  check.tensor(given.B, "B", type, {tokens, -1, -1}, "[tokens, groups, states]");
  const std::int64_t groups = given.B.size(1), states = given.B.size(2);
  check.require(groups >= 1 && heads % groups == 0, "the groups of B must divide the ", heads,
                " heads, got ", describe(given.B));
  check.require(states >= 1 && states <= kMostSsdStates, "B must have 1 to ", kMostSsdStates,
                " states, got ", describe(given.B));
  check.tensor(given.C, "C", type, {tokens, groups, states}, "[tokens, groups, states]");
  check_vector(check, given.D, "D", x);
  check_vector(check, given.dt_bias, "dt_bias", x);
  check.require(given.dt_limit.size() == 2,
                "dt_limit must be the least and the largest time step, got ", given.dt_limit.size(),
                " numbers");
  check_state_rows(check, given.state, x, states);

  const Tensor rows_x = with_rows(x), rows_dt = with_rows(given.dt), rows_b = with_rows(given.B),
               rows_c = with_rows(given.C);
  const Tensor a = torch::stable::contiguous(given.A), d = torch::stable::contiguous(given.D),
               bias = torch::stable::contiguous(given.dt_bias),
               slots = torch::stable::contiguous(given.slots);
  MaybeTensor cu;
  if (cu_seqlens) cu = torch::stable::contiguous(*cu_seqlens);
  Tensor y = torch::stable::new_empty(x, {tokens, heads, head_dim});

  SsdArgs args;
  const std::int64_t channels = heads * head_dim;
  args.layout = cu ? packed_layout(check, *cu, &slots, given.state.size(0), tokens, channels)
                   : step_layout(check, slots, given.state.size(0), tokens, channels);
  args.heads = heads;
  args.head_dim = head_dim;
  args.groups = groups;
  args.states = states;
  args.x = rows_of(rows_x);
  args.dt = rows_of(rows_dt);
  args.B = rows_of(rows_b);
  args.C = rows_of(rows_c);
  args.y = {y.mutable_data_ptr(), channels};
  args.A = static_cast<const float*>(a.const_data_ptr());
  args.D = vector_of(d);
  args.dt_bias = vector_of(bias);
  args.least_dt = static_cast<float>(given.dt_limit[0]);
  args.most_dt = static_cast<float>(given.dt_limit[1]);
  args.state = given.state.mutable_data_ptr();
  args.slot_stride = given.state.stride(0);
  args.half_state = given.state.scalar_type() == ScalarType::BFloat16;
  run_ssd(args, dtype, x);
  return y;
}

}  // namespace

Tensor ssd_scan(const Tensor& x, const Tensor& dt, const Tensor& A, const Tensor& B,
                const Tensor& C, const Tensor& D, const Tensor& dt_bias,
                const std::vector<double>& dt_limit, const Tensor& cu_seqlens, const Tensor& state,
                const Tensor& slots) {
  const Check check("ssd_scan", x, "x");
  return recur(check, {x, dt, A, B, C, D, dt_bias, dt_limit, state, slots}, &cu_seqlens);
}

Tensor ssd_step(const Tensor& x, const Tensor& dt, const Tensor& A, const Tensor& B,
                const Tensor& C, const Tensor& D, const Tensor& dt_bias,
                const std::vector<double>& dt_limit, const Tensor& state, const Tensor& slots) {
  const Check check("ssd_step", x, "x");
  return recur(check, {x, dt, A, B, C, D, dt_bias, dt_limit, state, slots}, nullptr);
}

}  // namespace minserve
