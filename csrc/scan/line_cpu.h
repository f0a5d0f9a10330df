// Lines: what the scans on the CPU move at once, 64 bytes of a stream, that is 16 floats or 32
// two-byte floats, and the vectors of lanes that they open into.
//
// Lines of bfloat16 open into even and odd channels (a shift and a mask, where opening in order
// takes a shuffle for each vector); Line::channel says which channel a lane holds, and whoever
// keeps lanes in memory keeps them in that order.
#pragma once

#include "../core/vec.h"

namespace minserve {
namespace MS_ISA {

// Full lines that are written past the caches: for outputs that would not stay in them. Saves
// reading each line of the output before it is overwritten. Needs 64-byte alignment.
struct Past : Full {};

constexpr int kLineBytes = 64;

MS_CELL void put(void* p, VU x, Full) {
  __builtin_memcpy(p, &x, sizeof(x));
}
MS_CELL void put(void* p, VU x, Past) {
#if defined(MS_AVX512)
  _mm512_stream_si512(static_cast<__m512i*>(p), (__m512i)x);
#elif defined(MS_AVX2)
  _mm256_stream_si256(static_cast<__m256i*>(p), (__m256i)x);
#else
  __builtin_memcpy(p, &x, sizeof(x));
#endif
}
// Makes what was written past the caches visible before anything that is written later.
MS_CELL void settle() {
#if defined(MS_AVX512) || defined(MS_AVX2)
  _mm_sfence();
#endif
}

constexpr int kRegister = sizeof(VF);
constexpr int kRegisters = kLineBytes / kRegister;

// A line that is all there; Line adds the partial one.
template <class T>
struct WholeLine;

template <>
struct WholeLine<float> {
  using V = VF;
  static constexpr int kVectors = kRegisters;
  static constexpr int channel(int lane) { return lane; }
  static MS_CELL void load(const float* p, V (&x)[kVectors]) {
    for (int i = 0; i < kVectors; ++i) __builtin_memcpy(&x[i], p + i * kWidth, sizeof(V));
  }
  template <class L>
  static MS_CELL void store(float* p, const V (&x)[kVectors], L lanes) {
    for (int i = 0; i < kVectors; ++i) put(p + i * kWidth, bit_cast<VU>(x[i]), lanes);
  }
};

template <>
struct WholeLine<bf16> {
  using V = VF;
  static constexpr int kVectors = 2 * kRegisters;
  static constexpr int channel(int lane) {
    const int vector = lane / kWidth, at = lane % kWidth;
    return vector / 2 * (2 * kWidth) + 2 * at + vector % 2;
  }
  static MS_CELL void load(const bf16* p, V (&x)[kVectors]) {
    for (int i = 0; i < kRegisters; ++i) {
      VU pair;
      __builtin_memcpy(&pair, p + i * 2 * kWidth, sizeof(pair));
      x[2 * i] = bit_cast<VF>(pair << 16);
      x[2 * i + 1] = bit_cast<VF>(pair & 0xffff0000u);
    }
  }
  template <class L>
  static MS_CELL void store(bf16* p, const V (&x)[kVectors], L lanes) {
    for (int i = 0; i < kRegisters; ++i) {
      const VU even = rounded(x[2 * i]), odd = rounded(x[2 * i + 1]);
      put(p + i * 2 * kWidth, (even >> 16) | (odd & 0xffff0000u), lanes);
    }
  }
};

template <>
struct WholeLine<f16> {
  using V = VF;
  static constexpr int kVectors = 2 * kRegisters;
  static constexpr int channel(int lane) { return lane; }
  static MS_CELL void load(const f16* p, V (&x)[kVectors]) {
    for (int i = 0; i < kVectors; ++i) {
      VH half;
      __builtin_memcpy(&half, p + i * kWidth, sizeof(half));
      x[i] = widen(half, p);
    }
  }
  template <class L>
  static MS_CELL void store(f16* p, const V (&x)[kVectors], L lanes) {
    for (int i = 0; i < kRegisters; ++i) {
      const VH both[2] = {narrow(x[2 * i], p), narrow(x[2 * i + 1], p)};
      VU bits;
      __builtin_memcpy(&bits, both, sizeof(bits));
      put(p + i * 2 * kWidth, bits, lanes);
    }
  }
};

template <>
struct WholeLine<double> {
  using V = double;
  static constexpr int kVectors = kLineBytes / 8;
  static constexpr int channel(int lane) { return lane; }
  static MS_CELL void load(const double* p, V (&x)[kVectors]) {
    for (int i = 0; i < kVectors; ++i) x[i] = p[i];
  }
  static MS_CELL void store(double* p, const V (&x)[kVectors], Full) {
    for (int i = 0; i < kVectors; ++i) p[i] = x[i];
  }
};

template <class T>
struct Line {
  using Whole = WholeLine<T>;
  using V = typename Whole::V;
  static constexpr int kVectors = Whole::kVectors;
  static constexpr int kChannels = kLineBytes / static_cast<int>(sizeof(T));

  static MS_CELL void load(const T* p, V (&x)[kVectors], Full) { Whole::load(p, x); }
  static MS_CELL void load(const T* p, V (&x)[kVectors], Part part) {
    T copy[kChannels] = {};
    __builtin_memcpy(copy, p, sizeof(T) * static_cast<unsigned>(part.count));
    Whole::load(copy, x);
  }
  static MS_CELL void store(T* p, const V (&x)[kVectors], Full lanes) { Whole::store(p, x, lanes); }
  static MS_CELL void store(T* p, const V (&x)[kVectors], Past lanes) { Whole::store(p, x, lanes); }
  static MS_CELL void store(T* p, const V (&x)[kVectors], Part part) {
    T copy[kChannels];
    Whole::store(copy, x, Full{});
    __builtin_memcpy(p, copy, sizeof(T) * static_cast<unsigned>(part.count));
  }
  // Numbers of the accumulation type, in the order of channels, to and from the order of lanes.
  template <class C, class S>
  static MS_CELL void to_lanes(const C* channels, S* lanes, int count) {
    if (count == kChannels) {
      for (int i = 0; i < kChannels; ++i) lanes[i] = channels[Whole::channel(i)];
    } else {
      for (int i = 0; i < kChannels; ++i) {
        lanes[i] = Whole::channel(i) < count ? S(channels[Whole::channel(i)]) : S(0);
      }
    }
  }
  template <class S>
  static MS_CELL void to_channels(const S* lanes, S* channels, int count) {
    if (count == kChannels) {
      for (int i = 0; i < kChannels; ++i) channels[Whole::channel(i)] = lanes[i];
    } else {
      for (int i = 0; i < kChannels; ++i) {
        if (Whole::channel(i) < count) channels[Whole::channel(i)] = lanes[i];
      }
    }
  }
};

}  // namespace MS_ISA
}  // namespace minserve
