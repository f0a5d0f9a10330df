// The affine scan on the CPU: h_t = a_t h_{t-1} + b_t over chunks of time, vectors over channels.
//
// A cell gives load() -> item with a and b, and emit(item, h before, h after). Items of the phases:
//   serial     channel block * sequences + sequence     everything in one pass
//   aggregate  channel block * chunk bound + chunk      (A, B) of each chunk -> workspace
//   carry      channel block * sequences + sequence     workspace A becomes each chunk's carry-in
//   output     channel block * chunk bound + chunk      outputs from the carry-in
// Sequence number `sequences` is the padding tail, whose rows are zeroed.
#pragma once

#include "scan_at.h"

namespace minserve {
namespace MS_ISA {

template <class Cell, int NV, class L>
struct Scan {
  using V = typename Cell::V;
  using S = typename LanesOf<V>::scalar;
  static constexpr int W = LanesOf<V>::width;

  static MS_CELL std::int64_t row(const Layout& lay, std::int64_t begin, std::int64_t end,
                                  std::int64_t position) {
    return lay.reverse ? end - 1 - position : begin + position;
  }

  // One chunk: outputs from h if wanted, and the aggregate.
  template <bool kOutput, bool kAggregate>
  static void chunk(const Cell& cell, const Layout& lay, At at, std::int64_t from, std::int64_t to,
                    const V* carry, V* a_all, V* b_all, L lanes) {
    V h[NV], a[NV], b[NV];
    for (int v = 0; v < NV; ++v) {
      if (kOutput) h[v] = carry[v];
      if (kAggregate) a[v] = splat<V>(1.0f), b[v] = splat<V>(0.0f);
    }
    const std::int64_t channel = at.channel;
    for (std::int64_t p = from; p < to; ++p) {
      at.row = row(lay, at.begin, at.end, p);
#pragma GCC unroll 16
      for (int v = 0; v < NV; ++v) {
        at.channel = channel + v * W;
        auto item = cell.load(at, lanes);
        if (kAggregate) {
          b[v] = fmadd(item.a, b[v], item.b);
          a[v] = item.a * a[v];
        }
        if (kOutput) {
          V after = fmadd(item.a, h[v], item.b);
          cell.emit(at, item, h[v], after, lanes);
          h[v] = after;
        }
      }
    }
    if (kAggregate) {
      for (int v = 0; v < NV; ++v) a_all[v] = a[v], b_all[v] = b[v];
    }
  }

  static void zero(const Cell& cell, const Layout&, At at, L lanes) {
    const std::int64_t channel = at.channel;
    for (at.row = at.begin; at.row < at.end; ++at.row) {
      for (int v = 0; v < NV; ++v) {
        at.channel = channel + v * W;
        cell.zero(at, lanes);
      }
    }
  }

  static MS_CELL void initial(const ScanArgs& args, std::int64_t slot, std::int64_t channel, V* h,
                              L lanes) {
    const S* p = static_cast<const S*>(args.initial);
    for (int v = 0; v < NV; ++v) {
      h[v] = p ? load<V>(p + slot * args.initial_stride + channel + v * W, lanes) : splat<V>(0.0f);
    }
  }
  static MS_CELL void finish(const ScanArgs& args, std::int64_t slot, std::int64_t channel,
                             const V* h, L lanes) {
    S* p = static_cast<S*>(args.last);
    if (!p) return;
    for (int v = 0; v < NV; ++v) {
      store(p + slot * args.last_stride + channel + v * W, h[v], lanes);
    }
  }

  static void serial(const Cell& cell, const ScanArgs& args, At at, L lanes) {
    const Layout& lay = args.layout;
    const std::int64_t slot = lay.slot(at.sequence);
    if (slot < 0) return zero(cell, lay, at, lanes);
    V h[NV], a[NV], b[NV];
    initial(args, slot, at.channel, h, lanes);
    const std::int64_t length = at.end - at.begin;
    for (std::int64_t from = 0; from < length; from += kScanChunk) {
      const std::int64_t to = from + kScanChunk < length ? from + kScanChunk : length;
      chunk<true, true>(cell, lay, at, from, to, h, a, b, lanes);
      for (int v = 0; v < NV; ++v) h[v] = fmadd(a[v], h[v], b[v]);
    }
    finish(args, slot, at.channel, h, lanes);
  }

