// The whole language model as operators on the CPU: a step, a prefill, logits.
#include <algorithm>

#include "../core/cpu_isa.h"
#include "../core/operators.h"
#include "../cpu_product/run_in_team.h"
#include "../gated_rnn/runs.h"
#include "plan_check.h"

namespace minserve {

namespace {

// One call: the model, the tensors that every part shares, and the memory between its phases.
class Call {
 public:
  Call(const Check& check, const Tensor& weights, const Tensor& plan, const Tensor& like,
       std::int64_t rows)
      : check_(check), model_(read_plan(check, weights, plan)), like_(like) {
    work.plan = &model_.plan;
    work.layers = model_.layers.data();
    work.rows = rows;
    threads_ = threads_worth(model_.weight_bytes, rows);
  }
  const Plan& plan() const { return model_.plan; }

  // Floats, for this call.
  float* floats(std::int64_t count) {
    kept_.push_back(
        torch::stable::new_empty(like_, {std::max<std::int64_t>(1, count)}, ScalarType::Float));
    return static_cast<float*>(kept_.back().mutable_data_ptr());
  }
  void use_tokens(const Tensor& tokens) {
    work.tokens = tokens.const_data_ptr();
    work.long_tokens = tokens.scalar_type() == ScalarType::Long;
  }
  void use_buffers() {
    const Plan& p = plan();
    const std::int64_t element = MS_BY_PRODUCT_ISA(fed_bytes)(p.half), rows = work.rows;
    const auto bytes = [&](std::int64_t width) { return rows * fed_row_bytes(width, element); };
    const std::int64_t own = threads_ * kOwnRows * fed_row_bytes(p.width, element);
    const std::int64_t widest = std::max(p.width, p.embedding_width);
    work.buffers.x = floats(rows * p.embedding_width);
    char* at = reinterpret_cast<char*>(
        floats((bytes(widest) + bytes(p.inner) + bytes(p.hidden) + own) / 4));
    work.buffers.fed = at;
    work.buffers.h = at += bytes(widest);
    work.buffers.mlp = at += bytes(p.inner);
    work.buffers.own = at + bytes(p.hidden);
    if (p.rnn_gates > 0 && work.tokens) {
      work.buffers.pre = floats(rows * p.rnn_gates * up_to(p.inner, kPanel));
      work.buffers.carried = reinterpret_cast<char*>(
          floats(p.layers * 2 * work.run_count * fed_row_bytes(p.inner, element) / 4));
    }
    if (p.states > 0) work.buffers.gate = floats(rows * up_to(p.inner, kPanel));
    if (p.heads > 0) {
      work.buffers.ssd = floats(rows * ssd_columns(p));
      work.buffers.own_h = reinterpret_cast<char*>(
          floats(threads_ * kOwnRows * fed_row_bytes(p.inner, element) / 4));
    } else if (p.states > 0) {
      work.buffers.selection = floats(rows * up_to(p.rank + 2 * p.states, kPanel));
      const std::int64_t selected = selected_row_bytes(p, element) / 4;
      work.buffers.selected = reinterpret_cast<char*>(floats(rows * selected));
      work.buffers.own_selected = reinterpret_cast<char*>(floats(threads_ * kOwnRows * selected));
      if (work.half_cell) {
        work.buffers.own_states = floats(threads_ * kMostPanels * kPanel * p.states);
      }
    }
    if (model_.layers[0].output_norm) {
      work.buffers.squares = floats(rows * up_to(p.inner, kPanel) / kPanel);
      work.buffers.scales = floats(threads_ * rows);
    }
  }
  // The sequences of a layout with all of which is said of them, for GRU and LSTM.
  void use_runs() {
    if (plan().rnn_gates == 0) return;
    if (work.layout.cu_seqlens) {
      runs_ = gated_runs(work.layout);
    } else {
      for (std::int64_t row = 0; row < work.rows; ++row) {
        runs_.runs.push_back({row, 1, work.layout.slot(row)});
      }
    }
    work.runs = runs_.runs.data();
    work.run_count = static_cast<std::int64_t>(runs_.runs.size());
    work.skipped = runs_.skipped.data();
    work.skipped_count = static_cast<std::int64_t>(runs_.skipped.size());
  }
  void use_state(const Tensor& cell, const MaybeTensor& conv, const MaybeTensor& i_conv,
                 const MaybeTensor& f_conv, const MaybeTensor& memory) {
    const Plan& p = plan();
    if (p.heads > 0) {
      work.half_cell = cell.scalar_type() == ScalarType::BFloat16;
      check_.tensor(cell, "cell", work.half_cell ? ScalarType::BFloat16 : ScalarType::Float,
                    {p.layers, -1, p.heads, p.head_dim, p.states},
                    "[layers, slots, heads, head_dim, states]");
      check_.require((p.states == 1 || cell.stride(4) == 1) &&
                         (p.head_dim == 1 || cell.stride(3) == p.states) &&
                         (p.heads == 1 || cell.stride(2) == p.head_dim * p.states),
                     "cell is changed in place, so its rows [heads, head_dim, states] must be "
                     "contiguous");
      work.ssd = MS_BY_ISA(ssd_kernel)(Dtype::f32);
    } else if (p.states > 0) {
      work.half_cell = cell.scalar_type() == ScalarType::BFloat16;
      check_.tensor(cell, "cell", work.half_cell ? ScalarType::BFloat16 : ScalarType::Float,
                    {p.layers, -1, p.inner, p.states}, "[layers, slots, inner, states]");
      check_.require(
          (p.states == 1 || cell.stride(3) == 1) && (p.inner == 1 || cell.stride(2) == p.states),
          "cell is changed in place, so its rows [inner, states] must be contiguous");
    } else {
      check_.tensor(cell, "cell", ScalarType::Float, {p.layers, -1, p.inner},
                    "[layers, slots, inner]");
      check_.require(p.inner == 1 || cell.stride(2) == 1,
                     "cell is changed in place, so its last dimension must be contiguous");
    }
    work.cell = cell.mutable_data_ptr();
    work.cell_layer = cell.stride(0);
    work.cell_slot = cell.stride(1);
    check_.require(memory.has_value() == (p.rnn_gates == kLstmGates),
                   "memory must be given for a model of LSTM layers, and only for one");
    if (memory) {
      check_.tensor(*memory, "memory", ScalarType::Float, {p.layers, cell.size(1), p.inner},
                    "[layers, slots, inner]");
      check_.require(p.inner == 1 || memory->stride(2) == 1,
                     "memory is changed in place, so its last dimension must be contiguous");
      work.memory = static_cast<float*>(memory->mutable_data_ptr());
      work.memory_layer = memory->stride(0);
      work.memory_slot = memory->stride(1);
    }
    if (p.states > 0) {
      work.gate_convs[0] =
          windows(conv, "conv", p.gate_taps, model_.layers[0].gate_convs[0].channels, cell.size(1));
      check_.require(!i_conv && !f_conv, "i_conv and f_conv must not be given for such a model");
      return;
    }
    work.conv = windows(conv, "conv", p.taps, p.width, cell.size(1));
    work.gate_convs[0] = windows(i_conv, "i_conv", p.gate_taps, p.inner, cell.size(1));
    work.gate_convs[1] = windows(f_conv, "f_conv", p.gate_taps, p.inner, cell.size(1));
  }

