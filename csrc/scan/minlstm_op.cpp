// minLSTM's operators: scan, step, training scan and its backward.
#include "gated.h"
#include "../core/operators.h"

namespace minserve {

namespace {
Gated cell(bool linear_candidate, bool normalize_gates) {
  return {Recurrence::minlstm, 3, "[tokens, 3 * channels]", linear_candidate, normalize_gates};
}
}  // namespace

Tensor minlstm_scan(const Tensor& pre, const Tensor& cu_seqlens, const Tensor& state,
                    const Tensor& slots, bool linear_candidate, bool normalize_gates) {
  return gated_scan("minlstm_scan", cell(linear_candidate, normalize_gates), pre, cu_seqlens, state,
                    slots);
}

Tensor minlstm_step(const Tensor& pre, const Tensor& state, const Tensor& slots,
                    bool linear_candidate, bool normalize_gates) {
  return gated_step("minlstm_step", cell(linear_candidate, normalize_gates), pre, state, slots);
}

std::tuple<Tensor, Tensor> minlstm_scan_train(const Tensor& pre, const Tensor& cu_seqlens,
                                              const MaybeTensor& h0, bool linear_candidate,
                                              bool normalize_gates) {
  return gated_train("minlstm_scan_train", cell(linear_candidate, normalize_gates), pre, cu_seqlens,
                     h0);
}

std::tuple<Tensor, Tensor> minlstm_scan_train_backward(
    const Tensor& grad_h, const MaybeTensor& grad_h_last, const Tensor& pre, const Tensor& h,
    const Tensor& cu_seqlens, const MaybeTensor& h0, bool linear_candidate, bool normalize_gates) {
  return gated_train_backward("minlstm_scan_train_backward",
                              cell(linear_candidate, normalize_gates), grad_h, grad_h_last, pre, h,
                              cu_seqlens, h0);
}

}  // namespace minserve
