// The affine scan on the CPU: h_t = a_t h_{t-1} + b_t over chunks of time, vectors over channels.
//
// An item is a run of channels (CpuTiling::width) of one sequence or chunk. It is walked in tiles
// of rows (tile_cpu.h), so that memory is read in runs as long as the item is wide.
//
// Items of the phases, in a wave of chunks where time is cut:
//   serial     channel run * (sequences + 1) + sequence   everything in one pass
//   aggregate  channel run * chunks of the wave + chunk   (A, B) of each chunk -> workspace
//   carry      channel run                                workspace A becomes each chunk's carry-in
//   output     channel run * chunks of the wave + chunk   outputs from the carry-in
// Sequence number `sequences` is the padding tail, whose rows are zeroed. In the serial phase
// sequences of one row go by step_cpu.h.
#pragma once

#include "step_cpu.h"
#include "../core/subnormals_cpu.h"
#include "tile_cpu.h"

namespace minserve {
namespace MS_ISA {

// T: element type of the streams. Tiles: Tile, or TransposedTile where time is contiguous.
template <template <class> class CellOf, class O, class T, class Tiles>
struct Scan {
  using Block = typename Tiles::Block;
  using V = typename Tiles::V;
  using S = typename Tiles::S;
  using Location = typename Tiles::Location;
  using Lanes = typename Tiles::Lanes;
  static constexpr int W = Tiles::W, K = Tiles::K;

  static MS_CELL V get(const S* p) { return Tiles::get(p); }
  static MS_CELL void set(S* p, V x) { Tiles::set(p, x); }

  static void zero(const ScanArgs& args, const Location& at, std::int64_t from, std::int64_t to) {
    for (const Stream& s : args.outputs) {
      if (!s.data) continue;
      for (std::int64_t row = from; row < to; ++row) {
        __builtin_memset(static_cast<T*>(s.data) + row * s.stride + at.channel, 0,
                         sizeof(T) * static_cast<unsigned>(at.width));
      }
    }
  }

