// Argument checks of every operator, with one wording, and what checked tensors give.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <tuple>

#include "types.h"

namespace minserve {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;

std::string describe(const Tensor& t);  // "float32[3, 4] on cpu"

// Throws std::runtime_error "minserve::op: ...", which Python sees as RuntimeError.
class Check {
 public:
  Check(const char* op, const Tensor& main, const char* main_name);

  template <class... Parts>
  void require(bool ok, const Parts&... parts) const {
    if (ok) return;
    std::ostringstream text;
    text << "minserve::" << op_ << ": ";
    (text << ... << parts);
    throw std::runtime_error(text.str());
  }
  // The main argument's dtype: float32, bfloat16, float16 and, where allowed, float64.
  Dtype dtype(bool allow_double) const;
  // Same device as the main argument, this dtype and these sizes (-1: any).
  void tensor(const Tensor& t, const char* name, ScalarType type,
              std::initializer_list<std::int64_t> sizes, const char* allowed) const;
  void same_device(const Tensor& t, const char* name) const;

 private:
  const char* op_;
  const char* main_name_;
  const Tensor& main_;
};

// Of an element: of eight bytes, of four, or of a two-byte float.
std::int64_t bytes_of(const Tensor& t);

// Whether they share memory; both contiguous.
bool overlap(const Tensor& a, const Tensor& b);

// A matrix whose rows are each contiguous and lie anywhere: the given one, or a copy. And its rows,
// to be read.
Tensor with_rows(const Tensor& matrix);
Stream rows_of(const Tensor& matrix);

// The accumulation type: float64 for float64, else float32.
ScalarType accumulation_type(Dtype dtype);

// The columns of a contiguous tensor from one on, rows being its last dimension.
Stream input_stream(const Tensor& matrix, std::int64_t first = 0);
Stream output_stream(const Tensor& matrix, std::int64_t first = 0);

// cu_seqlens and slots, checked; on the CPU their values as well. The tensors are made contiguous
// and kept alive by the caller.
Layout packed_layout(const Check& check, const Tensor& cu_seqlens, const Tensor* slots,
                     std::int64_t num_slots, std::int64_t tokens, std::int64_t channels);
Layout step_layout(const Check& check, const Tensor& slots, std::int64_t num_slots,
                   std::int64_t batch, std::int64_t channels);

// State rows [num_slots, channels], float32, changed in place.
void check_state(const Check& check, const Tensor& state, std::int64_t channels);

}  // namespace minserve
