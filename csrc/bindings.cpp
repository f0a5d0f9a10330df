// Every schema of the library, with one line each, and the functions behind them.
// One function serves CPU and CUDA: it looks at its arguments' device (core/tensor_checks.cpp).
#include "core/cpu_isa.h"
#include "core/operators.h"

#ifndef MINSERVE_CUDA_ARCHS
#define MINSERVE_CUDA_ARCHS ""
#endif

namespace {

std::string cuda_archs() {
  return MINSERVE_CUDA_ARCHS;
}
std::string cpu_isa() {
  return minserve::cpu_isa();
}
int64_t scan_chunk() {
  return minserve::kScanChunk;
}

void implement(torch::stable::detail::StableLibrary& m) {
  m.impl("linear_scan", TORCH_BOX(&minserve::linear_scan));
  m.impl("linear_scan_backward", TORCH_BOX(&minserve::linear_scan_backward));
  m.impl("mingru_scan", TORCH_BOX(&minserve::mingru_scan));
  m.impl("mingru_step", TORCH_BOX(&minserve::mingru_step));
  m.impl("mingru_scan_train", TORCH_BOX(&minserve::mingru_scan_train));
  m.impl("mingru_scan_train_backward", TORCH_BOX(&minserve::mingru_scan_train_backward));
  m.impl("minlstm_scan", TORCH_BOX(&minserve::minlstm_scan));
  m.impl("minlstm_step", TORCH_BOX(&minserve::minlstm_step));
  m.impl("minlstm_scan_train", TORCH_BOX(&minserve::minlstm_scan_train));
  m.impl("minlstm_scan_train_backward", TORCH_BOX(&minserve::minlstm_scan_train_backward));
  m.impl("hgrn_scan", TORCH_BOX(&minserve::hgrn_scan));
  m.impl("hgrn_step", TORCH_BOX(&minserve::hgrn_step));
  m.impl("conv_scan", TORCH_BOX(&minserve::conv_scan));
  m.impl("conv_step", TORCH_BOX(&minserve::conv_step));
  m.impl("selective_scan", TORCH_BOX(&minserve::selective_scan));
  m.impl("selective_step", TORCH_BOX(&minserve::selective_step));
  m.impl("ssd_scan", TORCH_BOX(&minserve::ssd_scan));
  m.impl("ssd_step", TORCH_BOX(&minserve::ssd_step));
  m.impl("sru_scan", TORCH_BOX(&minserve::sru_scan));
  m.impl("sru_step", TORCH_BOX(&minserve::sru_step));
  m.impl("sru_scan_train", TORCH_BOX(&minserve::sru_scan_train));
  m.impl("sru_scan_train_backward", TORCH_BOX(&minserve::sru_scan_train_backward));
  m.impl("gru_scan", TORCH_BOX(&minserve::gru_scan));
  m.impl("gru_step", TORCH_BOX(&minserve::gru_step));
  m.impl("lstm_scan", TORCH_BOX(&minserve::lstm_scan));
  m.impl("lstm_step", TORCH_BOX(&minserve::lstm_step));
  m.impl("adjust_", TORCH_BOX(&minserve::adjust_));
  m.impl("draw_", TORCH_BOX(&minserve::draw_));
  m.impl("target_logprobs", TORCH_BOX(&minserve::target_logprobs));
  m.impl("report_logprobs_", TORCH_BOX(&minserve::report_logprobs_));
  m.impl("copy_words_", TORCH_BOX(&minserve::copy_words_));
}

}  // namespace

