// The selective recurrence on the CPU: one pass over the tokens of a run of channels, whose states
// stay in the first-level cache. Compiled once per instruction set; see core/vec.h.
#include "../cells/silu_cpu.h"
#include "../cells/softplus_cpu.h"
#include "../core/subnormals_cpu.h"
#include "args.h"
#include "step_cpu.h"

namespace minserve {
namespace MS_ISA {
namespace {

// States of a run of channels as floats, where the tensor has bfloat16.
constexpr std::int64_t kWideStates = 8192;
static_assert(kMostStates <= kWideStates);

template <class T, class L>
MS_CELL VF channel_vector(const ChannelVector& v, std::int64_t c, L lanes) {
  return v.is_float ? load<VF>(static_cast<const float*>(v.data) + c, lanes)
                    : load<VF>(static_cast<const T*>(v.data) + c, lanes);
}

template <class T, class L>
MS_CELL VF element(const Stream& stream, std::int64_t row, std::int64_t c, L lanes) {
  return load<VF>(static_cast<const T*>(stream.data) + row * stream.stride + c, lanes);
}

// A token's row as floats: where it lies, or converted.
MS_CELL const float* floats_of(const float* row, float*, std::int64_t) {
  return row;
}
template <class T>
MS_CELL const float* floats_of(const T* row, float* room, std::int64_t count) {
  copy_states(row, room, count);
  return room;
}

template <class T>
void zero_rows(const SelectiveArgs& args, std::int64_t begin, std::int64_t end, std::int64_t first,
               std::int64_t last) {
  for (std::int64_t row = begin; row < end; ++row) {
    T* const y = static_cast<T*>(args.y.data) + row * args.y.stride;
    __builtin_memset(static_cast<void*>(y + first), 0,
                     sizeof(T) * static_cast<unsigned long>(last - first));
  }
}

// y of a vector of channels at one token; h: their states.
template <class T, int kVectors, class L>
MS_CELL void output(const SelectiveArgs& args, const SelectiveToken<kVectors>& token,
                    std::int64_t row, std::int64_t c, float* h, int count, L lanes) {
  const VF x = element<T>(args.x, row, c, lanes);
  const VF dt =
      softplus(element<T>(args.dt, row, c, lanes) + channel_vector<T>(args.dt_bias, c, lanes));
  VF y = token.advance(args.A + c * args.states, h, dt, x, count);
  y = fmadd(channel_vector<T>(args.D, c, lanes), x, y);
  if (args.z.data) y = y * silu(element<T>(args.z, row, c, lanes));
  store(static_cast<T*>(args.y.data) + row * args.y.stride + c, y, lanes);
}

// Channels [first, last) of all tokens of a sequence; h: their states.
template <class T, int kVectors>
void read_sequence(const SelectiveArgs& args, std::int64_t begin, std::int64_t end,
                   std::int64_t first, std::int64_t last, float* h) {
  alignas(64) float room_b[sizeof(T) < 4 ? kMostStates : 1];
  alignas(64) float room_c[sizeof(T) < 4 ? kMostStates : 1];
  for (std::int64_t row = begin; row < end; ++row) {
    const SelectiveToken<kVectors> token(
        floats_of(static_cast<const T*>(args.B.data) + row * args.B.stride, room_b, args.states),
        floats_of(static_cast<const T*>(args.C.data) + row * args.C.stride, room_c, args.states),
        args.states);
    for (std::int64_t c = first; c < last; c += kWidth) {
      float* const own = h + (c - first) * args.states;
      if (last - c >= kWidth) {
        output<T>(args, token, row, c, own, kWidth, Full{});
      } else {
        const int count = static_cast<int>(last - c);
        output<T>(args, token, row, c, own, count, Part{count});
      }
    }
  }
}

template <class T>
void read_run(const SelectiveArgs& args, std::int64_t s, std::int64_t first, std::int64_t last) {
  const Layout& lay = args.layout;
  const std::int64_t begin = lay.begin(s), end = lay.end(s), slot = lay.slot(s);
  if (begin == end) return;
  if (slot < 0) return zero_rows<T>(args, begin, end, first, last);
  const std::int64_t states = args.states, at = slot * args.slot_stride;
  with_states(states, [&](auto vectors) {
    constexpr int kVectors = decltype(vectors)::value;
    if (!args.half_state) {
      float* const h = static_cast<float*>(args.state) + at + first * states;
      return read_sequence<T, kVectors>(args, begin, end, first, last, h);
    }
    alignas(64) float wide[kWideStates];
    const std::int64_t most = kWideStates / states;
    for (std::int64_t c = first; c < last; c += most) {
      const std::int64_t until = last - c < most ? last : c + most;
      bf16* const h = static_cast<bf16*>(args.state) + at + c * states;
      copy_states(h, wide, (until - c) * states);
      read_sequence<T, kVectors>(args, begin, end, c, until, wide);
      copy_states(wide, h, (until - c) * states);
    }
  });
}

// Item i is run i / (sequences + 1) of the channels of sequence i % (sequences + 1): A of a run
// serves all sequences.
template <class T>
void run_selective(const SelectiveArgs& args, std::int64_t begin, std::int64_t end) {
  const WithoutSubnormals of_states;
  const std::int64_t sequences = args.layout.sequences + 1, channels = args.layout.channels;
  for (std::int64_t i = begin; i < end; ++i) {
    const std::int64_t first = i / sequences * kSelectiveRun;
    const std::int64_t last = first + kSelectiveRun < channels ? first + kSelectiveRun : channels;
    read_run<T>(args, i % sequences, first, last);
  }
}

}  // namespace

SelectiveFn selective_kernel(Dtype dtype) {
  switch (dtype) {
    case Dtype::f32:
      return &run_selective<float>;
    case Dtype::bf16:
      return &run_selective<bf16>;
    case Dtype::f16:
      return &run_selective<f16>;
    case Dtype::f64:
      break;
  }
  return nullptr;
}

}  // namespace MS_ISA
}  // namespace minserve
