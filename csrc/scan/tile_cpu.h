// A tile of the affine scan on the CPU: some rows of a run of channels, line by line.
//
// h, A and B of a line stay in registers for the rows of the tile, and the gates of those rows,
// which do not depend on each other, overlap. Between tiles they lie in Lanes. What a line reads,
// it asked the second-level cache for a tile before: the first-level cache has no room for most
// tiles, and none at all where rows lie a power of two apart.
#pragma once

#include "../cells/gates.h"
#include "args.h"
#include "line_cpu.h"

namespace minserve {
namespace MS_ISA {

// T: element type of the streams.
template <template <class> class CellOf, class O, class T>
struct Tile {
  using Block = Line<T>;
  using V = typename Block::V;
  using S = typename LanesOf<V>::scalar;
  using Cell = CellOf<V>;
  static constexpr int W = LanesOf<V>::width, N = Block::kVectors, K = Block::kChannels;
  static constexpr std::int64_t kRows = 16;
  // Bytes of inputs of a tile up to which the first-level cache is asked, where the arithmetic of a
  // line is so much that it, not memory, bounds the scan: it pays up to twice what that cache
  // holds.
  static constexpr std::size_t kNearBytes = 80 * 1024;
  static constexpr int kTogether = 2;  // rows whose gates are formed side by side, if kLoadsFirst
  // Whether the next rows are loaded before these are stored, which takes registers. A load is held
  // up by any store under way to the same place of another page, as when rows of inputs and outputs
  // lie multiples of 4 KiB apart: it would wait for all the arithmetic of the rows before.
  static constexpr bool kLoadsFirst = N < 2;

  using OfChannels = Parameters<V, Cell::kParameters>[N];

  struct Location {  // of a sequence and a run of channels
    std::int64_t sequence, slot, begin, end, channel;
    int width;
    bool past;
    O options;
  };

  // By channel of the item, in the order of lanes of its lines.
  struct alignas(kLineBytes) Lanes {
    S carry[kWidestItem], h[kWidestItem], a[kWidestItem], b[kWidestItem];
  };

  struct Walk {  // over the rows of a line
    const T* source[Cell::kInputs];
    T* target[Cell::kOutputs];
    std::int64_t source_step[Cell::kInputs], target_step[Cell::kOutputs];
    std::int64_t channel;
    bool near;  // whether to ask the first-level cache
  };

  static MS_CELL V get(const S* p) {
    V x;
    __builtin_memcpy(&x, p, sizeof(x));
    return x;
  }
  static MS_CELL void set(S* p, V x) { __builtin_memcpy(p, &x, sizeof(x)); }

  static MS_CELL int lanes_in(Full) { return K; }
  static MS_CELL int lanes_in(Part part) { return part.count; }

  // From position `from` of a sequence on.
  static MS_CELL Walk walk_from(const ScanArgs& args, const Location& at, std::int64_t from,
                                int offset) {
    const bool reverse = args.layout.reverse;
    const std::int64_t row = reverse ? at.end - 1 - from : at.begin + from;
    Walk walk;
    walk.channel = at.channel + offset;
    walk.near = N > 1 && kRows * at.width * Cell::kInputs * sizeof(T) <= kNearBytes;
    for (int n = 0; n < Cell::kInputs; ++n) {
      const Stream& s = args.inputs[n];
      walk.source_step[n] = reverse ? -s.stride : s.stride;
      walk.source[n] = static_cast<const T*>(s.data) + row * s.stride + walk.channel;
    }
    for (int n = 0; n < Cell::kOutputs; ++n) {
      const Stream& s = args.outputs[n];
      walk.target_step[n] = reverse ? -s.stride : s.stride;
      walk.target[n] = static_cast<T*>(s.data) + row * s.stride + walk.channel;
    }
    return walk;
  }

  // One line of channels for positions [from, to): the outputs if wanted and the aggregate since
  // the chunk's start, at which the tile is `fresh`.
  template <bool kOutput, class L>
  static void line(const ScanArgs& args, const Location& at, Walk walk, std::int64_t from,
                   std::int64_t to, bool fresh, int offset, Lanes& lanes, L part) {
    V h[N], a[N], b[N];
    OfChannels parameters;
    load_parameters(args, walk.channel, parameters, part);
    for (int v = 0; v < N; ++v) {
      const int i = offset + v * W;
      if (kOutput) h[v] = get((fresh ? lanes.carry : lanes.h) + i);
      a[v] = fresh ? splat<V>(1.0f) : get(lanes.a + i);
      b[v] = fresh ? splat<V>(0.0f) : get(lanes.b + i);
    }
    std::int64_t p = from;
    if constexpr (kLoadsFirst) {
      if (p + kTogether <= to) {
        V in[kTogether][Cell::kInputs][N];
        fetch(args, at, p, walk, in, part);
        for (; p + 2 * kTogether <= to; p += kTogether) {
          rows<kOutput>(args, at, p, true, walk, in, parameters, h, a, b, part);
        }
        rows<kOutput>(args, at, p, false, walk, in, parameters, h, a, b, part);
        p += kTogether;
      }
    }
    for (; p < to; ++p) {
      V in[1][Cell::kInputs][N];
      fetch(args, at, p, walk, in, part);
      rows<kOutput>(args, at, p, false, walk, in, parameters, h, a, b, part);
    }
    for (int v = 0; v < N; ++v) {
      const int i = offset + v * W;
      if (kOutput) set(lanes.h + i, h[v]);
      set(lanes.a + i, a[v]);
      set(lanes.b + i, b[v]);
    }
  }

