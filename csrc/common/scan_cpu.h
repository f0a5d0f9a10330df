// The affine scan on the CPU: h_t = a_t h_{t-1} + b_t over chunks of time, vectors over channels.
//
// An item is a run of channels (Share::width) of one sequence or chunk. It is walked in tiles of
// kTileRows rows, and each tile line by line: so memory is read in runs as long as the item is
// wide, while h, A and B of a line stay in registers for the rows of the tile and the gates of
// those rows, which do not depend on each other, overlap. Between tiles they lie in Lanes.
//
// Items of the phases, in a wave of chunks where time is cut:
//   serial     channel run * (sequences + 1) + sequence   everything in one pass
//   aggregate  channel run * chunks of the wave + chunk   (A, B) of each chunk -> workspace
//   carry      channel run                                workspace A becomes each chunk's carry-in
//   output     channel run * chunks of the wave + chunk   outputs from the carry-in
// Sequence number `sequences` is the padding tail, whose rows are zeroed. In the serial phase
// sequences of one row go by step_cpu.h.
#pragma once

#include "gates.h"
#include "step_cpu.h"

namespace minserve {
namespace MS_ISA {

// T: element type of the streams.
template <template <class> class CellOf, class O, class T>
struct Scan {
  using Block = Line<T>;
  using V = typename Block::V;
  using S = typename LanesOf<V>::scalar;
  using Cell = CellOf<V>;
  static constexpr int W = LanesOf<V>::width, N = Block::kVectors, K = Block::kChannels;
  static constexpr std::int64_t kTileRows = 16;
  static constexpr int kTogether = N < 2 ? 2 : 1;  // rows whose gates are formed side by side

  struct Place {  // of a sequence and a run of channels
    std::int64_t sequence, slot, begin, end, channel;
    int width;
    O options;
  };

  // By channel of the item, in the order of lanes of its lines.
  struct alignas(kLineBytes) Lanes {
    S carry[kWidestItem], h[kWidestItem], a[kWidestItem], b[kWidestItem];
  };

  static MS_CELL V get(const S* p) {
    V x;
    __builtin_memcpy(&x, p, sizeof(x));
    return x;
  }
  static MS_CELL void set(S* p, V x) { __builtin_memcpy(p, &x, sizeof(x)); }

  static MS_CELL int lanes_in(Full) { return K; }
  static MS_CELL int lanes_in(Part part) { return part.count; }

  // One line of channels for positions [from, to), at most a tile of them: the outputs if wanted
  // and the aggregate since the chunk's start, at which the tile is `fresh`.
  template <bool kOutput, class L>
  static void line(const ScanArgs& args, const Place& at, std::int64_t from, std::int64_t to,
                   bool fresh, int offset, Lanes& lanes, L part) {
    const bool reverse = args.layout.reverse;
    const std::int64_t row = reverse ? at.end - 1 - from : at.begin + from;
    const std::int64_t channel = at.channel + offset;
    const T* source[Cell::kInputs];
    T* target[Cell::kOutputs];
    std::int64_t source_step[Cell::kInputs], target_step[Cell::kOutputs];
    for (int n = 0; n < Cell::kInputs; ++n) {
      const Stream& s = args.inputs[n];
      source_step[n] = reverse ? -s.stride : s.stride;
      source[n] = static_cast<const T*>(s.data) + row * s.stride + channel;
    }
    for (int n = 0; n < Cell::kOutputs; ++n) {
      const Stream& s = args.outputs[n];
      target_step[n] = reverse ? -s.stride : s.stride;
      target[n] = static_cast<T*>(s.data) + row * s.stride + channel;
    }
    V h[N], a[N], b[N];
    for (int v = 0; v < N; ++v) {
      const int i = offset + v * W;
      if (kOutput) h[v] = get((fresh ? lanes.carry : lanes.h) + i);
      a[v] = fresh ? splat<V>(1.0f) : get(lanes.a + i);
      b[v] = fresh ? splat<V>(0.0f) : get(lanes.b + i);
    }
    std::int64_t p = from;
    for (; p + kTogether <= to; p += kTogether) {
      together<kOutput, kTogether>(args, at, p, channel, source, source_step, target, target_step,
                                   h, a, b, part);
    }
    for (; p < to; ++p) {
      together<kOutput, 1>(args, at, p, channel, source, source_step, target, target_step, h, a, b,
                           part);
    }
    for (int v = 0; v < N; ++v) {
      const int i = offset + v * W;
      if (kOutput) set(lanes.h + i, h[v]);
      set(lanes.a + i, a[v]);
      set(lanes.b + i, b[v]);
    }
  }