STABLE_TORCH_LIBRARY(minserve, m) {
  // h_t = a_t h_{t-1} + b_t over [batch, time, channels]
  m.def("linear_scan(Tensor a, Tensor b, Tensor? h0=None, bool reverse=False) -> Tensor");
  // its gradients: of a, of b and of h0 (the last in the accumulation type)
  m.def(
      "linear_scan_backward(Tensor grad_h, Tensor a, Tensor h, Tensor? h0, bool reverse) -> "
      "(Tensor grad_a, Tensor grad_b, Tensor grad_h0)");
  // minGRU over packed sequences; pre is [tokens, k | v]; state rows are read and overwritten
  m.def(
      "mingru_scan(Tensor pre, Tensor cu_seqlens, Tensor(a!) state, Tensor slots, "
      "bool linear_candidate=False) -> Tensor");
  // minLSTM over packed sequences; pre is [tokens, f | i | v]
  m.def(
      "minlstm_scan(Tensor pre, Tensor cu_seqlens, Tensor(a!) state, Tensor slots, "
      "bool linear_candidate=False, bool normalize_gates=True) -> Tensor");
  // one minGRU step for each row of the batch
  m.def(
      "mingru_step(Tensor pre, Tensor(a!) state, Tensor slots, bool linear_candidate=False) -> "
      "Tensor");
  // one minLSTM step for each row of the batch
  m.def(
      "minlstm_step(Tensor pre, Tensor(a!) state, Tensor slots, bool linear_candidate=False, "
      "bool normalize_gates=True) -> Tensor");
  // HGRN over packed sequences; pre is [tokens, i | f | g], of which g is not read
  m.def(
      "hgrn_scan(Tensor pre, Tensor cu_seqlens, Tensor(a!) state, Tensor slots, "
      "Tensor? lower_bound=None) -> Tensor");
  // one HGRN step for each row of the batch
  m.def(
      "hgrn_step(Tensor pre, Tensor(a!) state, Tensor slots, Tensor? lower_bound=None) -> Tensor");
  // causal depthwise convolution over packed sequences, or SiLU of it; state holds the last taps -
  // 1 inputs
  m.def(
      "conv_scan(Tensor x, Tensor weight, Tensor? bias, Tensor cu_seqlens, Tensor(a!) state, "
      "Tensor slots, bool silu=False) -> Tensor");
  // one convolution step for each row of the batch
  m.def(
      "conv_step(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) state, Tensor slots, "
      "bool silu=False) -> Tensor");
  // Mamba's recurrence over packed sequences: time steps dt before bias and softplus, states of
  // channels [num_slots, channels, states], gate z before silu
  m.def(
      "selective_scan(Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor D, Tensor dt_bias, "
      "Tensor? z, Tensor cu_seqlens, Tensor(a!) state, Tensor slots) -> Tensor");
  // one such step for each row of the batch
  m.def(
      "selective_step(Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor D, Tensor dt_bias, "
      "Tensor? z, Tensor(a!) state, Tensor slots) -> Tensor");
  // selective_step of time steps that it projects itself, on CUDA: selection [batch, dt | B | C],
  // each part divided by its RMS with this epsilon; dt_weight [rank / 8, channels, 8]
  m.def(
      "selected_step(Tensor x, Tensor selection, Tensor dt_weight, Tensor A, Tensor D, "
      "Tensor dt_bias, Tensor? z, Tensor(a!) state, Tensor slots, float? norm_eps=None) -> Tensor");
  // Mamba-2's recurrence over packed sequences: time steps dt before bias, softplus and
  // the limits [least, largest]; states of heads [num_slots, heads, head_dim, states]
  m.def(
      "ssd_scan(Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor D, Tensor dt_bias, "
      "float[] dt_limit, Tensor cu_seqlens, Tensor(a!) state, Tensor slots) -> Tensor");
  // one such step for each row of the batch
  m.def(
      "ssd_step(Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor D, Tensor dt_bias, "
      "float[] dt_limit, Tensor(a!) state, Tensor slots) -> Tensor");
  // the simple recurrent unit over packed sequences; u is [tokens, u0 | u1 | u2], and a fourth part
  // or x is the highway's input; weight_c and bias are fp32 [forget | reset]; state is c
  m.def(
      "sru_scan(Tensor u, Tensor? x, Tensor? weight_c, Tensor bias, Tensor cu_seqlens, "
      "Tensor(a!) state, Tensor slots, float scale_x=1.0, bool tanh=False) -> Tensor");
  // one such step for each row of the batch
  m.def(
      "sru_step(Tensor u, Tensor? x, Tensor? weight_c, Tensor bias, Tensor(a!) state, "
      "Tensor slots, float scale_x=1.0, bool tanh=False) -> Tensor");
  // functional and differentiable; c is that of every token, fp32
  m.def(
      "sru_scan_train(Tensor u, Tensor? x, Tensor? weight_c, Tensor bias, Tensor cu_seqlens, "
      "Tensor? c0=None, float scale_x=1.0, bool tanh=False) -> "
      "(Tensor h, Tensor c, Tensor c_last)");
  // its gradients: of u, of x (empty without one), of c0, and of weight_c and bias of each sequence
  // [4, sequences, channels]
  m.def(
      "sru_scan_train_backward(Tensor grad_h, Tensor? grad_c_last, Tensor u, Tensor? x, "
      "Tensor? weight_c, Tensor bias, Tensor cu_seqlens, Tensor c, Tensor? c0, float scale_x, "
      "bool tanh) -> (Tensor grad_u, Tensor grad_x, Tensor grad_c0, Tensor grad_vectors)");
  // torch.nn's GRU over packed sequences: pre is W x + b [tokens, r | z | n], weight U, bias c;
  // rows of hidden [num_slots, units] are read and overwritten
  m.def(
      "gru_scan(Tensor pre, Tensor weight, Tensor? bias, Tensor cu_seqlens, Tensor(a!) hidden, "
      "Tensor slots) -> Tensor");
  // one such step for each row of the batch, recurrent being U h + c
  m.def("gru_step(Tensor pre, Tensor recurrent, Tensor(a!) hidden, Tensor slots) -> Tensor");
  // torch.nn's LSTM likewise; pre is [tokens, i | f | g | o]
  m.def(
      "lstm_scan(Tensor pre, Tensor weight, Tensor? bias, Tensor cu_seqlens, Tensor(a!) hidden, "
      "Tensor(b!) cell, Tensor slots) -> Tensor");
  m.def(
      "lstm_step(Tensor pre, Tensor recurrent, Tensor(a!) hidden, Tensor(b!) cell, Tensor slots) "
      "-> Tensor");
  // masks of rows, and penalties, biases and bans of their slots, laid on logits; the token that a
  // row has read is counted
  m.def(
      "adjust_(Tensor(a!) logits, Tensor tokens, Tensor slots, Tensor positions, Tensor records, "
      "Tensor? masks=None, Tensor? mask_of=None) -> ()");
  // draws a token for each row of logits, writes it to out and moves the row on
  m.def(
      "draw_(Tensor logits, Tensor(a!) tokens, Tensor(b!) slots, Tensor(c!) positions, "
      "Tensor(d!) remaining, Tensor(e!) cursor, Tensor(f!) out, Tensor temperature, Tensor top_k, "
      "Tensor top_p, Tensor min_p, Tensor streams, Tensor stop_ids) -> ()");
  // log-softmax at one given token of each row and at the best ones -> reports [rows, words]
  m.def("target_logprobs(Tensor logits, Tensor targets, int top=0) -> Tensor");
  // the same of the tokens that draw_ has just written to out, for rows that ask for it
  m.def(
      "report_logprobs_(Tensor logits, Tensor tops, Tensor cursor, Tensor out, Tensor(a!) told, "
      "Tensor(b!) reports) -> ()");
  // to = source, of which some become 0 then; either may be pinned memory of the host
  m.def("copy_words_(Tensor(a!) to, Tensor(b!) source, int first_zero=0, int zeros=0) -> ()");
  // minGRU over packed sequences, functional and differentiable
  m.def(
      "mingru_scan_train(Tensor pre, Tensor cu_seqlens, Tensor? h0=None, bool "
      "linear_candidate=False) -> "
      "(Tensor h, Tensor h_last)");
  // its gradients: of pre and of h0 (the last in the accumulation type)
  m.def(
      "mingru_scan_train_backward(Tensor grad_h, Tensor? grad_h_last, Tensor pre, Tensor h, Tensor "
      "cu_seqlens, "
      "Tensor? h0, bool linear_candidate) -> (Tensor grad_pre, Tensor grad_h0)");
  // minLSTM over packed sequences, functional and differentiable
  m.def(
      "minlstm_scan_train(Tensor pre, Tensor cu_seqlens, Tensor? h0=None, bool "
      "linear_candidate=False, "
      "bool normalize_gates=True) -> (Tensor h, Tensor h_last)");
  // its gradients: of pre and of h0 (the last in the accumulation type)
  m.def(
      "minlstm_scan_train_backward(Tensor grad_h, Tensor? grad_h_last, Tensor pre, Tensor h, "
      "Tensor cu_seqlens, "
      "Tensor? h0, bool linear_candidate, bool normalize_gates) -> (Tensor grad_pre, Tensor "
      "grad_h0)");
  // a whole packed language model on the CPU: one token of every row -> logits [batch, vocab]
  m.def(
      "lm_step(Tensor tokens, Tensor slots, Tensor weights, Tensor plan, Tensor(a!) cell, "
      "Tensor(b!)? conv, Tensor(c!)? i_conv=None, Tensor(d!)? f_conv=None, "
      "Tensor(e!)? memory=None) -> Tensor");
  // packed prompts -> hidden states after the final norm [tokens, d_model]
  m.def(
      "lm_prefill(Tensor tokens, Tensor cu_seqlens, Tensor slots, Tensor weights, Tensor plan, "
      "Tensor(a!) cell, Tensor(b!)? conv, Tensor(c!)? i_conv=None, Tensor(d!)? f_conv=None, "
      "Tensor(e!)? memory=None) -> Tensor");
  // such hidden states -> logits [n, vocab]
  m.def("lm_logits(Tensor hidden, Tensor weights, Tensor plan) -> Tensor");
  // Linear maps on Hopper (there alone) with their neighbours folded in. x is the residual stream
  // times the norm's weight, squares the sums of squares [inputs / 64, tokens] that its RMS norm
  // divides by. W x (+ bias), its exact GELU, or in fp32. fixed_order: sums in an order that
  // follows from the weight's shape alone
  m.def(
      "linear_map(Tensor x, Tensor? squares, float eps, Tensor weight, Tensor? bias=None, "
      "bool gelu=False, bool logits=False, bool fixed_order=False) -> Tensor");
  // silu(gate) * up, of weight's rows gate | up
  m.def(
      "linear_swiglu(Tensor x, Tensor? squares, float eps, Tensor weight, Tensor? bias=None, "
      "bool fixed_order=False) -> Tensor");
  // of the logits that linear_map has in a fixed order, the best of each 256; rows of weight beyond
  // the vocabulary are left out
  m.def(
      "linear_best(Tensor x, Tensor? squares, float eps, Tensor weight, Tensor? bias, "
      "int vocabulary) -> Tensor");
  // draws the best token of each row as draw_ does, from these
  m.def(
      "draw_best_(Tensor best, Tensor(a!) tokens, Tensor(b!) slots, Tensor(c!) positions, "
      "Tensor(d!) remaining, Tensor(e!) cursor, Tensor(f!) out, Tensor stop_ids) -> ()");
  // gates of a cell and its step; state rows are read and overwritten. Of a cell with an output
  // gate out is h * silu(gate), and squares has the sums of squares of h, else nothing
  m.def(
      "linear_step(Tensor x, Tensor? squares, float eps, Tensor weight, Tensor? bias, "
      "Tensor(a!) state, Tensor slots, str cell, bool linear_candidate=False, "
      "bool normalize_gates=True, bool fixed_order=False, Tensor? lower_bound=None) -> "
      "(Tensor out, Tensor squares)");
  // W x (/ norm) (+ bias), of which channels from `first` on pass one step of a causal convolution
  // and SiLU to `convolved`; the others are in out. Up to 64 rows
  m.def(
      "linear_convolve(Tensor x, Tensor? squares, float eps, Tensor weight, Tensor? bias, "
      "Tensor filter, Tensor? filter_bias, Tensor(a!) state, Tensor slots, int first=0) -> "
      "(Tensor out, Tensor convolved)");
  // x += W y (/ the norm that y_squares gives) (+ bias); x times the next norm's weight, empty
  // without; sums of squares of x, empty without this weight unless asked for; then x += ahead
  m.def(
      "linear_residual_(Tensor y, Tensor weight, Tensor? bias, Tensor(a!) x, Tensor? norm_weight, "
      "bool fixed_order=False, Tensor? ahead=None, bool squares=False, Tensor? y_squares=None, "
      "float eps=0.0) -> "
      "(Tensor scaled, Tensor squares)");
  // rows of an embedding table: x, and for the first norm as linear_residual_
  m.def(
      "linear_embed(Tensor tokens, Tensor table, Tensor? norm_weight, bool squares=False) -> "
      "(Tensor x, Tensor scaled, Tensor squares)");
  // x / norm * weight, on CUDA
  m.def("rms_norm(Tensor x, float eps, Tensor weight) -> Tensor");
  // What stands between products of the library, on CUDA: y is W x, x the residual stream itself,
  // whose RMS norm divides here. y = GELU(y / norm + bias); x += ahead
  m.def(
      "normed_gelu_(Tensor(a!) x, float eps, Tensor(b!) y, Tensor? bias=None, "
      "Tensor? ahead=None) -> ()");
  // a cell's step from y / norm + bias; state rows are read and overwritten
  m.def(
      "normed_step_(Tensor(a!) x, float eps, Tensor y, Tensor? bias, Tensor? ahead, "
      "Tensor(b!) state, Tensor slots, str cell, bool linear_candidate=False, "
      "bool normalize_gates=True, Tensor? lower_bound=None, Tensor? norm_weight=None) -> Tensor");
  // gate | up = y / norm + bias -> silu(gate) * up
  m.def(
      "normed_swiglu_(Tensor(a!) x, float eps, Tensor y, Tensor? bias=None, Tensor? ahead=None) -> "
      "Tensor");
  // x += y, then x / norm * weight in bfloat16; x is float32 or bfloat16
  m.def("added_rms_norm_(Tensor(a!) x, Tensor? y, float eps, Tensor weight) -> Tensor");
  // h / norm(h) * weight * silu(gate), by groups of channels, or g / norm(g) * weight with
  // g = h * silu(gate); rows of gate may lie apart
  m.def(
      "gated_rms_norm(Tensor h, Tensor gate, Tensor? weight, float eps, int groups=1, "
      "bool gate_first=False) -> Tensor");
  // y [rows, gate | up] -> silu(gate) * up
  m.def("swiglu(Tensor y) -> Tensor");
  // Ways in which the library of torch can compute out = x weight^T, each a row: [n, 8] on the CPU
  m.def("product_algorithms(Tensor x, Tensor weight, Tensor out) -> Tensor");
  // out = x weight^T, or out += it, in one of these ways
  m.def(
      "product_(Tensor(a!) out, Tensor x, Tensor weight, Tensor algorithm, bool add=False) -> ()");
  // TMA's description of a weight, to 128 bytes on the CPU
  m.def("whole_step_map(Tensor weight, Tensor(a!) map) -> ()");
  // one token of a few sequences through a whole model in one kernel, on Hopper alone -> logits
  // [batch, vocabulary]. plan says which of the weights each phase has, and maps has their
  // descriptions; plan, exchange and ended are those of engine/ops/persistent_decode.py
  m.def(
      "whole_step(Tensor tokens, Tensor slots, Tensor[] weights, Tensor maps, Tensor plan, "
      "Tensor(a!) cell, Tensor(b!)? conv, Tensor(c!) exchange, Tensor(d!) ended, int weight_type, "
      "str kind, float eps, bool linear_candidate=False, bool normalize_gates=True, "
      "bool fixed_order=False) -> Tensor");
  // rows that a batch of such a plan may have on a GPU of so many multiprocessors; 0: the kernel
  // does not take it, and why; bytes of `exchange` for every eight rows
  m.def(
      "whole_step_most_rows(Tensor plan, int weight_type, str cell, bool fixed_order, "
      "int multiprocessors) -> (int rows, str refusal, int exchange_bytes)");
  // the same of up to about a hundred sequences and a small model: packed as
  // engine/ops/cluster_decode.py packs weights, plan says which of the vectors each layer has.
  // Without a head (vocabulary 0, norm the last one's weight) -> hidden states [batch, width]
  m.def(
      "cluster_step(Tensor tokens, Tensor slots, Tensor packed, Tensor table, Tensor? head_bias, "
      "Tensor? norm, Tensor[] vectors, Tensor plan, Tensor(a!) cell, Tensor(b!)? conv, int hidden, "
      "int vocabulary, str kind, float eps, bool linear_candidate=False, "
      "bool normalize_gates=True) -> Tensor");
  // why the kernel takes no model of such a shape; "": it does
  m.def("cluster_step_refusal(int layers, int width, int inner, int hidden, int taps) -> str");
  // with fixed_order, weights of more rows than this have their inputs summed in one part
  m.def("linear_one_part_rows() -> int");
  // a cell's number in plans of packed models, and how many pre-activations a channel has
  m.def("cell_traits(str cell) -> (int kind, int preactivations)");
  // time steps per chunk: splitting a sequence at multiples of it changes no bit
  m.def("scan_chunk() -> int");
  // GPU architectures compiled in, "" for a CPU-only build
  m.def("cuda_archs() -> str");
  // instruction set in use on this CPU
  m.def("cpu_isa() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(minserve, CPU, m) {
  implement(m);
  m.impl("lm_step", TORCH_BOX(&minserve::lm_step));
  m.impl("lm_prefill", TORCH_BOX(&minserve::lm_prefill));
  m.impl("lm_logits", TORCH_BOX(&minserve::lm_logits));
  m.impl("whole_step_most_rows", TORCH_BOX(&minserve::persistent_decode_most_rows));
}
STABLE_TORCH_LIBRARY_IMPL(minserve, CUDA, m) {
  implement(m);
#ifdef MINSERVE_CUDA
  m.impl("selected_step", TORCH_BOX(&minserve::selected_step));
  m.impl("linear_map", TORCH_BOX(&minserve::linear_map));
  m.impl("linear_swiglu", TORCH_BOX(&minserve::linear_swiglu));
  m.impl("linear_best", TORCH_BOX(&minserve::linear_best));
  m.impl("draw_best_", TORCH_BOX(&minserve::draw_best));
  m.impl("linear_step", TORCH_BOX(&minserve::linear_step));
  m.impl("linear_convolve", TORCH_BOX(&minserve::linear_convolve));
  m.impl("linear_residual_", TORCH_BOX(&minserve::linear_residual));
  m.impl("linear_embed", TORCH_BOX(&minserve::linear_embed));
  m.impl("rms_norm", TORCH_BOX(&minserve::rms_norm));
  m.impl("normed_gelu_", TORCH_BOX(&minserve::normed_gelu));
  m.impl("normed_swiglu_", TORCH_BOX(&minserve::normed_swiglu));
  m.impl("added_rms_norm_", TORCH_BOX(&minserve::added_rms_norm));
  m.impl("gated_rms_norm", TORCH_BOX(&minserve::gated_rms_norm));
  m.impl("swiglu", TORCH_BOX(&minserve::swiglu));
  m.impl("normed_step_", TORCH_BOX(&minserve::normed_step));
  m.impl("product_algorithms", TORCH_BOX(&minserve::product_algorithms));
  m.impl("product_", TORCH_BOX(&minserve::product));
  m.impl("whole_step_map", TORCH_BOX(&minserve::persistent_decode_map));
  m.impl("whole_step", TORCH_BOX(&minserve::persistent_decode));
  m.impl("cluster_step", TORCH_BOX(&minserve::cluster_decode));
#endif
}
STABLE_TORCH_LIBRARY_IMPL(minserve, CompositeExplicitAutograd, m) {
  m.impl("cell_traits", TORCH_BOX(&minserve::cell_traits));
  m.impl("scan_chunk", TORCH_BOX(&scan_chunk));
  m.impl("cuda_archs", TORCH_BOX(&cuda_archs));
  m.impl("cpu_isa", TORCH_BOX(&cpu_isa));
  m.impl("cluster_step_refusal", TORCH_BOX(&minserve::cluster_decode_refusal));
  m.impl("linear_one_part_rows", TORCH_BOX(&minserve::linear_one_part_rows));
}