  // Positions [from, to) of one chunk.
  template <bool kOutput>
  static void chunk(const ScanArgs& args, const Location& at, std::int64_t from, std::int64_t to,
                    Lanes& lanes) {
    for (std::int64_t p = from; p < to; p += kRows) {
      const std::int64_t q = p + kRows < to ? p + kRows : to;
      const auto next = [&](int offset, auto part) {
        line<kOutput>(args, at, walk_from(args, at, p, offset), p, q, p == from, offset, lanes,
                      part);
      };
      int offset = 0;
      for (; offset + K <= at.width; offset += K) {
        if constexpr (kOutput && sizeof(S) == sizeof(float)) {
          if (at.past) {
            next(offset, Past{});
            continue;
          }
        }
        next(offset, Full{});
      }
      if (offset < at.width) next(offset, Part{at.width - offset});
    }
  }

  template <class L>
  static MS_CELL void load_parameters(const ScanArgs& args, std::int64_t channel, OfChannels& to,
                                      L part) {
    if constexpr (Cell::kParameters > 0) {
      for (int n = 0; n < Cell::kParameters; ++n) {
        S ordered[K] = {};
        if (args.parameters[n]) {
          Block::to_lanes(args.parameters[n] + channel, ordered, lanes_in(part));
        }
        for (int v = 0; v < N; ++v) to[v].at[n] = get(ordered + v * W);
      }
    }
  }

  // Whether outputs may be written past the caches in whole lines.
  static bool lines_aligned(const ScanArgs& args) {
    bool aligned = true;
    for (const Stream& s : args.outputs) {
      aligned = aligned && reinterpret_cast<std::uintptr_t>(s.data) % kLineBytes == 0 &&
                s.stride % K == 0;
    }
    return aligned;
  }

  // The inputs of R rows from position p on.
  template <int R, class L>
  static MS_CELL void fetch(const ScanArgs& args, const Location& at, std::int64_t p, Walk& walk,
                            V (&in)[R][Cell::kInputs][N], L part) {
    const std::int64_t last = at.end - at.begin - 1;
    const std::int64_t ahead = p + R - 1 + kRows <= last ? kRows : 0;
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int n = 0; n < Cell::kInputs; ++n) {
        const T* source = walk.source[n];
        walk.source[n] += walk.source_step[n];
        if (n == Cell::kPrevious) {
          previous(args, at, p + r == last, walk.source[n], walk.channel, in[r][n], part);
        } else {
          Block::load(source, in[r][n], part);
        }
        const T* later = source + ahead * walk.source_step[n];
        if (walk.near) {
          __builtin_prefetch(later, 0, 3);
        } else {
          __builtin_prefetch(later, 0, 2);
        }
      }
    }
  }

  // R rows from position p on: first the gates of all of them, which do not depend on each other,
  // so that the compiler can lay their chains of instructions side by side; then the recurrence;
  // then the inputs of R rows more, if any, take the place of these.
  template <bool kOutput, int R, class L>
  static MS_CELL void rows(const ScanArgs& args, const Location& at, std::int64_t p, bool more,
                           Walk& walk, V (&in)[R][Cell::kInputs][N], const OfChannels& parameters,
                           V (&h)[N], V (&a)[N], V (&b)[N], L part) {
    Affine<V> step[R][N];
    V out[R][Cell::kOutputs][N];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < N; ++v) {
        V x[Cell::kInputs];
        for (int n = 0; n < Cell::kInputs; ++n) x[n] = in[r][n][v];
        step[r][v] = Cell::coefficients(at.options, x, parameters[v]);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
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
          for (int n = 0; n < Cell::kOutputs; ++n) out[r][n][v] = y[n];
        }
      }
    }
    if constexpr (kLoadsFirst) {
      // Or the compiler would load them before it is done with these, and run out of registers.
      __asm__ volatile("" ::: "memory");
      if (more) fetch(args, at, p + R, walk, in, part);
    }
    if (kOutput) {
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
        for (int n = 0; n < Cell::kOutputs; ++n) {
          Block::store(walk.target[n], out[r][n], part);
          walk.target[n] += walk.target_step[n];
        }
      }
    }
  }

  // The state before an element in forward order, which a backward scan runs against: the next
  // row that the scan comes to, or where that was the last one, h0.
  template <class L>
  static MS_CELL void previous(const ScanArgs& args, const Location& at, bool last, const T* next,
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
};

}  // namespace MS_ISA
}  // namespace minserve
