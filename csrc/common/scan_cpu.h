// The affine scan on the CPU: h_t = a_t h_{t-1} + b_t over chunks of time, vectors over channels.
//
// Items of the phases:
//   serial     channel block * sequences + sequence     everything in one pass
//   aggregate  channel block * chunk bound + chunk      (A, B) of each chunk -> workspace
//   carry      channel block * sequences + sequence     workspace A becomes each chunk's carry-in
//   output     channel block * chunk bound + chunk      outputs from the carry-in
// Sequence number `sequences` is the padding tail, whose rows are zeroed.
#pragma once

#include "gates.h"

namespace minserve {
namespace MS_ISA {

// T: element type of the streams; NV vectors of channels at once, all full or one partial.
template <template <class> class CellOf, class O, class T, int NV, class L>
struct Scan {
  using V = typename ComputeType<T>::type;
  using S = typename LanesOf<V>::scalar;
  using Cell = CellOf<V>;
  static constexpr int W = LanesOf<V>::width;

  struct Place {  // of a sequence and a block of channels
    std::int64_t sequence, slot, begin, end, channel;
    O options;
  };

  static MS_CELL void read(const ScanArgs& args, const Place& at, std::int64_t row,
                           std::int64_t channel, V (&in)[Cell::kInputs], L lanes) {
#pragma GCC unroll 8
    for (int n = 0; n < Cell::kInputs; ++n) {
      const Stream& s = args.inputs[n];
      const T* p = static_cast<const T*>(s.data) + channel;
      if (n != Cell::kPrevious) {
        in[n] = load<V>(p + row * s.stride, lanes);
        continue;
      }
      // The state before this element in forward order; a backward scan runs against it.
      const bool first = args.layout.reverse ? row == at.begin : row == at.end - 1;
      const S* h0 = static_cast<const S*>(args.h0);
      if (!first) {
        in[n] = load<V>(p + (args.layout.reverse ? row - 1 : row + 1) * s.stride, lanes);
      } else {
        in[n] =
            h0 ? load<V>(h0 + at.sequence * args.layout.channels + channel, lanes) : splat<V>(0.0f);
      }
    }
  }

  static MS_CELL void write(const ScanArgs& args, std::int64_t row, std::int64_t channel,
                            const V (&out)[Cell::kOutputs], L lanes) {
#pragma GCC unroll 8
    for (int n = 0; n < Cell::kOutputs; ++n) {
      const Stream& s = args.outputs[n];
      store(static_cast<T*>(s.data) + row * s.stride + channel, out[n], lanes);
    }
  }

  // Positions [from, to) of one chunk: outputs from the carry if wanted, and the aggregate.
  template <bool kOutput, bool kAggregate>
  static void chunk(const ScanArgs& args, const Place& at, std::int64_t from, std::int64_t to,
                    const V* carry, V* a_all, V* b_all, L lanes) {
    V h[NV], a[NV], b[NV];
    for (int v = 0; v < NV; ++v) {
      if (kOutput) h[v] = carry[v];
      if (kAggregate) a[v] = splat<V>(1.0f), b[v] = splat<V>(0.0f);
    }
    for (std::int64_t p = from; p < to; ++p) {
      const std::int64_t row = args.layout.reverse ? at.end - 1 - p : at.begin + p;
#pragma GCC unroll 16
      for (int v = 0; v < NV; ++v) {
        V in[Cell::kInputs], out[Cell::kOutputs];
        read(args, at, row, at.channel + v * W, in, lanes);
        const Affine<V> step = Cell::affine(at.options, in);
        if (kAggregate) {
          b[v] = fmadd(step.a, b[v], step.b);
          a[v] = step.a * a[v];
        }
        if (kOutput) {
          const V after = fmadd(step.a, h[v], step.b);
          Cell::outputs(at.options, in, h[v], after, out);
          write(args, row, at.channel + v * W, out, lanes);
          h[v] = after;
        }
      }
    }
    if (kAggregate) {
      for (int v = 0; v < NV; ++v) a_all[v] = a[v], b_all[v] = b[v];
    }
  }

  static void zero(const ScanArgs& args, const Place& at, std::int64_t from, std::int64_t to,
                   L lanes) {
    V out[Cell::kOutputs];
    for (int n = 0; n < Cell::kOutputs; ++n) out[n] = splat<V>(0.0f);
    for (std::int64_t row = from; row < to; ++row) {
      for (int v = 0; v < NV; ++v) write(args, row, at.channel + v * W, out, lanes);
    }
  }

  static MS_CELL void initial(const ScanArgs& args, const Place& at, V* h, L lanes) {
    const S* p = static_cast<const S*>(args.initial);
    for (int v = 0; v < NV; ++v) {
      h[v] = p ? load<V>(p + at.slot * args.initial_stride + at.channel + v * W, lanes)
               : splat<V>(0.0f);
    }
  }
  static MS_CELL void finish(const ScanArgs& args, const Place& at, const V* h, L lanes) {
    S* p = static_cast<S*>(args.last);
    if (!p) return;
    for (int v = 0; v < NV; ++v) {
      store(p + at.slot * args.last_stride + at.channel + v * W, h[v], lanes);
    }
  }

