// draw_ and draw_best_: checks, arguments, the choice of the device's kernel.
#include "../core/operators.h"
#include "parallel_rows.h"
#include "row_cpu.h"

namespace minserve {

namespace {

// A vector with one element per row that is changed in place.
template <class T>
T* changed(const Check& check, const Tensor& t, const char* name, ScalarType type,
           std::int64_t rows) {
  check.tensor(t, name, type, {rows}, "[rows]");
  check.require(rows <= 1 || t.stride(0) == 1, name,
                " is changed in place, so it must be contiguous, got stride ", t.stride(0));
  return static_cast<T*>(t.mutable_data_ptr());
}

// Where rows stand, all changed in place.
void set_row_state(const Check& check, SampleArgs& args, const Tensor& tokens, const Tensor& slots,
                   const Tensor& positions, const Tensor& remaining, const Tensor& cursor,
                   const Tensor& out) {
  const std::int64_t rows = args.rows;
  args.tokens = changed<std::int32_t>(check, tokens, "tokens", ScalarType::Int, rows);
  args.slots = changed<std::int32_t>(check, slots, "slots", ScalarType::Int, rows);
  args.positions = changed<std::int64_t>(check, positions, "positions", ScalarType::Long, rows);
  args.remaining = changed<std::int32_t>(check, remaining, "remaining", ScalarType::Int, rows);
  args.cursor = changed<std::int32_t>(check, cursor, "cursor", ScalarType::Int, rows);
  check.tensor(out, "out", ScalarType::Int, {-1, rows}, "[steps, rows]");
  check.require(rows <= 1 || out.stride(1) == 1,
                "out is changed in place, so its last dimension must be contiguous, got stride ",
                out.stride(1));
  args.out = static_cast<std::int32_t*>(out.mutable_data_ptr());
  args.out_stride = out.stride(0);
  args.steps = out.size(0);
}

void run_sample(const SampleArgs& args, const Tensor& logits) {
  if (args.rows == 0) return;
  if (logits.is_cpu()) {
    const SampleKernels kernels = MS_BY_ISA(sample_kernels)();
    return by_rows(args, [&](const SampleArgs&, std::int64_t begin, std::int64_t end) {
      RowSampler row(args, kernels);
      for (std::int64_t r = begin; r < end; ++r) {
        if (args.is_active(r)) move_on(args, r, row.token(r));
      }
    });
  }
#ifdef MINSERVE_CUDA
  cuda::sample(args, logits.get_device_index(), current_stream(logits));
#else
  no_cuda();
#endif
}

}  // namespace

void draw_(const Tensor& logits_given, const Tensor& tokens, const Tensor& slots,
           const Tensor& positions, const Tensor& remaining, const Tensor& cursor,
           const Tensor& out, const Tensor& temperature_given, const Tensor& top_k_given,
           const Tensor& top_p_given, const Tensor& min_p_given, const Tensor& streams_given,
           const Tensor& stop_ids_given) {
  const Check check("draw_", logits_given, "logits");
  check.tensor(logits_given, "logits", ScalarType::Float, {-1, -1}, "[rows, vocab]");
  const std::int64_t rows = logits_given.size(0), vocab = logits_given.size(1);
  check.require(vocab >= 1 && vocab < (std::int64_t{1} << 24),
                "logits must have a vocabulary of 1 to 2**24 - 1 tokens, got ",
                describe(logits_given));
  const bool in_rows = logits_given.stride(1) == 1 || vocab == 1;
  const Tensor logits = in_rows ? logits_given : torch::stable::contiguous(logits_given);
  const Tensor temperature = torch::stable::contiguous(temperature_given);
  const Tensor top_k = torch::stable::contiguous(top_k_given);
  const Tensor top_p = torch::stable::contiguous(top_p_given);
  const Tensor min_p = torch::stable::contiguous(min_p_given);
  const Tensor streams = torch::stable::contiguous(streams_given);
  const Tensor stop_ids = torch::stable::contiguous(stop_ids_given);

  SampleArgs args;
  args.rows = rows;
  args.vocab = vocab;
  args.logits = logits.const_data_ptr<float>();
  args.row_stride = logits.stride(0);
  set_row_state(check, args, tokens, slots, positions, remaining, cursor, out);
  check.tensor(temperature, "temperature", ScalarType::Float, {rows}, "[rows]");
  check.tensor(top_k, "top_k", ScalarType::Int, {rows}, "[rows]");
  check.tensor(top_p, "top_p", ScalarType::Double, {rows}, "[rows]");
  check.tensor(min_p, "min_p", ScalarType::Float, {rows}, "[rows]");
  check.tensor(streams, "streams", ScalarType::Long, {rows}, "[rows]");
  check.tensor(stop_ids, "stop_ids", ScalarType::Int, {rows, -1}, "[rows, stop ids]");
  args.temperature = temperature.const_data_ptr<float>();
  args.top_k = top_k.const_data_ptr<std::int32_t>();
  args.top_p = top_p.const_data_ptr<double>();
  args.min_p = min_p.const_data_ptr<float>();
  args.streams = streams.const_data_ptr<std::int64_t>();
  args.stop_ids = stop_ids.const_data_ptr<std::int32_t>();
  args.stops = stop_ids.size(1);
  // Values on the GPU are not looked at: that would stall it.
  for (std::int64_t r = 0; logits.is_cpu() && r < rows; ++r) {
    check.require(args.slots[r] < 0 || (args.cursor[r] >= 0 && args.cursor[r] < args.steps),
                  "cursor must be a row of out, which has ", args.steps, ", got ", args.cursor[r],
                  " at index ", r);
  }
  run_sample(args, logits);
}

#ifdef MINSERVE_CUDA
void draw_best(const Tensor& best_given, const Tensor& tokens, const Tensor& slots,
               const Tensor& positions, const Tensor& remaining, const Tensor& cursor,
               const Tensor& out, const Tensor& stop_ids_given) {
  const Check check("draw_best_", best_given, "best");
  check.tensor(best_given, "best", ScalarType::Long, {-1, -1}, "[rows, parts]");
  check.require(best_given.size(1) > 0, "best must have at least one part");
  const Tensor best = torch::stable::contiguous(best_given);
  const Tensor stop_ids = torch::stable::contiguous(stop_ids_given);
  SampleArgs args;
  args.rows = best.size(0);
  args.parts = best.size(1);
  args.best = static_cast<const std::uint64_t*>(best.const_data_ptr());
  set_row_state(check, args, tokens, slots, positions, remaining, cursor, out);
  check.tensor(stop_ids, "stop_ids", ScalarType::Int, {args.rows, -1}, "[rows, stop ids]");
  args.stop_ids = stop_ids.const_data_ptr<std::int32_t>();
  args.stops = stop_ids.size(1);
  if (args.rows > 0) cuda::sample_argmax(args, best.get_device_index(), current_stream(best));
}
#endif

}  // namespace minserve