  static void carry(const ScanArgs& args, At at, L lanes) {
    const Layout& lay = args.layout;
    const std::int64_t slot = lay.slot(at.sequence);
    if (slot < 0) return;
    V h[NV];
    initial(args, slot, at.channel, h, lanes);
    S* a_rows = static_cast<S*>(args.chunk_a);
    const S* b_rows = static_cast<const S*>(args.chunk_b);
    std::int64_t index = lay.first_chunk(at.sequence);
    for (std::int64_t from = at.begin; from < at.end; from += kScanChunk, ++index) {
      for (int v = 0; v < NV; ++v) {
        const std::int64_t where = index * lay.channels + at.channel + v * W;
        V a = load<V>(a_rows + where, lanes), b = load<V>(b_rows + where, lanes);
        store(a_rows + where, h[v], lanes);
        h[v] = fmadd(a, h[v], b);
      }
    }
    finish(args, slot, at.channel, h, lanes);
  }

  template <bool kOutput>
  static void one_chunk(const Cell& cell, const ScanArgs& args, At at, std::int64_t index,
                        L lanes) {
    const Layout& lay = args.layout;
    const std::int64_t length = at.end - at.begin;
    const std::int64_t from = (index - lay.first_chunk(at.sequence)) * kScanChunk;
    if (from >= length) return;
    const std::int64_t to = from + kScanChunk < length ? from + kScanChunk : length;
    if (lay.slot(at.sequence) < 0) {
      if (!kOutput) return;
      At part = at;
      part.begin = at.begin + from;
      part.end = at.begin + to;
      return zero(cell, lay, part, lanes);
    }
    S* a_rows = static_cast<S*>(args.chunk_a) + index * lay.channels + at.channel;
    S* b_rows = static_cast<S*>(args.chunk_b) + index * lay.channels + at.channel;
    V a[NV], b[NV];
    if (kOutput) {
      for (int v = 0; v < NV; ++v) a[v] = load<V>(a_rows + v * W, lanes);
      chunk<true, false>(cell, lay, at, from, to, a, a, b, lanes);
    } else {
      chunk<false, true>(cell, lay, at, from, to, a, a, b, lanes);
      for (int v = 0; v < NV; ++v) {
        store(a_rows + v * W, a[v], lanes);
        store(b_rows + v * W, b[v], lanes);
      }
    }
  }

  static void run(const Cell& cell, const ScanArgs& args, Phase phase, std::int64_t index,
                  std::int64_t channel, L lanes) {
    const Layout& lay = args.layout;
    const bool by_chunk = phase == Phase::aggregate || phase == Phase::output;
    const std::int64_t s = by_chunk ? lay.sequence_of_chunk(index) : index;
    const At at{s, lay.begin(s), lay.end(s), 0, channel};
    if (phase == Phase::serial) serial(cell, args, at, lanes);
    if (phase == Phase::carry) carry(args, at, lanes);
    if (phase == Phase::aggregate) one_chunk<false>(cell, args, at, index, lanes);
    if (phase == Phase::output) one_chunk<true>(cell, args, at, index, lanes);
  }
};

template <class Cell>
void run_scan(const ScanArgs& args, Phase phase, std::int64_t begin, std::int64_t end) {
  constexpr int width = LanesOf<typename Cell::V>::width;
  constexpr int vectors = static_cast<int>(kChannelBlock) / width;
  const Cell cell(args);
  const Layout& lay = args.layout;
  const bool by_chunk = phase == Phase::aggregate || phase == Phase::output;
  const std::int64_t count = by_chunk ? lay.chunk_bound() : lay.sequences + 1;
  for (std::int64_t item = begin; item < end; ++item) {
    const std::int64_t index = item % count;
    std::int64_t channel = item / count * kChannelBlock;
    std::int64_t left = lay.channels - channel;
    if (left >= kChannelBlock) {
      Scan<Cell, vectors, Full>::run(cell, args, phase, index, channel, Full{});
      continue;
    }
    for (; left > 0; left -= width, channel += width) {
      const Part part{static_cast<int>(left < width ? left : width)};
      Scan<Cell, 1, Part>::run(cell, args, phase, index, channel, part);
    }
  }
}

}  // namespace MS_ISA
}  // namespace minserve
