// Causal depthwise convolution on the CPU: token rows side by side, then the carried inputs.
// Compiled once per instruction set; see core/vec.h.
#include "../cells/silu_cpu.h"
#include "args.h"

namespace minserve {
namespace MS_ISA {
namespace {

template <class T>
float as_float(const T* p) {
  VF x = load<VF>(p, Part{1});
  return x[0];
}

template <class T>
void transpose_weights(const ConvArgs& args) {
  const T* weight = static_cast<const T*>(args.weight);
  const T* bias = static_cast<const T*>(args.bias);
  const std::int64_t channels = args.layout.channels;
  for (std::int64_t c = 0; c < channels; ++c) {
    for (std::int64_t k = 0; k < args.taps; ++k) {
      args.weight_rows[k * channels + c] = as_float(weight + c * args.taps + k);
    }
    args.weight_rows[args.taps * channels + c] = bias ? as_float(bias + c) : 0.0f;
  }
}

template <class T, bool kSilu, class L>
MS_CELL void output_lanes(const ConvArgs& args, std::int64_t row, std::int64_t begin,
                          std::int64_t slot, std::int64_t c, L lanes) {
  const std::int64_t channels = args.layout.channels, taps = args.taps;
  const T* x = static_cast<const T*>(args.x.data);
  VF sum = load<VF>(args.weight_rows + taps * channels + c, lanes);
  for (std::int64_t k = 0; k < taps; ++k) {
    const std::int64_t from = row - (taps - 1) + k;
    // Before the sequence: the carried inputs, of which the newest has index taps - 2.
    VF input = from >= begin ? load<VF>(x + from * args.x.stride + c, lanes)
                             : load<VF>(args.state + slot * args.slot_stride +
                                            (taps - 1 + from - begin) * args.tap_stride + c,
                                        lanes);
    sum = fmadd(load<VF>(args.weight_rows + k * channels + c, lanes), input, sum);
  }
  if constexpr (kSilu) sum = silu(sum);
  store(static_cast<T*>(args.out) + row * channels + c, sum, lanes);
}

template <class T, bool kSilu>
void output_rows(const ConvArgs& args, std::int64_t first, std::int64_t last) {
  const Layout& lay = args.layout;
  if (first >= last) return;
  std::int64_t low = 0, high = lay.sequences;  // the last sequence that begins at or before first
  while (low < high) {
    std::int64_t middle = (low + high + 1) / 2;
    if (lay.begin(middle) <= first) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  std::int64_t s = low;
  for (std::int64_t row = first; row < last; ++row) {
    while (s < lay.sequences && row >= lay.end(s)) ++s;
    const std::int64_t slot = lay.slot(s);
    T* out = static_cast<T*>(args.out) + row * lay.channels;
    if (slot < 0) {
      __builtin_memset(static_cast<void*>(out), 0,
                       sizeof(T) * static_cast<unsigned long>(lay.channels));
      continue;
    }
    const std::int64_t begin = lay.begin(s);
    std::int64_t c = 0;
    for (; c + kWidth <= lay.channels; c += kWidth) {
      output_lanes<T, kSilu>(args, row, begin, slot, c, Full{});
    }
    if (c < lay.channels) {
      output_lanes<T, kSilu>(args, row, begin, slot, c, Part{static_cast<int>(lay.channels - c)});
    }
  }
}

template <class T, class L>
MS_CELL void keep_lanes(const ConvArgs& args, std::int64_t s, std::int64_t slot, std::int64_t c,
                        L lanes) {
  const std::int64_t begin = args.layout.begin(s), end = args.layout.end(s);
  if (begin == end) return;
  float* rows = args.state + slot * args.slot_stride + c;
  // Ascending, so that a short sequence moves old rows down before they are overwritten.
  for (std::int64_t k = 0; k < args.taps - 1; ++k) {
    const std::int64_t from = end - (args.taps - 1) + k;
    VF input = from >= begin
                   ? load<VF>(static_cast<const T*>(args.x.data) + from * args.x.stride + c, lanes)
                   : load<VF>(rows + (args.taps - 1 + from - begin) * args.tap_stride, lanes);
    store(rows + k * args.tap_stride, input, lanes);
  }
}

template <class T>
void keep_inputs(const ConvArgs& args, std::int64_t first, std::int64_t last) {
  const std::int64_t channels = args.layout.channels;
  for (std::int64_t s = first; s < last; ++s) {
    const std::int64_t slot = args.layout.slot(s);
    if (slot < 0) continue;
    std::int64_t c = 0;
    for (; c + kWidth <= channels; c += kWidth) keep_lanes<T>(args, s, slot, c, Full{});
    if (c < channels) keep_lanes<T>(args, s, slot, c, Part{static_cast<int>(channels - c)});
  }
}

template <class T>
void run_conv(const ConvArgs& args, ConvPhase phase, std::int64_t begin, std::int64_t end) {
  if (phase == ConvPhase::weights) transpose_weights<T>(args);
  if (phase == ConvPhase::outputs) {
    args.silu ? output_rows<T, true>(args, begin, end) : output_rows<T, false>(args, begin, end);
  }
  if (phase == ConvPhase::states) keep_inputs<T>(args, begin, end);
}

}  // namespace

ConvFn conv_kernel(Dtype dtype) {
  switch (dtype) {
    case Dtype::f32:
      return &run_conv<float>;
    case Dtype::bf16:
      return &run_conv<bf16>;
    case Dtype::f16:
      return &run_conv<f16>;
    case Dtype::f64:
      break;
  }
  return nullptr;
}

}  // namespace MS_ISA
}  // namespace minserve