  // R rows from position p on: first the gates of all of them, which do not depend on each other,
  // so that the compiler can lay their chains of instructions side by side; then the recurrence.
  template <bool kOutput, int R, class L>
  static MS_CELL void together(const ScanArgs& args, const Place& at, std::int64_t p,
                               std::int64_t channel, const T* (&source)[Cell::kInputs],
                               const std::int64_t (&source_step)[Cell::kInputs],
                               T* (&target)[Cell::kOutputs],
                               const std::int64_t (&target_step)[Cell::kOutputs], V (&h)[N],
                               V (&a)[N], V (&b)[N], L part) {
    V in[R][Cell::kInputs][N];
    Affine<V> step[R][N];
    const std::int64_t last = at.end - at.begin - 1;
    const std::int64_t ahead = p + R - 1 + kTileRows <= last ? kTileRows : 0;
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int n = 0; n < Cell::kInputs; ++n) {
        if (n == Cell::kPrevious) {
          previous(args, at, p + r == last, source[n] + source_step[n], channel, in[r][n], part);
        } else {
          Block::load(source[n], in[r][n], part);
        }
        __builtin_prefetch(source[n] + ahead * source_step[n]);
        source[n] += source_step[n];
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < N; ++v) {
        V x[Cell::kInputs];
        for (int n = 0; n < Cell::kInputs; ++n) x[n] = in[r][n][v];
        step[r][v] = Cell::affine(at.options, x);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      V out[Cell::kOutputs][N];
#pragma GCC unroll 8
      for (int v = 0; v < N; ++v) {
        const Affine<V> now = step[r][v];
        b[v] = fmadd(now.a, b[v], now.b);
        a[v] = now.a * a[v];
        if (kOutput) {
          const V before = h[v];
          h[v] = fmadd(now.a, before, now.b);
          V x[Cell::kInputs], y[Cell::kOutputs];
          for (int n = 0; n < Cell::kInputs; ++n) x[n] = in[r][n][v];
          Cell::outputs(at.options, x, before, h[v], y);
          for (int n = 0; n < Cell::kOutputs; ++n) out[n][v] = y[n];
        }
      }
      if (kOutput) {
#pragma GCC unroll 8
        for (int n = 0; n < Cell::kOutputs; ++n) {
          Block::store(target[n], out[n], part);
          target[n] += target_step[n];
        }
      }
    }
  }

  // The state before an element in forward order, which a backward scan runs against: the next
  // row that the scan comes to, or where that was the last one, h0.
  template <class L>
  static MS_CELL void previous(const ScanArgs& args, const Place& at, bool last, const T* next,
                               std::int64_t channel, V (&x)[N], L part) {
    if (!last) return Block::load(next, x, part);
    const S* h0 = static_cast<const S*>(args.h0);
    S ordered[K] = {};
    if (h0) {
      h0 += at.sequence * args.layout.channels + channel;
      Block::to_lanes(h0, ordered, lanes_in(part));
    }
    for (int v = 0; v < N; ++v) x[v] = get(ordered + v * W);
  }

