// Argument checks, and what operators make of checked tensors.
#include "tensor_checks.h"

namespace minserve {

namespace {

const char* dtype_name(ScalarType type) {
  switch (type) {
    case ScalarType::Float:
      return "float32";
    case ScalarType::Double:
      return "float64";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Half:
      return "float16";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Long:
      return "int64";
    default:
      return torch::headeronly::toString(type);
  }
}

}  // namespace

std::string describe(const Tensor& t) {
  std::ostringstream text;
  text << dtype_name(t.scalar_type()) << "[";
  for (std::int64_t i = 0; i < t.dim(); ++i) text << (i ? ", " : "") << t.size(i);
  text << "] on " << (t.is_cpu() ? "cpu" : t.is_cuda() ? "cuda" : "another device");
  if (t.is_cuda()) text << ":" << t.get_device_index();
  return text.str();
}

Check::Check(const char* op, const Tensor& main, const char* main_name)
    : op_(op), main_name_(main_name), main_(main) {}

Dtype Check::dtype(bool allow_double) const {
  switch (main_.scalar_type()) {
    case ScalarType::Float:
      return Dtype::f32;
    case ScalarType::BFloat16:
      return Dtype::bf16;
    case ScalarType::Half:
      return Dtype::f16;
    case ScalarType::Double:
      if (allow_double) return Dtype::f64;
      break;
    default:
      break;
  }
  require(false, main_name_, " must be float32, bfloat16",
          allow_double ? ", float16 or float64" : " or float16", ", got ", describe(main_));
  return Dtype::f32;
}

void Check::same_device(const Tensor& t, const char* name) const {
  require(t.is_cpu() == main_.is_cpu() && t.get_device_index() == main_.get_device_index(), name,
          " must be on the device of ", main_name_, ", got ", name, " ", describe(t), " and ",
          main_name_, " ", describe(main_));
}

void Check::tensor(const Tensor& t, const char* name, ScalarType type,
                   std::initializer_list<std::int64_t> sizes, const char* allowed) const {
  bool fits = t.dim() == static_cast<std::int64_t>(sizes.size());
  std::int64_t i = 0;
  for (std::int64_t size : sizes) {
    fits = fits && (size < 0 || t.size(i) == size);
    ++i;
  }
  std::ostringstream given;
  for (std::int64_t size : sizes)
    given << (given.tellp() > 0 ? ", " : "") << (size < 0 ? "any" : std::to_string(size));
  require(fits, name, " must be ", allowed, " = [", given.str(), "], got ", describe(t));
  require(t.scalar_type() == type, name, " must be ", dtype_name(type), ", got ", describe(t));
  same_device(t, name);
}

std::int64_t bytes_of(const Tensor& t) {
  switch (t.scalar_type()) {
    case ScalarType::Double:
    case ScalarType::Long:
      return 8;
    case ScalarType::Float:
    case ScalarType::Int:
      return 4;
    default:
      return 2;
  }
}

bool overlap(const Tensor& a, const Tensor& b) {
  const auto begin = [](const Tensor& t) {
    return reinterpret_cast<std::uintptr_t>(t.const_data_ptr());
  };
  const auto end = [&](const Tensor& t) {
    return begin(t) + static_cast<std::uintptr_t>(t.numel() * bytes_of(t));
  };
  return begin(a) < end(b) && begin(b) < end(a);
}

Tensor with_rows(const Tensor& matrix) {
  const bool fits = matrix.size(1) <= 1 || matrix.stride(1) == 1;
  return fits ? matrix : torch::stable::contiguous(matrix);
}

Stream rows_of(const Tensor& matrix) {
  // Only ever read: Stream has one pointer type for both directions.
  return {const_cast<void*>(matrix.const_data_ptr()), matrix.stride(0)};
}

Stream input_stream(const Tensor& matrix, std::int64_t first) {
  // Only ever read: Stream has one pointer type for both directions.
  char* data = static_cast<char*>(const_cast<void*>(matrix.const_data_ptr()));
  return {data + first * bytes_of(matrix), matrix.size(matrix.dim() - 1)};
}

Stream output_stream(const Tensor& matrix, std::int64_t first) {
  char* data = static_cast<char*>(matrix.mutable_data_ptr());
  return {data + first * bytes_of(matrix), matrix.size(matrix.dim() - 1)};
}

ScalarType accumulation_type(Dtype dtype) {
  return dtype == Dtype::f64 ? ScalarType::Double : ScalarType::Float;
}

Layout packed_layout(const Check& check, const Tensor& cu_seqlens, const Tensor* slots,
                     std::int64_t num_slots, std::int64_t tokens, std::int64_t channels) {
  check.tensor(cu_seqlens, "cu_seqlens", ScalarType::Int, {-1}, "[sequences + 1]");
  check.require(cu_seqlens.size(0) >= 1, "cu_seqlens must be [sequences + 1], at least [0], got ",
                describe(cu_seqlens));
  Layout lay;
  lay.sequences = cu_seqlens.size(0) - 1;
  lay.tokens = tokens;
  lay.channels = channels;
  lay.num_slots = num_slots;
  lay.cu_seqlens = cu_seqlens.const_data_ptr<std::int32_t>();
  if (slots) {
    check.tensor(*slots, "slots", ScalarType::Int, {lay.sequences}, "[sequences]");
    lay.slots = slots->const_data_ptr<std::int32_t>();
  }
  if (!cu_seqlens.is_cpu()) return lay;  // values on the GPU are not looked at: that would stall it
  check.require(lay.cu_seqlens[0] == 0, "cu_seqlens must start at 0, got ", lay.cu_seqlens[0]);
  for (std::int64_t s = 0; s < lay.sequences; ++s) {
    check.require(lay.cu_seqlens[s] <= lay.cu_seqlens[s + 1], "cu_seqlens must not fall, got ",
                  lay.cu_seqlens[s + 1], " after ", lay.cu_seqlens[s], " at index ", s + 1);
    if (slots) {
      check.require(lay.slots[s] < num_slots, "slots must be below the ", num_slots,
                    " rows of state (negative: padding), got ", lay.slots[s], " at index ", s);
    }
  }
  check.require(lay.cu_seqlens[lay.sequences] <= tokens, "cu_seqlens must end at or below the ",
                tokens, " tokens given, got ", lay.cu_seqlens[lay.sequences]);
  return lay;
}

Layout step_layout(const Check& check, const Tensor& slots, std::int64_t num_slots,
                   std::int64_t batch, std::int64_t channels) {
  check.tensor(slots, "slots", ScalarType::Int, {batch}, "[batch]");
  Layout lay;
  lay.sequences = lay.tokens = batch;
  lay.time = 1;
  lay.channels = channels;
  lay.num_slots = num_slots;
  lay.slots = slots.const_data_ptr<std::int32_t>();
  if (!slots.is_cpu()) return lay;
  for (std::int64_t s = 0; s < batch; ++s) {
    check.require(lay.slots[s] < num_slots, "slots must be below the ", num_slots,
                  " rows of state (negative: padding), got ", lay.slots[s], " at index ", s);
  }
  return lay;
}

void check_state(const Check& check, const Tensor& state, std::int64_t channels) {
  check.tensor(state, "state", ScalarType::Float, {-1, channels}, "[num_slots, channels]");
  check.require(
      channels <= 1 || state.stride(1) == 1,
      "state is changed in place, so its last dimension must be contiguous, got strides [",
      state.stride(0), ", ", state.stride(1), "]");
}

}  // namespace minserve