  void run() {
    const CpuModelFn run = MS_BY_PRODUCT_ISA(run_cpu_model);
    run_in_team(threads_, [&](ThreadTeam& team, std::int64_t thread) { run(work, team, thread); });
  }

  Work work;

 private:
  Windows windows(const MaybeTensor& given, const char* name, std::int64_t taps,
                  std::int64_t channels, std::int64_t slots) const {
    check_.require(given.has_value() == (taps > 0), name,
                   " must be given for a model with such convolutions, and only for one");
    if (!given) return {};
    check_.tensor(*given, name, ScalarType::Float, {plan().layers, slots, taps - 1, channels},
                  "[layers, slots, taps - 1, channels]");
    check_.require(channels == 1 || given->stride(3) == 1, name,
                   " is changed in place, so its last dimension must be contiguous");
    return {static_cast<float*>(given->mutable_data_ptr()), given->stride(0), given->stride(1),
            given->stride(2)};
  }

  const Check& check_;
  PackedModel model_;
  const Tensor& like_;
  std::int64_t threads_ = 1;
  std::vector<Tensor> kept_;
  GatedRuns runs_;
};

// Tokens of rows that are read must be in range: they index memory.
void check_tokens(const Check& check, const Tensor& tokens, std::int64_t vocab,
                  const std::int32_t* skipped_where_negative) {
  const bool wide = tokens.scalar_type() == ScalarType::Long;
  for (std::int64_t i = 0; i < tokens.size(0); ++i) {
    if (skipped_where_negative && skipped_where_negative[i] < 0) continue;
    const std::int64_t token = wide ? static_cast<const std::int64_t*>(tokens.const_data_ptr())[i]
                                    : static_cast<const std::int32_t*>(tokens.const_data_ptr())[i];
    check.require(token >= 0 && token < vocab, "tokens[", i, "] is ", token, "; allowed: 0 to ",
                  vocab - 1);
  }
}

void check_token_type(const Check& check, const Tensor& tokens, const char* shape) {
  check.require(tokens.dim() == 1 && (tokens.scalar_type() == ScalarType::Int ||
                                      tokens.scalar_type() == ScalarType::Long),
                "tokens must be int32 or int64 ", shape, ", got ", describe(tokens));
  check.require(tokens.is_cpu(), "tokens must be on the CPU, got ", describe(tokens));
}

}  // namespace

Tensor lm_step(const Tensor& tokens_given, const Tensor& slots_given, const Tensor& weights,
               const Tensor& plan, const Tensor& cell, const MaybeTensor& conv,
               const MaybeTensor& i_conv, const MaybeTensor& f_conv, const MaybeTensor& memory) {
  const Check check("lm_step", tokens_given, "tokens");
  check_token_type(check, tokens_given, "[batch]");
  const Tensor tokens = torch::stable::contiguous(tokens_given);
  const Tensor slots = torch::stable::contiguous(slots_given);
  const std::int64_t batch = tokens.size(0);
  Call call(check, weights, plan, tokens, batch);
  const Plan& p = call.plan();
  call.use_state(cell, conv, i_conv, f_conv, memory);
  Work& work = call.work;
  work.layout = step_layout(check, slots, cell.size(1), batch, p.inner);
  check_tokens(check, tokens, p.vocab, work.layout.slots);
  Tensor logits = torch::stable::new_empty(tokens, {batch, p.vocab}, ScalarType::Float);
  if (batch == 0) return logits;
  call.use_tokens(tokens);
  call.use_runs();
  call.use_buffers();
  work.logits = static_cast<float*>(logits.mutable_data_ptr());
  call.run();
  return logits;
}

Tensor lm_prefill(const Tensor& tokens_given, const Tensor& cu_given, const Tensor& slots_given,
                  const Tensor& weights, const Tensor& plan, const Tensor& cell,
                  const MaybeTensor& conv, const MaybeTensor& i_conv, const MaybeTensor& f_conv,
                  const MaybeTensor& memory) {
  const Check check("lm_prefill", tokens_given, "tokens");
  check_token_type(check, tokens_given, "[tokens]");
  const Tensor tokens = torch::stable::contiguous(tokens_given);
  const Tensor cu = torch::stable::contiguous(cu_given);
  const Tensor slots = torch::stable::contiguous(slots_given);
  const std::int64_t rows = tokens.size(0);
  Call call(check, weights, plan, tokens, rows);
  const Plan& p = call.plan();
  call.use_state(cell, conv, i_conv, f_conv, memory);
  Work& work = call.work;
  work.layout = packed_layout(check, cu, &slots, cell.size(1), rows, p.inner);
  check_tokens(check, tokens, p.vocab, nullptr);
  Tensor hidden = torch::stable::new_empty(tokens, {rows, p.width}, ScalarType::Float);
  if (rows == 0) return hidden;
  call.use_tokens(tokens);
  call.use_runs();
  call.use_buffers();
  work.normed = static_cast<float*>(hidden.mutable_data_ptr());
  call.run();
  return hidden;
}

Tensor lm_logits(const Tensor& hidden_given, const Tensor& weights, const Tensor& plan) {
  const Check check("lm_logits", hidden_given, "hidden");
  const Tensor hidden = torch::stable::contiguous(hidden_given);
  check.require(hidden.dim() == 2, "hidden must be [n, d_model], got ", describe(hidden));
  Call call(check, weights, plan, hidden, hidden.size(0));
  const Plan& p = call.plan();
  check.tensor(hidden, "hidden", ScalarType::Float, {-1, p.width}, "[n, d_model]");
  Tensor logits = torch::stable::new_empty(hidden, {hidden.size(0), p.vocab});
  if (hidden.size(0) == 0) return logits;
  call.use_buffers();
  call.work.hidden = static_cast<const float*>(hidden.const_data_ptr());
  call.work.logits = static_cast<float*>(logits.mutable_data_ptr());
  call.run();
  return logits;
}

}  // namespace minserve