  // Positions [from, to) of one chunk.
  template <bool kOutput>
  static void chunk(const ScanArgs& args, const Place& at, std::int64_t from, std::int64_t to,
                    Lanes& lanes) {
    for (std::int64_t p = from; p < to; p += kTileRows) {
      const std::int64_t q = p + kTileRows < to ? p + kTileRows : to;
      int offset = 0;
      for (; offset + K <= at.width; offset += K) {
        line<kOutput>(args, at, p, q, p == from, offset, lanes, Full{});
      }
      if (offset < at.width) {
        line<kOutput>(args, at, p, q, p == from, offset, lanes, Part{at.width - offset});
      }
    }
  }

  static void zero(const ScanArgs& args, const Place& at, std::int64_t from, std::int64_t to) {
    for (const Stream& s : args.outputs) {
      if (!s.data) continue;
      for (std::int64_t row = from; row < to; ++row) {
        __builtin_memset(static_cast<T*>(s.data) + row * s.stride + at.channel, 0,
                         sizeof(T) * static_cast<unsigned>(at.width));
      }
    }
  }

  static int lanes_at(const Place& at, int offset) {
    return at.width - offset < K ? at.width - offset : K;
  }
  static void initial(const ScanArgs& args, const Place& at, S* h) {
    const S* p = static_cast<const S*>(args.initial);
    if (p) p += at.slot * args.initial_stride + at.channel;
    for (int i = 0; i < at.width; i += K) {
      if (p) {
        Block::to_lanes(p + i, h + i, lanes_at(at, i));
      } else {
        for (int lane = 0; lane < K; ++lane) h[i + lane] = S(0);
      }
    }
  }
  static void finish(const ScanArgs& args, const Place& at, const S* h) {
    S* p = static_cast<S*>(args.last);
    if (!p) return;
    p += at.slot * args.last_stride + at.channel;
    for (int i = 0; i < at.width; i += K) Block::to_channels(h + i, p + i, lanes_at(at, i));
  }

  // Over all lanes of an item's lines, those of a partial line included.
  static MS_CELL int lanes_of(const Place& at) { return (at.width + K - 1) / K * K; }
  // h <- a h + b
  static MS_CELL void advance(const Place& at, const S* a, const S* b, S* h) {
    const int count = lanes_of(at);
    for (int i = 0; i < count; i += W) set(h + i, fmadd(get(a + i), get(h + i), get(b + i)));
  }
  static MS_CELL void copy(const Place& at, const S* from, S* to) {
    const int count = lanes_of(at);
    for (int i = 0; i < count; i += W) set(to + i, get(from + i));
  }

  static void serial(const ScanArgs& args, const Place& at, Lanes& lanes) {
    if (at.slot < 0) return zero(args, at, at.begin, at.end);
    const std::int64_t length = at.end - at.begin;
    if (length == 1) {
      const Row row{at.begin, at.sequence, at.slot, at.channel, at.width};
      return Step<CellOf, O, T>::run(args, at.options, row);
    }
    initial(args, at, lanes.carry);
    for (std::int64_t from = 0; from < length; from += kScanChunk) {
      const std::int64_t to = from + kScanChunk < length ? from + kScanChunk : length;
      chunk<true>(args, at, from, to, lanes);
      advance(at, lanes.a, lanes.b, lanes.carry);
    }
    finish(args, at, lanes.carry);
  }

  // Rows of the workspace, in the order of lanes: A of the wave's chunks, B of them, and the state
  // between waves.
  static MS_CELL S* row_of(const ScanArgs& args, const Share& share, std::int64_t row,
                           std::int64_t channel) {
    return static_cast<S*>(args.workspace) + row * share.row_channels + channel;
  }

