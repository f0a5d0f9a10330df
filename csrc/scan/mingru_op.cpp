// minGRU's operators: scan, step, training scan and its backward.
#include "gated.h"
#include "../core/operators.h"

namespace minserve {

namespace {
Gated cell(bool linear_candidate) {
  return {Recurrence::mingru, 2, "[tokens, 2 * channels]", linear_candidate, true};
}
}  // namespace

Tensor mingru_scan(const Tensor& pre, const Tensor& cu_seqlens, const Tensor& state,
                   const Tensor& slots, bool linear_candidate) {
  return gated_scan("mingru_scan", cell(linear_candidate), pre, cu_seqlens, state, slots);
}

Tensor mingru_step(const Tensor& pre, const Tensor& state, const Tensor& slots,
                   bool linear_candidate) {
  return gated_step("mingru_step", cell(linear_candidate), pre, state, slots);
}

std::tuple<Tensor, Tensor> mingru_scan_train(const Tensor& pre, const Tensor& cu_seqlens,
                                             const MaybeTensor& h0, bool linear_candidate) {
  return gated_train("mingru_scan_train", cell(linear_candidate), pre, cu_seqlens, h0);
}

std::tuple<Tensor, Tensor> mingru_scan_train_backward(
    const Tensor& grad_h, const MaybeTensor& grad_h_last, const Tensor& pre, const Tensor& h,
    const Tensor& cu_seqlens, const MaybeTensor& h0, bool linear_candidate) {
  return gated_train_backward("mingru_scan_train_backward", cell(linear_candidate), grad_h,
                              grad_h_last, pre, h, cu_seqlens, h0);
}

}  // namespace minserve
