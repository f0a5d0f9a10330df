// Scans and steps of GRU and LSTM: checks, outputs, arguments, the choice of the device's kernel.
#include <algorithm>

#include "../core/operators.h"
#include "../cpu_product/run_in_team.h"
#include "runs.h"

namespace minserve {

namespace {

struct States {
  const Tensor& hidden;
  const Tensor* cell;  // null: a GRU
  std::int64_t gates() const { return cell ? kLstmGates : kGruGates; }
  const char* pre_shape(bool packed) const {
    if (packed) return cell ? "[tokens, 4 * units]" : "[tokens, 3 * units]";
    return cell ? "[batch, 4 * units]" : "[batch, 3 * units]";
  }
};

StateRows state_rows(const Check& check, const Tensor& state, const char* name,
                     std::int64_t slots) {
  check.tensor(state, name, ScalarType::Float, {slots, -1}, "[num_slots, units]");
  check.require(state.size(1) <= 1 || state.stride(1) == 1, name,
                " is changed in place, so its last dimension must be contiguous, got strides [",
                state.stride(0), ", ", state.stride(1), "]");
  return {static_cast<float*>(state.mutable_data_ptr()), state.stride(0)};
}

// What scan and step have in common; `h` is new.
GatedRnnArgs arguments(const Check& check, const Tensor& pre, const States& states, bool packed) {
  GatedRnnArgs args;
  args.hidden = state_rows(check, states.hidden, "hidden", -1);
  const std::int64_t units = states.hidden.size(1);
  if (states.cell) {
    args.cell = state_rows(check, *states.cell, "cell", states.hidden.size(0));
    check.tensor(*states.cell, "cell", ScalarType::Float, {states.hidden.size(0), units},
                 "[num_slots, units] as hidden");
    // Empty tensors may have no address; the kernels know an LSTM by it.
    static float none = 0;
    if (!args.cell.data) args.cell.data = &none;
  }
  check.tensor(pre, "pre", pre.scalar_type(), {-1, states.gates() * units},
               states.pre_shape(packed));
  return args;
}

// The runs of a scan on the CPU, whose cu_seqlens and slots may be read here.
void scan_on_cpu(const GatedRnnArgs& args, Dtype dtype, const Tensor& like) {
  const Layout& lay = args.layout;
  const GatedRuns found = gated_runs(lay);
  GatedScanWork work;
  work.args = args;
  work.runs = found.runs.data();
  work.run_count = static_cast<std::int64_t>(found.runs.size());
  work.skipped = found.skipped.data();
  work.skipped_count = static_cast<std::int64_t>(found.skipped.size());
  work.matrix.stored = packed_kind(dtype);
  work.matrix.inputs = work.matrix.outputs = lay.channels;
  work.matrix.gates = args.gates();
  const std::int64_t weights = found.runs.empty() ? 0 : up_to(work.matrix.bytes(), 64);
  const std::int64_t fed = 2 * work.run_count * fed_row_bytes(lay.channels, 4);
  const Tensor room = torch::stable::new_empty(like, {(weights + fed) / 4 + 16}, ScalarType::Float);
  const std::uintptr_t at = reinterpret_cast<std::uintptr_t>(room.mutable_data_ptr());
  work.packed = reinterpret_cast<char*>((at + 63) / 64 * 64);
  work.matrix.data = work.packed;
  work.fed = work.packed + weights;
  const GatedScanFn kernel = MS_BY_PRODUCT_ISA(gated_scan_kernel)(dtype, args.is_lstm());
  const std::int64_t units = divided_up(lay.channels, kPanel);
  run_in_team(std::min(units, threads_worth(work.matrix.bytes(), work.run_count)),
              [&](ThreadTeam& team, std::int64_t thread) { kernel(work, team, thread); });
}

Tensor scan(const Check& check, const Tensor& pre_given, const Tensor& weight_given,
            const MaybeTensor& bias_given, const Tensor& cu_given, const States& states,
            const Tensor& slots_given) {
  check.require(pre_given.dim() == 2, "pre must be ", states.pre_shape(true), ", got ",
                describe(pre_given));
  const Dtype dtype = check.dtype(false);
  GatedRnnArgs args = arguments(check, pre_given, states, true);
  const std::int64_t units = states.hidden.size(1), wide = states.gates() * units;
  check.tensor(weight_given, "weight", pre_given.scalar_type(), {wide, units},
               states.cell ? "[4 * units, units]" : "[3 * units, units]");
  MaybeTensor bias;
  if (bias_given) {
    const bool is_float = bias_given->scalar_type() == ScalarType::Float;
    check.require(is_float || bias_given->scalar_type() == pre_given.scalar_type(),
                  "bias must be float32 or have the dtype of pre, got ", describe(*bias_given));
    check.tensor(*bias_given, "bias", bias_given->scalar_type(), {wide},
                 states.cell ? "[4 * units]" : "[3 * units]");
    bias = torch::stable::contiguous(*bias_given);
    args.bias = {bias->const_data_ptr(), is_float};
  }
  const Tensor pre = with_rows(pre_given), weight = with_rows(weight_given),
               cu = torch::stable::contiguous(cu_given),
               slots = torch::stable::contiguous(slots_given);
  const std::int64_t tokens = pre.size(0);
  args.layout = packed_layout(check, cu, &slots, states.hidden.size(0), tokens, units);
  Tensor h = torch::stable::new_empty(pre, {tokens, units});
  args.pre = rows_of(pre);
  args.weight = rows_of(weight);
  args.h = output_stream(h);
  if (tokens == 0 || units == 0) return h;
  if (pre.is_cpu()) {
    scan_on_cpu(args, dtype, pre);
    return h;
  }
#ifdef MINSERVE_CUDA
  const std::int64_t bytes = cuda::gated_scan_exchange_bytes(args, dtype);
  const Tensor exchange = torch::stable::new_empty(pre, {divided_up(bytes, 4)}, ScalarType::Float);
  cuda::gated_scan(args, dtype, exchange.mutable_data_ptr(), pre.get_device_index(),
                   current_stream(pre));
#else
  no_cuda();
#endif
  return h;
}

Tensor step(const Check& check, const Tensor& pre_given, const Tensor& recurrent_given,
            const States& states, const Tensor& slots_given) {
  check.require(pre_given.dim() == 2, "pre must be ", states.pre_shape(false), ", got ",
                describe(pre_given));
  const Dtype dtype = check.dtype(false);
  GatedRnnArgs args = arguments(check, pre_given, states, false);
  const std::int64_t units = states.hidden.size(1), batch = pre_given.size(0);
  check.tensor(recurrent_given, "recurrent", pre_given.scalar_type(),
               {batch, states.gates() * units}, states.pre_shape(false));
  const Tensor pre = with_rows(pre_given), recurrent = with_rows(recurrent_given),
               slots = torch::stable::contiguous(slots_given);
  args.layout = step_layout(check, slots, states.hidden.size(0), batch, units);
  Tensor h = torch::stable::new_empty(pre, {batch, units});
  args.pre = rows_of(pre);
  args.recurrent = rows_of(recurrent);
  args.h = output_stream(h);
  if (batch == 0 || units == 0) return h;
  if (pre.is_cpu()) {
    const GatedStepFn kernel = MS_BY_PRODUCT_ISA(gated_step_kernel)(dtype, args.is_lstm());
    const std::int64_t runs = divided_up(units, kGatedRun);
    torch::stable::parallel_for(
        0, batch * runs, divided_up(kGrainElements, kGatedRun * args.gates()),
        [&](std::int64_t begin, std::int64_t end) { kernel(args, begin, end); });
    return h;
  }
#ifdef MINSERVE_CUDA
  cuda::gated_step(args, dtype, pre.get_device_index(), current_stream(pre));
#else
  no_cuda();
#endif
  return h;
}

}  // namespace

Tensor gru_scan(const Tensor& pre, const Tensor& weight, const MaybeTensor& bias,
                const Tensor& cu_seqlens, const Tensor& hidden, const Tensor& slots) {
  const Check check("gru_scan", pre, "pre");
  return scan(check, pre, weight, bias, cu_seqlens, {hidden, nullptr}, slots);
}

Tensor gru_step(const Tensor& pre, const Tensor& recurrent, const Tensor& hidden,
                const Tensor& slots) {
  const Check check("gru_step", pre, "pre");
  return step(check, pre, recurrent, {hidden, nullptr}, slots);
}

Tensor lstm_scan(const Tensor& pre, const Tensor& weight, const MaybeTensor& bias,
                 const Tensor& cu_seqlens, const Tensor& hidden, const Tensor& cell,
                 const Tensor& slots) {
  const Check check("lstm_scan", pre, "pre");
  return scan(check, pre, weight, bias, cu_seqlens, {hidden, &cell}, slots);
}

Tensor lstm_step(const Tensor& pre, const Tensor& recurrent, const Tensor& hidden,
                 const Tensor& cell, const Tensor& slots) {
  const Check check("lstm_step", pre, "pre");
  return step(check, pre, recurrent, {hidden, &cell}, slots);
}

}  // namespace minserve