  static void carry(const ScanArgs& args, const O& options, const Share& share,
                    std::int64_t channel, int width, Lanes& lanes) {
    const std::int64_t chunks = share.last_chunk - share.first_chunk;
    Place at{0, 0, 0, 0, channel, width, options};
    S* between = row_of(args, share, 2 * share.wave_chunks, channel);
    copy(at, between, lanes.h);
    for (std::int64_t i = 0; i < chunks; ++i) {
      place(args, share.first_chunk + i, at);
      if (at.slot < 0) continue;
      const std::int64_t from = position(args, share.first_chunk + i, at);
      if (from == 0) initial(args, at, lanes.h);
      if (from < at.end - at.begin) {
        S* a = row_of(args, share, i, channel);
        S* b = row_of(args, share, share.wave_chunks + i, channel);
        copy(at, lanes.h, lanes.carry);
        advance(at, a, b, lanes.h);
        copy(at, lanes.carry, a);
      }
      const std::int64_t length = at.end - at.begin;
      if (from <= length && length <= from + kScanChunk && (from == 0 || from < length)) {
        finish(args, at, lanes.h);
      }
    }
    copy(at, lanes.h, between);
  }

  static MS_CELL void place(const ScanArgs& args, std::int64_t chunk_index, Place& at) {
    const std::int64_t s = args.layout.sequence_of_chunk(chunk_index);
    at.sequence = s;
    at.slot = args.layout.slot(s);
    at.begin = args.layout.begin(s);
    at.end = args.layout.end(s);
  }
  static MS_CELL std::int64_t position(const ScanArgs& args, std::int64_t chunk_index,
                                       const Place& at) {
    return (chunk_index - args.layout.first_chunk(at.sequence)) * kScanChunk;
  }

  template <bool kOutput>
  static void one_chunk(const ScanArgs& args, const Share& share, Place& at, std::int64_t index,
                        Lanes& lanes) {
    place(args, share.first_chunk + index, at);
    const std::int64_t length = at.end - at.begin;
    const std::int64_t from = position(args, share.first_chunk + index, at);
    if (from >= length) return;
    const std::int64_t to = from + kScanChunk < length ? from + kScanChunk : length;
    if (at.slot < 0) {
      if (kOutput) zero(args, at, at.begin + from, at.begin + to);
      return;
    }
    S* a = row_of(args, share, index, at.channel);
    if (kOutput) copy(at, a, lanes.carry);
    chunk<kOutput>(args, at, from, to, lanes);
    if (!kOutput) {
      copy(at, lanes.a, a);
      copy(at, lanes.b, row_of(args, share, share.wave_chunks + index, at.channel));
    }
  }

  static void run(const ScanArgs& args, const O& options, const Share& share, Phase phase,
                  std::int64_t begin, std::int64_t end) {
    Lanes lanes;
    const Layout& lay = args.layout;
    const std::int64_t count = phase == Phase::serial  ? lay.sequences + 1
                               : phase == Phase::carry ? 1
                                                       : share.last_chunk - share.first_chunk;
    for (std::int64_t item = begin; item < end; ++item) {
      const std::int64_t index = item % count, channel = item / count * share.width;
      const std::int64_t left = lay.channels - channel;
      const int width = static_cast<int>(left < share.width ? left : share.width);
      Place at{index, 0, 0, 0, channel, width, options};
      if (phase == Phase::serial) {
        at.slot = lay.slot(index), at.begin = lay.begin(index), at.end = lay.end(index);
        serial(args, at, lanes);
      }
      if (phase == Phase::aggregate) one_chunk<false>(args, share, at, index, lanes);
      if (phase == Phase::carry) carry(args, options, share, channel, width, lanes);
      if (phase == Phase::output) one_chunk<true>(args, share, at, index, lanes);
    }
  }
};

// The kernel of a cell for a dtype; its options are chosen once per call of it.
template <template <class> class CellOf, class T>
void run_scan(const ScanArgs& args, const Share& share, Phase phase, std::int64_t begin,
              std::int64_t end) {
  with_options<CellOf<float>::kHasOptions>(args, [&](auto options) {
    Scan<CellOf, decltype(options), T>::run(args, options, share, phase, begin, end);
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