  static int lanes_at(const Location& at, int offset) {
    return at.width - offset < K ? at.width - offset : K;
  }
  static void initial(const ScanArgs& args, const Location& at, S* h) {
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
  static void finish(const ScanArgs& args, const Location& at, const S* h) {
    S* p = static_cast<S*>(args.last);
    if (!p) return;
    p += at.slot * args.last_stride + at.channel;
    for (int i = 0; i < at.width; i += K) Block::to_channels(h + i, p + i, lanes_at(at, i));
  }

  // Over all lanes of an item's lines, those of a partial line included.
  static MS_CELL int lanes_of(const Location& at) { return (at.width + K - 1) / K * K; }
  // h <- a h + b
  static MS_CELL void advance(const Location& at, const S* a, const S* b, S* h) {
    const int count = lanes_of(at);
    for (int i = 0; i < count; i += W) set(h + i, fmadd(get(a + i), get(h + i), get(b + i)));
  }
  static MS_CELL void copy(const Location& at, const S* from, S* to) {
    const int count = lanes_of(at);
    for (int i = 0; i < count; i += W) set(to + i, get(from + i));
  }

  static void serial(const ScanArgs& args, const Location& at, Lanes& lanes) {
    if (at.slot < 0) return zero(args, at, at.begin, at.end);
    const std::int64_t length = at.end - at.begin;
    if (length == 1) {
      const Row row{at.begin, at.sequence, at.slot, at.channel, at.width};
      return Step<CellOf, O, T>::run(args, at.options, row);
    }
    initial(args, at, lanes.carry);
    for (std::int64_t from = 0; from < length; from += kScanChunk) {
      const std::int64_t to = from + kScanChunk < length ? from + kScanChunk : length;
      Tiles::template chunk<true>(args, at, from, to, lanes);
      advance(at, lanes.a, lanes.b, lanes.carry);
    }
    finish(args, at, lanes.carry);
  }

  // Rows of the workspace, in the order of lanes: A of the wave's chunks, B of them, and the state
  // between waves.
  static MS_CELL S* row_of(const ScanArgs& args, const CpuTiling& tiling, std::int64_t row,
                           std::int64_t channel) {
    return static_cast<S*>(args.workspace) + row * tiling.row_channels + channel;
  }

  static void carry(const ScanArgs& args, const O& options, const CpuTiling& tiling,
                    std::int64_t channel, int width, Lanes& lanes) {
    const std::int64_t chunks = tiling.last_chunk - tiling.first_chunk;
    Location at{0, 0, 0, 0, channel, width, false, options};
    S* between = row_of(args, tiling, 2 * tiling.wave_chunks, channel);
    copy(at, between, lanes.h);
    for (std::int64_t i = 0; i < chunks; ++i) {
      locate(args, tiling.first_chunk + i, at);
      if (at.slot < 0) continue;
      const std::int64_t from = position(args, tiling.first_chunk + i, at);
      if (from == 0) initial(args, at, lanes.h);
      if (from < at.end - at.begin) {
        S* a = row_of(args, tiling, i, channel);
        S* b = row_of(args, tiling, tiling.wave_chunks + i, channel);
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

  static MS_CELL void locate(const ScanArgs& args, std::int64_t chunk_index, Location& at) {
    const std::int64_t s = args.layout.sequence_of_chunk(chunk_index);
    at.sequence = s;
    at.slot = args.layout.slot(s);
    at.begin = args.layout.begin(s);
    at.end = args.layout.end(s);
  }
  static MS_CELL std::int64_t position(const ScanArgs& args, std::int64_t chunk_index,
                                       const Location& at) {
    return (chunk_index - args.layout.first_chunk(at.sequence)) * kScanChunk;
  }

  template <bool kOutput>
  static void one_chunk(const ScanArgs& args, const CpuTiling& tiling, Location& at,
                        std::int64_t index, Lanes& lanes) {
    locate(args, tiling.first_chunk + index, at);
    const std::int64_t length = at.end - at.begin;
    const std::int64_t from = position(args, tiling.first_chunk + index, at);
    if (from >= length) return;
    const std::int64_t to = from + kScanChunk < length ? from + kScanChunk : length;
    if (at.slot < 0) {
      if (kOutput) zero(args, at, at.begin + from, at.begin + to);
      return;
    }
    S* a = row_of(args, tiling, index, at.channel);
    if (kOutput) copy(at, a, lanes.carry);
    Tiles::template chunk<kOutput>(args, at, from, to, lanes);
    if (!kOutput) {
      copy(at, lanes.a, a);
      copy(at, lanes.b, row_of(args, tiling, tiling.wave_chunks + index, at.channel));
    }
  }

  static void run(const ScanArgs& args, const O& options, const CpuTiling& tiling, Phase phase,
                  std::int64_t begin, std::int64_t end) {
    const WithoutSubnormals of_aggregates;
    Lanes lanes;
    const Layout& lay = args.layout;
    const std::int64_t count = phase == Phase::serial  ? lay.sequences + 1
                               : phase == Phase::carry ? 1
                                                       : tiling.last_chunk - tiling.first_chunk;
    const bool past = tiling.past_caches && Tiles::lines_aligned(args);
    for (std::int64_t item = begin; item < end; ++item) {
      const std::int64_t index = item % count, channel = item / count * tiling.width;
      const std::int64_t left = lay.channels - channel;
      const int width = static_cast<int>(left < tiling.width ? left : tiling.width);
      Location at{index, 0, 0, 0, channel, width, past, options};
      if (phase == Phase::serial) {
        at.slot = lay.slot(index), at.begin = lay.begin(index), at.end = lay.end(index);
        serial(args, at, lanes);
      }
      if (phase == Phase::aggregate) one_chunk<false>(args, tiling, at, index, lanes);
      if (phase == Phase::carry) carry(args, options, tiling, channel, width, lanes);
      if (phase == Phase::output) one_chunk<true>(args, tiling, at, index, lanes);
    }
    if (past) settle();
  }
};

// The kernel of a cell for a dtype; its options are chosen once per call of it.
template <template <class> class CellOf, class T,
          template <template <class> class, class, class> class TileOf>
void run_scan(const ScanArgs& args, const CpuTiling& tiling, Phase phase, std::int64_t begin,
              std::int64_t end) {
  with_options<CellOf<float>::kHasOptions>(args, [&](auto options) {
    using O = decltype(options);
    Scan<CellOf, O, T, TileOf<CellOf, O, T>>::run(args, options, tiling, phase, begin, end);
  });
}

template <template <class> class CellOf,
          template <template <class> class, class, class> class TileOf = Tile>
ScanFn scan_for(Dtype dtype) {
  if constexpr (kIsThere<CellOf<float>>) {
    switch (dtype) {
      case Dtype::f32:
        return &run_scan<CellOf, float, TileOf>;
      case Dtype::f64:
#ifdef MS_BASELINE
        return &run_scan<CellOf, double, TileOf>;
#else
        return nullptr;  // launch.cpp takes the baseline's
#endif
      case Dtype::bf16:
        return &run_scan<CellOf, bf16, TileOf>;
      case Dtype::f16:
        return &run_scan<CellOf, f16, TileOf>;
    }
  }
  return nullptr;
}

}  // namespace MS_ISA
}  // namespace minserve
