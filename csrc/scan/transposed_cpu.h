// A chunk of the affine scan on the CPU where time is contiguous and channels lie apart by a row.
//
// A line of channels by the steps of a chunk is transposed, in registers, into a buffer where
// channels are contiguous; there the line is walked as in tile_cpu.h, and the outputs are
// transposed back. The buffer holds the accumulation type, so every number is formed and rounded as
// it is where channels are contiguous.
#pragma once

#include "tile_cpu.h"

namespace minserve {
namespace MS_ISA {

// The first half of each, one by one in turns, and the second.
#if defined(MS_AVX512)
MS_CELL void interleave(VF x, VF y, VF& low, VF& high) {
  low = __builtin_shufflevector(x, y, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  high =
      __builtin_shufflevector(x, y, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
}
#elif defined(MS_AVX2)
MS_CELL void interleave(VF x, VF y, VF& low, VF& high) {
  low = __builtin_shufflevector(x, y, 0, 8, 1, 9, 2, 10, 3, 11);
  high = __builtin_shufflevector(x, y, 4, 12, 5, 13, 6, 14, 7, 15);
}
#else
MS_CELL void interleave(VF x, VF y, VF& low, VF& high) {
  low = __builtin_shufflevector(x, y, 0, 4, 1, 5);
  high = __builtin_shufflevector(x, y, 2, 6, 3, 7);
}
#endif

// Lane j of vector i to lane i of vector j: an interleaving of the halves for each bit of an index.
MS_CELL void transpose(VF (&x)[kWidth]) {
#pragma GCC unroll 4
  for (int bit = 1; bit < kWidth; bit *= 2) {
    VF y[kWidth];
#pragma GCC unroll 8
    for (int i = 0; i < kWidth / 2; ++i) {
      interleave(x[i], x[i + kWidth / 2], y[2 * i], y[2 * i + 1]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kWidth; ++i) x[i] = y[i];
  }
}
MS_CELL void transpose(double (&)[1]) {}

// The steps of a word of 32 bits, or the one of a double, to the accumulation type and back.
MS_CELL void open(VF word, VF (&x)[1], const float*) {
  x[0] = word;
}
MS_CELL VF close(const VF (&x)[1], const float*) {
  return x[0];
}
MS_CELL void open(double word, double (&x)[1], const double*) {
  x[0] = word;
}
MS_CELL double close(const double (&x)[1], const double*) {
  return x[0];
}
MS_CELL void open(VF word, VF (&x)[2], const bf16*) {
  x[0] = bit_cast<VF>(bit_cast<VU>(word) << 16);
  x[1] = bit_cast<VF>(bit_cast<VU>(word) & 0xffff0000u);
}
MS_CELL VF close(const VF (&x)[2], const bf16*) {
  return bit_cast<VF>((rounded(x[0]) >> 16) | (rounded(x[1]) & 0xffff0000u));
}
MS_CELL void open(VF word, VF (&x)[2], const f16* p) {
  const VU bits = bit_cast<VU>(word);
  x[0] = widen(__builtin_convertvector(bits & 0xffffu, VH), p);
  x[1] = widen(__builtin_convertvector(bits >> 16, VH), p);
}
MS_CELL VF close(const VF (&x)[2], const f16* p) {
  return bit_cast<VF>(__builtin_convertvector(narrow(x[0], p), VU) |
                      __builtin_convertvector(narrow(x[1], p), VU) << 16);
}

// T: element type of the streams, whose stride is 1: channels lie layout.time elements apart.
template <template <class> class CellOf, class O, class T>
struct TransposedTile : Tile<CellOf, O, typename LanesOf<typename ComputeType<T>::type>::scalar> {
  using S = typename LanesOf<typename ComputeType<T>::type>::scalar;
  using Flat = Tile<CellOf, O, S>;
  using V = typename Flat::V;
  using Cell = typename Flat::Cell;
  using Location = typename Flat::Location;
  using Lanes = typename Flat::Lanes;
  static constexpr int W = Flat::W, K = Flat::K;
  static constexpr int kOfWord = sizeof(T) == 2 ? 2 : 1;  // steps
  static constexpr int kSquare = W * kOfWord;             // steps of W rows of a register each
  // Steps that are asked for before they are read, in the second-level cache: rows a power of two
  // apart have no room in the first.
  static constexpr int kAhead = 8 * kLineBytes / static_cast<int>(sizeof(T));

  struct alignas(kLineBytes) Buffer {  // [step][channel], for inputs one more step on either side
    S inputs[Cell::kInputs][kScanChunk + 2][K], outputs[Cell::kOutputs][kScanChunk][K];
  };

  static bool lines_aligned(const ScanArgs& args) {
    bool aligned = args.layout.time * sizeof(T) % kLineBytes == 0;
    for (const Stream& s : args.outputs) {
      aligned = aligned && reinterpret_cast<std::uintptr_t>(s.data) % kLineBytes == 0;
    }
    return aligned;
  }

  template <bool kOutput>
  static void chunk(const ScanArgs& args, const Location& at, std::int64_t from, std::int64_t to,
                    Lanes& lanes) {
    Buffer buffer;
    for (int offset = 0; offset < at.width; offset += K) {
      if (offset + K <= at.width) {
        block<kOutput>(args, at, from, to, offset, lanes, buffer, Full{});
      } else {
        block<kOutput>(args, at, from, to, offset, lanes, buffer, Part{at.width - offset});
      }
    }
  }

  // A line of channels, `part` of which are there.
  template <bool kOutput, class L>
  static void block(const ScanArgs& args, const Location& at, std::int64_t from, std::int64_t to,
                    int offset, Lanes& lanes, Buffer& buffer, L part) {
    const bool reverse = args.layout.reverse;
    const int steps = static_cast<int>(to - from), first = reverse ? steps - 1 : 0;
    const std::int64_t apart = args.layout.time, length = at.end - at.begin;
    const std::int64_t start = reverse ? length - to : from;  // in time, of the sequence
    const std::int64_t origin =
        at.begin * args.layout.channels + (at.channel + offset) * apart + start;
    typename Flat::Walk walk;
    walk.channel = at.channel + offset;
    walk.near = false;
    for (int n = 0; n < Cell::kInputs; ++n) {
      const T* rows = static_cast<const T*>(args.inputs[n].data) + origin;
      S(*lines)[K] = buffer.inputs[n] + 1;
      to_lines(rows, apart, steps, reverse ? -kAhead : kAhead, lines, part);
      if (n == Cell::kPrevious && to < length) {
        const int next = reverse ? -1 : steps;
        column(rows + next, apart, lines[next], part);
      }
      walk.source[n] = lines[first];
      walk.source_step[n] = reverse ? -K : K;
    }
    for (int n = 0; n < Cell::kOutputs; ++n) {
      walk.target[n] = buffer.outputs[n][first];
      walk.target_step[n] = reverse ? -K : K;
    }
    Flat::template line<kOutput>(args, at, walk, from, to, true, offset, lanes, part);
    if (!kOutput) return;
    for (int n = 0; n < Cell::kOutputs; ++n) {
      T* rows = static_cast<T*>(args.outputs[n].data) + origin;
      to_rows(buffer.outputs[n], steps, rows, apart, at.past, part);
    }
  }

  template <class L>
  static void to_lines(const T* rows, std::int64_t apart, int steps, std::int64_t ahead,
                       S (*lines)[K], L part) {
    int t = 0;
    for (; t + kSquare <= steps; t += kSquare) {
      square_in(rows + t, apart, ahead, lines + t, part, Full{});
    }
    if (t < steps) square_in(rows + t, apart, 0, lines + t, part, Part{steps - t});
  }

  static MS_CELL unsigned bytes(Full) { return sizeof(V); }
  static MS_CELL unsigned bytes(Part steps) {
    return sizeof(T) * static_cast<unsigned>(steps.count);
  }

  template <class L, class Steps>
  static MS_CELL void square_in(const T* rows, std::int64_t apart, std::int64_t ahead,
                                S (*lines)[K], L part, Steps steps) {
    for (int c = 0; c < K; c += W) {
      V x[W];
#pragma GCC unroll 16
      for (int i = 0; i < W; ++i) {
        const T* row = rows + (c + i) * apart;
        x[i] = splat<V>(0.0f);
        if (c + i < Flat::lanes_in(part)) {
          __builtin_prefetch(row + ahead, 0, 2);
          __builtin_memcpy(&x[i], row, bytes(steps));
        }
      }
      transpose(x);
#pragma GCC unroll 16
      for (int i = 0; i < W; ++i) {
        V opened[kOfWord];
        open(x[i], opened, rows);
        for (int j = 0; j < kOfWord; ++j) Flat::set(lines[i * kOfWord + j] + c, opened[j]);
      }
    }
  }

  // One step.
  template <class L>
  static void column(const T* rows, std::int64_t apart, S* line, L part) {
    T copy[K] = {};
    for (int c = 0; c < Flat::lanes_in(part); ++c) copy[c] = rows[c * apart];
    for (int c = 0; c < K; c += W) Flat::set(line + c, load<V>(copy + c, Full{}));
  }

  template <class L>
  static void to_rows(const S (*lines)[K], int steps, T* rows, std::int64_t apart, bool past,
                      L part) {
    for (int c = 0; c < Flat::lanes_in(part); c += W) {
      const int count = Flat::lanes_in(part) - c;
      int t = 0;
      for (; t + kSquare <= steps; t += kSquare) {
        square_out(lines + t, c, count, rows + c * apart + t, apart, past, Full{});
      }
      if (t < steps) {
        square_out(lines + t, c, count, rows + c * apart + t, apart, past, Part{steps - t});
      }
    }
  }

  template <class Steps>
  static MS_CELL void square_out(const S (*lines)[K], int c, int count, T* rows, std::int64_t apart,
                                 bool past, Steps steps) {
    V x[W];
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i) {
      V opened[kOfWord];
      for (int j = 0; j < kOfWord; ++j) opened[j] = Flat::get(lines[i * kOfWord + j] + c);
      x[i] = close(opened, rows);
    }
    transpose(x);
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i) {
      if (i < count) write(rows + i * apart, x[i], past, steps);
    }
  }

  static MS_CELL void write(T* row, V x, bool past, Full) {
    if constexpr (sizeof(V) == sizeof(VU)) {
      if (past) return put(row, bit_cast<VU>(x), Past{});
    }
    __builtin_memcpy(row, &x, sizeof(x));
  }
  static MS_CELL void write(T* row, V x, bool, Part steps) {
    __builtin_memcpy(row, &x, bytes(steps));
  }
};

}  // namespace MS_ISA
}  // namespace minserve
