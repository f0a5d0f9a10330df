// What minGRU and minLSTM share on the host: both map pre [tokens, gates * channels] to h [tokens,
// channels] and differ in the number of gates, the recurrence and its options.
#pragma once

#include "launch.h"

namespace minserve {

struct Gated {
  Recurrence recurrence;
  std::int64_t gates;
  const char* pre_shape;  // for messages: "[tokens, 2 * channels]"
  bool linear_candidate;
  bool normalize_gates;
};

Tensor gated_scan(const char* op, const Gated& cell, const Tensor& pre, const Tensor& cu_seqlens,
                  const Tensor& state, const Tensor& slots);
Tensor gated_step(const char* op, const Gated& cell, const Tensor& pre, const Tensor& state,
                  const Tensor& slots);
std::tuple<Tensor, Tensor> gated_train(const char* op, const Gated& cell, const Tensor& pre,
                                       const Tensor& cu_seqlens, const MaybeTensor& h0);
std::tuple<Tensor, Tensor> gated_train_backward(const char* op, const Gated& cell,
                                                const Tensor& grad_h,
                                                const MaybeTensor& grad_h_last, const Tensor& pre,
                                                const Tensor& h, const Tensor& cu_seqlens,
                                                const MaybeTensor& h0);

}  // namespace minserve
