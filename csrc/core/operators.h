// The C++ functions behind the schemas of bindings.cpp.
#pragma once

#include <string>
#include <tuple>
#include <vector>

#include "cuda_stream.h"

namespace minserve {

Tensor linear_scan(const Tensor& a, const Tensor& b, const MaybeTensor& h0, bool reverse);
std::tuple<Tensor, Tensor, Tensor> linear_scan_backward(const Tensor& grad_h, const Tensor& a,
                                                        const Tensor& h, const MaybeTensor& h0,
                                                        bool reverse);

Tensor mingru_scan(const Tensor& pre, const Tensor& cu_seqlens, const Tensor& state,
                   const Tensor& slots, bool linear_candidate);
Tensor mingru_step(const Tensor& pre, const Tensor& state, const Tensor& slots,
                   bool linear_candidate);
std::tuple<Tensor, Tensor> mingru_scan_train(const Tensor& pre, const Tensor& cu_seqlens,
                                             const MaybeTensor& h0, bool linear_candidate);
std::tuple<Tensor, Tensor> mingru_scan_train_backward(const Tensor& grad_h,
                                                      const MaybeTensor& grad_h_last,
                                                      const Tensor& pre, const Tensor& h,
                                                      const Tensor& cu_seqlens,
                                                      const MaybeTensor& h0, bool linear_candidate);

Tensor minlstm_scan(const Tensor& pre, const Tensor& cu_seqlens, const Tensor& state,
                    const Tensor& slots, bool linear_candidate, bool normalize_gates);
Tensor minlstm_step(const Tensor& pre, const Tensor& state, const Tensor& slots,
                    bool linear_candidate, bool normalize_gates);
std::tuple<Tensor, Tensor> minlstm_scan_train(const Tensor& pre, const Tensor& cu_seqlens,
                                              const MaybeTensor& h0, bool linear_candidate,
                                              bool normalize_gates);
std::tuple<Tensor, Tensor> minlstm_scan_train_backward(
    const Tensor& grad_h, const MaybeTensor& grad_h_last, const Tensor& pre, const Tensor& h,
    const Tensor& cu_seqlens, const MaybeTensor& h0, bool linear_candidate, bool normalize_gates);

Tensor hgrn_scan(const Tensor& pre, const Tensor& cu_seqlens, const Tensor& state,
                 const Tensor& slots, const MaybeTensor& lower_bound);
Tensor hgrn_step(const Tensor& pre, const Tensor& state, const Tensor& slots,
                 const MaybeTensor& lower_bound);

Tensor conv_scan(const Tensor& x, const Tensor& weight, const MaybeTensor& bias,
                 const Tensor& cu_seqlens, const Tensor& state, const Tensor& slots, bool silu);
Tensor conv_step(const Tensor& x, const Tensor& weight, const MaybeTensor& bias,
                 const Tensor& state, const Tensor& slots, bool silu);

Tensor selective_scan(const Tensor& x, const Tensor& dt, const Tensor& A, const Tensor& B,
                      const Tensor& C, const Tensor& D, const Tensor& dt_bias, const MaybeTensor& z,
                      const Tensor& cu_seqlens, const Tensor& state, const Tensor& slots);
Tensor selective_step(const Tensor& x, const Tensor& dt, const Tensor& A, const Tensor& B,
                      const Tensor& C, const Tensor& D, const Tensor& dt_bias, const MaybeTensor& z,
                      const Tensor& state, const Tensor& slots);

Tensor ssd_scan(const Tensor& x, const Tensor& dt, const Tensor& A, const Tensor& B,
                const Tensor& C, const Tensor& D, const Tensor& dt_bias,
                const std::vector<double>& dt_limit, const Tensor& cu_seqlens, const Tensor& state,
                const Tensor& slots);
Tensor ssd_step(const Tensor& x, const Tensor& dt, const Tensor& A, const Tensor& B,
                const Tensor& C, const Tensor& D, const Tensor& dt_bias,
                const std::vector<double>& dt_limit, const Tensor& state, const Tensor& slots);

Tensor sru_scan(const Tensor& u, const MaybeTensor& x, const MaybeTensor& weight_c,
                const Tensor& bias, const Tensor& cu_seqlens, const Tensor& state,
                const Tensor& slots, double scale_x, bool tanh);
Tensor sru_step(const Tensor& u, const MaybeTensor& x, const MaybeTensor& weight_c,
                const Tensor& bias, const Tensor& state, const Tensor& slots, double scale_x,
                bool tanh);
std::tuple<Tensor, Tensor, Tensor> sru_scan_train(const Tensor& u, const MaybeTensor& x,
                                                  const MaybeTensor& weight_c, const Tensor& bias,
                                                  const Tensor& cu_seqlens, const MaybeTensor& c0,
                                                  double scale_x, bool tanh);
std::tuple<Tensor, Tensor, Tensor, Tensor> sru_scan_train_backward(
    const Tensor& grad_h, const MaybeTensor& grad_last, const Tensor& u, const MaybeTensor& x,
    const MaybeTensor& weight_c, const Tensor& bias, const Tensor& cu_seqlens, const Tensor& c,
    const MaybeTensor& c0, double scale_x, bool tanh);

Tensor gru_scan(const Tensor& pre, const Tensor& weight, const MaybeTensor& bias,
                const Tensor& cu_seqlens, const Tensor& hidden, const Tensor& slots);
Tensor gru_step(const Tensor& pre, const Tensor& recurrent, const Tensor& hidden,
                const Tensor& slots);
Tensor lstm_scan(const Tensor& pre, const Tensor& weight, const MaybeTensor& bias,
                 const Tensor& cu_seqlens, const Tensor& hidden, const Tensor& cell,
                 const Tensor& slots);
Tensor lstm_step(const Tensor& pre, const Tensor& recurrent, const Tensor& hidden,
                 const Tensor& cell, const Tensor& slots);

void adjust_(const Tensor& logits, const Tensor& tokens, const Tensor& slots,
             const Tensor& positions, const Tensor& records, const MaybeTensor& masks,
             const MaybeTensor& mask_of);
void draw_(const Tensor& logits, const Tensor& tokens, const Tensor& slots, const Tensor& positions,
           const Tensor& remaining, const Tensor& cursor, const Tensor& out,
           const Tensor& temperature, const Tensor& top_k, const Tensor& top_p, const Tensor& min_p,
           const Tensor& streams, const Tensor& stop_ids);
Tensor target_logprobs(const Tensor& logits, const Tensor& targets, std::int64_t top);
void report_logprobs_(const Tensor& logits, const Tensor& tops, const Tensor& cursor,
                      const Tensor& out, const Tensor& told, const Tensor& reports);
void copy_words_(const Tensor& to, const Tensor& source, std::int64_t first_zero,
                 std::int64_t zeros);
Tensor lm_step(const Tensor& tokens, const Tensor& slots, const Tensor& weights, const Tensor& plan,
               const Tensor& cell, const MaybeTensor& conv, const MaybeTensor& i_conv,
               const MaybeTensor& f_conv, const MaybeTensor& memory);
Tensor lm_prefill(const Tensor& tokens, const Tensor& cu_seqlens, const Tensor& slots,
                  const Tensor& weights, const Tensor& plan, const Tensor& cell,
                  const MaybeTensor& conv, const MaybeTensor& i_conv, const MaybeTensor& f_conv,
                  const MaybeTensor& memory);
Tensor lm_logits(const Tensor& hidden, const Tensor& weights, const Tensor& plan);

std::tuple<std::int64_t, std::int64_t> cell_traits(const std::string& cell);

// Of the kernels for Hopper, what every build knows: which models they take.
std::int64_t linear_one_part_rows();
std::tuple<std::int64_t, std::string, std::int64_t> persistent_decode_most_rows(
    const Tensor& plan, std::int64_t weight_type, const std::string& cell, bool batch_invariant,
    std::int64_t multiprocessors);
std::string cluster_decode_refusal(std::int64_t layers, std::int64_t width, std::int64_t inner,
                                   std::int64_t hidden, std::int64_t taps);

#ifdef MINSERVE_CUDA
Tensor selected_step(const Tensor& x, const Tensor& selection, const Tensor& dt_weight,
                     const Tensor& A, const Tensor& D, const Tensor& dt_bias, const MaybeTensor& z,
                     const Tensor& state, const Tensor& slots, std::optional<double> norm_eps);
Tensor linear_map(const Tensor& x, const MaybeTensor& squares, double eps, const Tensor& weight,
                  const MaybeTensor& bias, bool gelu, bool logits, bool batch_invariant);
Tensor linear_best(const Tensor& x, const MaybeTensor& squares, double eps, const Tensor& weight,
                   const MaybeTensor& bias, std::int64_t vocabulary);
void draw_best(const Tensor& best, const Tensor& tokens, const Tensor& slots,
               const Tensor& positions, const Tensor& remaining, const Tensor& cursor,
               const Tensor& out, const Tensor& stop_ids);
Tensor linear_swiglu(const Tensor& x, const MaybeTensor& squares, double eps, const Tensor& weight,
                     const MaybeTensor& bias, bool batch_invariant);
std::tuple<Tensor, Tensor> linear_step(const Tensor& x, const MaybeTensor& squares, double eps,
                                       const Tensor& weight, const MaybeTensor& bias,
                                       const Tensor& state, const Tensor& slots,
                                       const std::string& cell, bool linear_candidate,
                                       bool normalize_gates, bool batch_invariant,
                                       const MaybeTensor& lower_bound);
std::tuple<Tensor, Tensor> linear_convolve(const Tensor& x, const MaybeTensor& squares, double eps,
                                           const Tensor& weight, const MaybeTensor& bias,
                                           const Tensor& filter, const MaybeTensor& filter_bias,
                                           const Tensor& state, const Tensor& slots,
                                           std::int64_t first);
std::tuple<Tensor, Tensor> linear_residual(const Tensor& y, const Tensor& weight,
                                           const MaybeTensor& bias, const Tensor& x,
                                           const MaybeTensor& norm_weight, bool batch_invariant,
                                           const MaybeTensor& ahead, bool squares,
                                           const MaybeTensor& y_squares, double eps);
std::tuple<Tensor, Tensor, Tensor> linear_embed(const Tensor& tokens, const Tensor& table,
                                                const MaybeTensor& norm_weight, bool squares);
Tensor rms_norm(const Tensor& x, double eps, const Tensor& weight);
void normed_gelu(const Tensor& x, double eps, const Tensor& y, const MaybeTensor& bias,
                 const MaybeTensor& ahead);
Tensor normed_step(const Tensor& x, double eps, const Tensor& y, const MaybeTensor& bias,
                   const MaybeTensor& ahead, const Tensor& state, const Tensor& slots,
                   const std::string& cell, bool linear_candidate, bool normalize_gates,
                   const MaybeTensor& lower_bound, const MaybeTensor& norm_weight);
Tensor normed_swiglu(const Tensor& x, double eps, const Tensor& y, const MaybeTensor& bias,
                     const MaybeTensor& ahead);
Tensor added_rms_norm(const Tensor& x, const MaybeTensor& y, double eps, const Tensor& weight);
Tensor gated_rms_norm(const Tensor& h, const Tensor& gate, const MaybeTensor& weight, double eps,
                      std::int64_t groups, bool gate_first);
Tensor swiglu(const Tensor& y);
Tensor product_algorithms(const Tensor& x, const Tensor& weight, const Tensor& out);
void product(const Tensor& out, const Tensor& x, const Tensor& weight, const Tensor& algorithm,
             bool add);
void persistent_decode_map(const Tensor& weight, const Tensor& map);
Tensor persistent_decode(const Tensor& tokens, const Tensor& slots,
                         const std::vector<Tensor>& tensors, const Tensor& maps, const Tensor& plan,
                         const Tensor& cell, const MaybeTensor& conv, const Tensor& exchange,
                         const Tensor& ended, std::int64_t weight_type, const std::string& kind,
                         double eps, bool linear_candidate, bool normalize_gates,
                         bool batch_invariant);
Tensor cluster_decode(const Tensor& tokens, const Tensor& slots, const Tensor& weights,
                      const Tensor& table, const MaybeTensor& head_bias, const MaybeTensor& norm,
                      const std::vector<Tensor>& tensors, const Tensor& plan, const Tensor& cell,
                      const MaybeTensor& conv, std::int64_t hidden, std::int64_t vocabulary,
                      const std::string& kind, double eps, bool linear_candidate,
                      bool normalize_gates);
#endif

}  // namespace minserve