  static void serial(const ScanArgs& args, const Place& at, L lanes) {
    if (at.slot < 0) return zero(args, at, at.begin, at.end, lanes);
    V h[NV], a[NV], b[NV];
    initial(args, at, h, lanes);
    const std::int64_t length = at.end - at.begin;
    for (std::int64_t from = 0; from < length; from += kScanChunk) {
      const std::int64_t to = from + kScanChunk < length ? from + kScanChunk : length;
      chunk<true, true>(args, at, from, to, h, a, b, lanes);
      for (int v = 0; v < NV; ++v) h[v] = fmadd(a[v], h[v], b[v]);
    }
    finish(args, at, h, lanes);
  }

  // The two workspace arrays at a chunk's row.
  static MS_CELL S* a_row(const ScanArgs& args, std::int64_t chunk_index, std::int64_t channel) {
    return static_cast<S*>(args.workspace) + chunk_index * args.layout.channels + channel;
  }
  static MS_CELL S* b_row(const ScanArgs& args, std::int64_t chunk_index, std::int64_t channel) {
    return a_row(args, args.layout.chunk_bound() + chunk_index, channel);
  }

  static void carry(const ScanArgs& args, const Place& at, L lanes) {
    if (at.slot < 0) return;
    V h[NV];
    initial(args, at, h, lanes);
    std::int64_t index = args.layout.first_chunk(at.sequence);
    for (std::int64_t from = at.begin; from < at.end; from += kScanChunk, ++index) {
      S *a_at = a_row(args, index, at.channel), *b_at = b_row(args, index, at.channel);
      for (int v = 0; v < NV; ++v) {
        const V a = load<V>(a_at + v * W, lanes), b = load<V>(b_at + v * W, lanes);
        store(a_at + v * W, h[v], lanes);
        h[v] = fmadd(a, h[v], b);
      }
    }
    finish(args, at, h, lanes);
  }

  template <bool kOutput>
  static void one_chunk(const ScanArgs& args, const Place& at, std::int64_t index, L lanes) {
    const std::int64_t length = at.end - at.begin;
    const std::int64_t from = (index - args.layout.first_chunk(at.sequence)) * kScanChunk;
    if (from >= length) return;
    const std::int64_t to = from + kScanChunk < length ? from + kScanChunk : length;
    if (at.slot < 0) {
      if (kOutput) zero(args, at, at.begin + from, at.begin + to, lanes);
      return;
    }
    S *a_at = a_row(args, index, at.channel), *b_at = b_row(args, index, at.channel);
    V a[NV], b[NV];
    if (kOutput) {
      for (int v = 0; v < NV; ++v) a[v] = load<V>(a_at + v * W, lanes);
      chunk<true, false>(args, at, from, to, a, a, b, lanes);
    } else {
      chunk<false, true>(args, at, from, to, a, a, b, lanes);
      for (int v = 0; v < NV; ++v) {
        store(a_at + v * W, a[v], lanes);
        store(b_at + v * W, b[v], lanes);
      }
    }
  }

  static void run(const ScanArgs& args, const O& options, Phase phase, std::int64_t index,
                  std::int64_t channel, L lanes) {
    const Layout& lay = args.layout;
    const bool by_chunk = phase == Phase::aggregate || phase == Phase::output;
    const std::int64_t s = by_chunk ? lay.sequence_of_chunk(index) : index;
    const Place at{s, lay.slot(s), lay.begin(s), lay.end(s), channel, options};
    if (phase == Phase::serial) serial(args, at, lanes);
    if (phase == Phase::carry) carry(args, at, lanes);
    if (phase == Phase::aggregate) one_chunk<false>(args, at, index, lanes);
    if (phase == Phase::output) one_chunk<true>(args, at, index, lanes);
  }
};

template <template <class> class CellOf, class O, class T>
void run_items(const ScanArgs& args, const O& options, Phase phase, std::int64_t begin,
               std::int64_t end) {
  constexpr int width = LanesOf<typename ComputeType<T>::type>::width;
  constexpr int vectors = static_cast<int>(kChannelBlock) / width;
  const Layout& lay = args.layout;
  const bool by_chunk = phase == Phase::aggregate || phase == Phase::output;
  const std::int64_t count = by_chunk ? lay.chunk_bound() : lay.sequences + 1;
  for (std::int64_t item = begin; item < end; ++item) {
    const std::int64_t index = item % count;
    std::int64_t channel = item / count * kChannelBlock;
    std::int64_t left = lay.channels - channel;
    if (left >= kChannelBlock) {
      Scan<CellOf, O, T, vectors, Full>::run(args, options, phase, index, channel, Full{});
      continue;
    }
    for (; left > 0; left -= width, channel += width) {
      const Part part{static_cast<int>(left < width ? left : width)};
      Scan<CellOf, O, T, 1, Part>::run(args, options, phase, index, channel, part);
    }
  }
}

// The kernel of a cell for a dtype; its options are chosen once per call of it.
template <template <class> class CellOf, class T>
void run_scan(const ScanArgs& args, Phase phase, std::int64_t begin, std::int64_t end) {
  with_options<CellOf<float>::kHasOptions>(args, [&](auto options) {
    run_items<CellOf, decltype(options), T>(args, options, phase, begin, end);
  });
}

template <template <class> class CellOf>
ScanFn scan_for(Dtype dtype) {
  switch (dtype) {
    case Dtype::f32:
      return &run_scan<CellOf, float>;
    case Dtype::f64:
      return &run_scan<CellOf, double>;
    case Dtype::bf16:
      return &run_scan<CellOf, bf16>;
    case Dtype::f16:
      return &run_scan<CellOf, f16>;
  }
  return nullptr;
}

}  // namespace MS_ISA
}  // namespace minserve
