// The simple recurrent unit on the CPU: one pass over the tokens of a run of channels, whose c stay
// in the first-level cache. Compiled once per instruction set; see core/vec.h.
#include "../core/subnormals_cpu.h"
#include "args.h"
#include "token.h"

namespace minserve {
namespace MS_ISA {
namespace {

// A run's vectors: room for kSruRun channels, of which the last vector may have fewer.
struct alignas(64) Run {
  float forget_c[kSruRun], reset_c[kSruRun], forget[kSruRun], reset[kSruRun];
};

void read_channels(const SruArgs& args, std::int64_t first, std::int64_t count, Run& run) {
  const std::int64_t channels = args.layout.channels;
  const float scale = static_cast<float>(-kLog2e);
  for (std::int64_t i = 0; i < kSruRun; ++i) {
    const bool real = i < count;
    const float* const weight = real ? args.weight_c : nullptr;
    run.forget_c[i] = weight ? weight[first + i] * scale : 0.0f;
    run.reset_c[i] = weight ? weight[channels + first + i] * scale : 0.0f;
    run.forget[i] = real ? args.bias[first + i] * scale : 0.0f;
    run.reset[i] = real ? args.bias[channels + first + i] * scale : 0.0f;
  }
}
MS_CELL SruChannel<VF> channel_of(const Run& run, std::int64_t i) {
  return {load<VF>(run.forget_c + i, Full{}), load<VF>(run.reset_c + i, Full{}),
          load<VF>(run.forget + i, Full{}), load<VF>(run.reset + i, Full{})};
}

template <class T>
MS_CELL T* place(const Stream& stream, std::int64_t row, std::int64_t c) {
  return static_cast<T*>(stream.data) + row * stream.stride + c;
}

template <class T>
void zero_rows(const Stream& stream, std::int64_t begin, std::int64_t end, std::int64_t first,
               std::int64_t count) {
  for (std::int64_t row = begin; row < end; ++row) {
    __builtin_memset(static_cast<void*>(place<T>(stream, row, first)), 0,
                     sizeof(T) * static_cast<unsigned long>(count));
  }
}

// f(vector's first channel in the run, its lanes), for all vectors of a run.
template <class F>
MS_CELL void for_vectors(std::int64_t count, const F& f) {
  std::int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) f(i, Full{});
  if (i < count) f(i, Part{static_cast<int>(count - i)});
}

template <class T, bool kHighway, bool kTanh>
void read_sequence(const SruArgs& args, std::int64_t begin, std::int64_t end, std::int64_t first,
                   std::int64_t count, const Run& run, float* c) {
  const std::int64_t channels = args.layout.channels;
  const VF scale = splat<VF>(static_cast<double>(args.scale));
  for (std::int64_t row = begin; row < end; ++row) {
    const T* const u = place<const T>(args.u, row, first);
    const T* const x = kHighway ? place<const T>(args.highway, row, first) : nullptr;
    T* const h = place<T>(args.h, row, first);
    float* const kept = args.c ? args.c + row * channels + first : nullptr;
    for_vectors(count, [&](std::int64_t i, auto lanes) {
      VF own = load<VF>(c + i, Full{}), highway = splat<VF>(0.0f);
      if constexpr (kHighway) highway = load<VF>(x + i, lanes) * scale;
      const VF out = sru_token<kHighway, kTanh>(
          channel_of(run, i), load<VF>(u + i, lanes), load<VF>(u + channels + i, lanes),
          load<VF>(u + 2 * channels + i, lanes), highway, own);
      store(c + i, own, Full{});
      store(h + i, out, lanes);
      if (kept) store(kept + i, own, lanes);
    });
  }
}

template <class T, bool kHighway, bool kTanh>
void read_run(const SruArgs& args, std::int64_t s, std::int64_t first, std::int64_t count) {
  const Layout& lay = args.layout;
  const std::int64_t begin = lay.begin(s), end = lay.end(s), slot = lay.slot(s);
  if (begin == end) return;
  if (slot < 0) {
    if (args.c) zero_rows<float>({args.c, lay.channels}, begin, end, first, count);
    return zero_rows<T>(args.h, begin, end, first, count);
  }
  Run run;
  read_channels(args, first, count, run);
  alignas(64) float c[kSruRun] = {};
  float* const state = args.state + slot * args.slot_stride + first;
  for (std::int64_t i = 0; i < count; ++i) c[i] = state[i];
  read_sequence<T, kHighway, kTanh>(args, begin, end, first, count, run, c);
  for (std::int64_t i = 0; i < count; ++i) state[i] = c[i];
}

// Item i is run i / (sequences + 1) of the channels of sequence i % (sequences + 1).
template <class F>
MS_CELL void for_items(const Layout& lay, std::int64_t begin, std::int64_t end, const F& f) {
  const std::int64_t sequences = lay.sequences + 1;
  for (std::int64_t i = begin; i < end; ++i) {
    const std::int64_t first = i / sequences * kSruRun, left = lay.channels - first;
    f(i % sequences, first, left < kSruRun ? left : kSruRun);
  }
}

// f with the highway and the activation as types.
struct Yes {
  static constexpr bool value = true;
};
struct No {
  static constexpr bool value = false;
};
template <class F>
MS_CELL void with_form(const SruArgs& args, const F& f) {
  if (args.highway.data) {
    if (args.tanh) return f(Yes{}, Yes{});
    return f(Yes{}, No{});
  }
  if (args.tanh) return f(No{}, Yes{});
  f(No{}, No{});
}

template <class T>
void run_sru(const SruArgs& args, std::int64_t begin, std::int64_t end) {
  const WithoutSubnormals of_states;
  with_form(args, [&](auto highway, auto tanh) {
    for_items(args.layout, begin, end, [&](std::int64_t s, std::int64_t first, std::int64_t count) {
      read_run<T, decltype(highway)::value, decltype(tanh)::value>(args, s, first, count);
    });
  });
}

template <class T, bool kHighway, bool kTanh>
void gradient_of_run(const SruArgs& args, const SruGradients& grads, std::int64_t s,
                     std::int64_t first, std::int64_t count) {
  const Layout& lay = args.layout;
  const std::int64_t begin = lay.begin(s), end = lay.end(s), channels = lay.channels;
  if (s == lay.sequences) {
    for (int plane = 0; plane < 3; ++plane) {
      zero_rows<T>(grads.u, begin, end, plane * channels + first, count);
    }
    if (kHighway) zero_rows<T>(grads.highway, begin, end, first, count);
    return;
  }
  Run run;
  read_channels(args, first, count, run);
  alignas(64) float carry[kSruRun] = {}, c0[kSruRun] = {};
  alignas(64) float weight[2][kSruRun] = {}, sums[4][kSruRun] = {};
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t at = s * channels + first + i;
    if (grads.last) carry[i] = grads.last[at];
    if (grads.c0) c0[i] = grads.c0[at];
    if (args.weight_c) {
      weight[0][i] = args.weight_c[first + i];
      weight[1][i] = args.weight_c[channels + first + i];
    }
  }
  const VF scale = splat<VF>(static_cast<double>(args.scale));
  for (std::int64_t row = end - 1; row >= begin; --row) {
    const T* const u = place<const T>(args.u, row, first);
    const T* const x = kHighway ? place<const T>(args.highway, row, first) : nullptr;
    const T* const grad_h = place<const T>(grads.h, row, first);
    T* const grad_u = place<T>(grads.u, row, first);
    T* const grad_x = kHighway ? place<T>(grads.highway, row, first) : nullptr;
    const float* const c = args.c + row * channels + first;
    for_vectors(count, [&](std::int64_t i, auto lanes) {
      const VF before = row > begin ? load<VF>(c - channels + i, lanes) : load<VF>(c0 + i, lanes);
      VF own = load<VF>(carry + i, Full{}), highway = splat<VF>(0.0f);
      if constexpr (kHighway) highway = load<VF>(x + i, lanes) * scale;
      SruSums<VF> added{load<VF>(sums[0] + i, Full{}), load<VF>(sums[1] + i, Full{}),
                        load<VF>(sums[2] + i, Full{}), load<VF>(sums[3] + i, Full{})};
      const SruTokenGradient<VF> out = sru_token_gradient<kHighway, kTanh>(
          channel_of(run, i), load<VF>(weight[0] + i, Full{}), load<VF>(weight[1] + i, Full{}),
          load<VF>(u + i, lanes), load<VF>(u + channels + i, lanes),
          load<VF>(u + 2 * channels + i, lanes), highway, before, load<VF>(c + i, lanes),
          load<VF>(grad_h + i, lanes), own, added);
      store(carry + i, own, Full{});
      store(sums[0] + i, added.forget_c, Full{});
      store(sums[1] + i, added.reset_c, Full{});
      store(sums[2] + i, added.forget, Full{});
      store(sums[3] + i, added.reset, Full{});
      store(grad_u + i, out.u0, lanes);
      store(grad_u + channels + i, out.u1, lanes);
      store(grad_u + 2 * channels + i, out.u2, lanes);
      if constexpr (kHighway) store(grad_x + i, out.x * scale, lanes);
    });
  }
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t at = s * channels + first + i;
    grads.of_c0[at] = carry[i];
    for (int n = 0; n < 4; ++n) grads.vectors[n * lay.sequences * channels + at] = sums[n][i];
  }
}

template <class T>
void run_backward(const SruArgs& args, const SruGradients& grads, std::int64_t begin,
                  std::int64_t end) {
  const WithoutSubnormals of_gradients;
  with_form(args, [&](auto highway, auto tanh) {
    for_items(args.layout, begin, end, [&](std::int64_t s, std::int64_t first, std::int64_t count) {
      gradient_of_run<T, decltype(highway)::value, decltype(tanh)::value>(args, grads, s, first,
                                                                          count);
    });
  });
}

}  // namespace

SruFn sru_kernel(Dtype dtype) {
  switch (dtype) {
    case Dtype::f32:
      return &run_sru<float>;
    case Dtype::bf16:
      return &run_sru<bf16>;
    case Dtype::f16:
      return &run_sru<f16>;
    case Dtype::f64:
      break;
  }
  return nullptr;
}

SruBackwardFn sru_backward_kernel(Dtype dtype) {
  switch (dtype) {
    case Dtype::f32:
      return &run_backward<float>;
    case Dtype::bf16:
      return &run_backward<bf16>;
    case Dtype::f16:
      return &run_backward<f16>;
    case Dtype::f64:
      break;
  }
  return nullptr;
}

}  // namespace MS_ISA
}  // namespace minserve
