// Operations on single rows between products: embedding lookup, norms, activations.
#pragma once

#include "../cells/silu_cpu.h"
#include "../cpu_product/multiply.h"
#include "plan.h"

namespace minserve {
namespace MS_ISA {

// f(channel, lanes) for all vectors of [begin, end), of which the last may be a part.
template <class F>
MS_CELL void each_vector(std::int64_t begin, std::int64_t end, const F& f) {
  std::int64_t c = begin;
  for (; c + kWidth <= end; c += kWidth) f(c, Full{});
  if (c < end) f(c, Part{static_cast<int>(end - c)});
}

// The sum of all lanes, by halves.
MS_CELL float sum_of(VF v) {
  float lanes[kWidth];
  __builtin_memcpy(lanes, &v, sizeof(v));
#pragma GCC unroll 4
  for (int half = kWidth / 2; half > 0; half /= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  return lanes[0];
}

// What RMSNorm multiplies with, from the sum of squares.
MS_CELL float inverse_rms(float squares, std::int64_t width, float eps) {
  return 1.0f / __builtin_sqrtf(squares / static_cast<float>(width) + eps);
}

// The same for `width` values at(channel, lanes). Four partial sums, combined in one order.
template <class F>
MS_CELL float inverse_rms_by(std::int64_t width, float eps, const F& at) {
  VF sums[4] = {};
  int which = 0;
  each_vector(0, width, [&](std::int64_t c, auto lanes) {
    const VF v = at(c, lanes);
    sums[which & 3] = fmadd(v, v, sums[which & 3]);
    ++which;
  });
  const VF total = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  float sum = 0;
  for (int i = 0; i < kWidth; ++i) sum += total[i];
  return inverse_rms(sum, width, eps);
}
MS_CELL float inverse_rms_of(const float* x, std::int64_t width, float eps) {
  return inverse_rms_by(width, eps,
                        [&](std::int64_t c, auto lanes) { return load<VF>(x + c, lanes); });
}

// x <- RMSNorm(x) * weight, given to put(channel, vector).
template <class F>
MS_CELL void norm_row(const float* x, const float* weight, std::int64_t width, float eps,
                      const F& put) {
  const float inverse = inverse_rms_of(x, width, eps);
  each_vector(0, width, [&](std::int64_t c, auto lanes) {
    put(c, load<VF>(x + c, lanes) * inverse * load<VF>(weight + c, lanes), lanes);
  });
}

// RMSNorm(y * gate) * weight, given to put(channel, vector).
template <class F>
MS_CELL void gated_norm_row(const float* y, const float* gate, const float* weight,
                            std::int64_t width, float eps, const F& put) {
  const auto gated = [&](std::int64_t c, auto lanes) {
    return load<VF>(y + c, lanes) * load<VF>(gate + c, lanes);
  };
  const float inverse = inverse_rms_by(width, eps, gated);
  each_vector(0, width, [&](std::int64_t c, auto lanes) {
    put(c, gated(c, lanes) * inverse * load<VF>(weight + c, lanes));
  });
}

// Exact GELU, x Phi(x). Phi(-|x|) = e^(-x^2 / 2) R(|x|), and R is a polynomial in
// t = 1 / (1 + 0.35 |x|), fitted to 3.3e-8 relative for |x| < 13.5, beyond which fp32 has no Phi.
MS_CELL VF gelu(VF x) {
  const VF z = absolute(x);
  const VF t = reciprocal(fmadd(z, splat<VF>(0.35f), splat<VF>(1.0f)));
  VF p = splat<VF>(-0.02912518536240713);
  p = fmadd(p, t, splat<VF>(0.14386909192582079));
  p = fmadd(p, t, splat<VF>(-0.2554983123950566));
  p = fmadd(p, t, splat<VF>(0.15892230655614997));
  p = fmadd(p, t, splat<VF>(-0.02293235342369594));
  p = fmadd(p, t, splat<VF>(0.10543088492856707));
  p = fmadd(p, t, splat<VF>(0.1198529722356249));
  p = fmadd(p, t, splat<VF>(0.13985900529904477));
  p = fmadd(p, t, splat<VF>(0.13962157445538986));
  const VF tail = exp2_of(z * z * splat<VF>(-0.5 * kLog2e)) * (p * t);
  // Where exp2_of has reached its floor, nothing is left of the tail.
  const VF kept = z > splat<VF>(13.0f) ? splat<VF>(0.0f) : tail;
  return x * (x > splat<VF>(0.0f) ? 1.0f - kept : kept);
}

// The same as far as bfloat16 can tell, as core/gelu.cuh has it: max(x, 0) - |x| Phi(-|x|), the
// last as a power of two, whose relative error is 1.3e-4 up to 4.2 and of no account beyond.
// Infinite x give NaN.
MS_CELL VF short_gelu(VF x) {
  const VF z = absolute(x);
  VF power = fmadd(splat<VF>(-2.8654136e-4), z, splat<VF>(5.4825582e-3));
  power = fmadd(power, z, splat<VF>(-4.7027521e-2));
  power = fmadd(power, z, splat<VF>(-0.4658266));
  power = fmadd(power, z, splat<VF>(-1.1483513));
  power = fmadd(power, z, splat<VF>(-1.0001827));
  return maximum(x, splat<VF>(0.0f)) - z * exp2_of(power);
}
template <class Fed>
MS_CELL VF gelu_for(VF x) {
  return Fed::kHalf ? short_gelu(x) : gelu(x);
}

// Channels [begin, end) of row `index` of a table of `embedding_width` columns -> x.
MS_CELL void table_row(const Plan& plan, std::int64_t index, std::int64_t begin, std::int64_t end,
                       float* x) {
  const std::int64_t at = index * plan.embedding_width;
  each_vector(begin, end, [&](std::int64_t c, auto lanes) {
    VF v;
    if (plan.embedding_stored == Kind::f32) {
      v = load<VF>(reinterpret_cast<const float*>(plan.embedding) + at + c, lanes);
    } else if (plan.embedding_stored == Kind::bf16) {
      v = load<VF>(reinterpret_cast<const bf16*>(plan.embedding) + at + c, lanes);
    } else {
      VB bytes = {};
      const std::int64_t left = end - c < kWidth ? end - c : kWidth;
      __builtin_memcpy(&bytes, plan.embedding + at + c, static_cast<std::size_t>(left));
      v = floats_of(bytes) * plan.embedding_scale[index];
    }
    store(x + c, v, lanes);
  });
}

// Steps of a panel that a row of it is asked for ahead.
constexpr std::int64_t kStepsAhead = 32;

// The same from the packed head, where the embedding is tied to it: one or two elements of each
// step, whose line is read for them alone. So loops are short: what counts is how many lines are on
// their way at once. `begin` is even.
inline void packed_row(const Matrix& head, std::int64_t index, std::int64_t begin, std::int64_t end,
                       float* x) {
  std::int64_t stride;
  const char* from = head.at(index / kPanel, stride);
  const std::int64_t lane = index % kPanel;
  if (head.stored == Kind::f32) {
    from += begin * stride + lane * 4;
    for (std::int64_t c = begin; c < end; ++c, from += stride) {
      __builtin_prefetch(from + kStepsAhead * stride);
      __builtin_memcpy(x + c, from, 4);
    }
    return;
  }
  from += begin / 2 * stride + lane * (head.stored == Kind::bf16 ? 4 : 1);
  const auto each_two = [&](const auto& number, std::int64_t second) {  // bytes from the first
    for (std::int64_t c = begin; c < end; c += 2, from += stride) {
      __builtin_prefetch(from + kStepsAhead * stride);
      x[c] = number(from);
      if (c + 1 < end) x[c + 1] = number(from + second);
    }
  };
  if (head.stored == Kind::bf16) {
    const auto number = [](const char* p) {
      std::uint16_t bits;
      __builtin_memcpy(&bits, p, 2);
      return bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
    };
    each_two(number, 2);
  } else {
    const auto number = [scale = head.scale[index]](const char* p) {
      return static_cast<float>(*reinterpret_cast<const std::int8_t*>(p)) * scale;
    };
    each_two(number, kPanel);
  }
}

// One vector of a matrix' output: sums, scaled and with the bias where there are some.
struct Output {
  const Matrix& matrix;
  std::int64_t panel;  // of the run that finish() was given
  const float* sums;
  float row_scale = 1.0f;

  // Vector `part` of panel `p` of the run.
  MS_CELL VF vector(std::int64_t p, int part) const {
    const std::int64_t at = p * kPanel + part * kWidth, column = panel * kPanel + at;
    VF v = load<VF>(sums + at, Full{});
    if (matrix.scale) v = v * load<VF>(matrix.scale + column, Full{});
    v = v * row_scale;
    if (matrix.bias) v = v + load<VF>(matrix.bias + column, Full{});
    return v;
  }
};

// f(channel, lanes, vector) for the outputs of a run of panels of one matrix.
template <class F>
MS_CELL void each_output(const Output& out, std::int64_t panels, const F& f) {
  for (std::int64_t p = 0; p < panels; ++p) {
    const std::int64_t first = (out.panel + p) * kPanel;
#pragma GCC unroll 4
    for (int part = 0; part < kParts; ++part) {
      const std::int64_t c = first + part * kWidth, left = out.matrix.outputs - c;
      if (left >= kWidth) {
        f(c, Full{}, out.vector(p, part));
      } else {
        f(c, Part{static_cast<int>(left < 0 ? 0 : left)}, out.vector(p, part));
      }
    }
  }
}

}  // namespace MS_ISA
}  // namespace minserve
