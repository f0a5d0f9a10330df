// Neighbouring channels of one row, or neighbouring weights: read and written in as few accesses as
// their bytes allow.
#pragma once

#include <cstdint>

#include "vec.h"

namespace minserve {
namespace cuda {

// One access to whole words of four bytes, or to half a word. What is stored is put together into
// one number first: a store of several words the compiler may take apart.
template <int kBytes>
struct Access;
template <>
struct Access<16> {
  static __device__ __forceinline__ void load(const void* from, unsigned* words) {
    const uint4 all = *static_cast<const uint4*>(from);
    words[0] = all.x, words[1] = all.y, words[2] = all.z, words[3] = all.w;
  }
  static __device__ __forceinline__ void store(void* to, const unsigned* words) {
    const unsigned __int128 high = static_cast<unsigned long long>(words[3]) << 32 | words[2];
    *static_cast<unsigned __int128*>(to) =
        high << 64 | (static_cast<unsigned long long>(words[1]) << 32 | words[0]);
  }
};
template <>
struct Access<8> {
  static __device__ __forceinline__ void load(const void* from, unsigned* words) {
    const uint2 all = *static_cast<const uint2*>(from);
    words[0] = all.x, words[1] = all.y;
  }
  static __device__ __forceinline__ void store(void* to, const unsigned* words) {
    *static_cast<unsigned long long*>(to) =
        static_cast<unsigned long long>(words[1]) << 32 | words[0];
  }
};
template <>
struct Access<4> {
  static __device__ __forceinline__ void load(const void* from, unsigned* words) {
    words[0] = *static_cast<const unsigned*>(from);
  }
  static __device__ __forceinline__ void store(void* to, const unsigned* words) {
    *static_cast<unsigned*>(to) = words[0];
  }
};
template <>
struct Access<2> {
  static __device__ __forceinline__ void load(const void* from, unsigned* words) {
    words[0] = *static_cast<const unsigned short*>(from);
  }
  static __device__ __forceinline__ void store(void* to, const unsigned* words) {
    *static_cast<unsigned short*>(to) = static_cast<unsigned short>(words[0]);
  }
};

// Numbers out of words and into them; the last parameter names the type in memory.
__device__ __forceinline__ float number_of(const unsigned* words, int i, float) {
  return __uint_as_float(words[i]);
}
__device__ __forceinline__ double number_of(const unsigned* words, int i, double) {
  return __hiloint2double(static_cast<int>(words[2 * i + 1]), static_cast<int>(words[2 * i]));
}
__device__ __forceinline__ float number_of(const unsigned* words, int i, bf16) {
  return __uint_as_float(i % 2 == 0 ? words[i / 2] << 16 : words[i / 2] & 0xffff0000u);
}
__device__ __forceinline__ float number_of(const unsigned* words, int i, f16) {
  const unsigned bits = i % 2 == 0 ? words[i / 2] : words[i / 2] >> 16;
  return to_lane(f16{static_cast<std::uint16_t>(bits)});
}
template <int kCount>
__device__ __forceinline__ void words_of(const float (&x)[kCount], unsigned* words, float) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) words[i] = __float_as_uint(x[i]);
}
template <int kCount>
__device__ __forceinline__ void words_of(const double (&x)[kCount], unsigned* words, double) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    words[2 * i] = static_cast<unsigned>(__double2loint(x[i]));
    words[2 * i + 1] = static_cast<unsigned>(__double2hiint(x[i]));
  }
}
__device__ __forceinline__ unsigned rounded(float low, float high, bf16) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const unsigned*>(&pair);
}
__device__ __forceinline__ unsigned rounded(float low, float high, f16) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const unsigned*>(&pair);
}
template <int kCount, class T>
__device__ __forceinline__ void words_of(const float (&x)[kCount], unsigned* words, T type) {
#pragma unroll
  for (int i = 0; i < kCount; i += 2) {
    words[i / 2] = rounded(x[i], i + 1 < kCount ? x[i + 1] : 0.0f, type);
  }
}

// kCount numbers as they lie in memory, zero until they are loaded or set. Their address is a
// multiple of kAlignment.
template <class T, int kCount>
class Channels {
 public:
  using V = typename ComputeType<T>::type;
  static constexpr int kBytes = kCount * static_cast<int>(sizeof(T));
  static constexpr int kAlignment = (kBytes & -kBytes) < 16 ? kBytes & -kBytes : 16;

  __device__ __forceinline__ void load(const T* from) {
#pragma unroll
    for (int i = 0; i < kBytes; i += kAlignment) {
      Access<kAlignment>::load(reinterpret_cast<const char*>(from) + i, words_ + i / 4);
    }
  }
  __device__ __forceinline__ void store(T* to) const {
#pragma unroll
    for (int i = 0; i < kBytes; i += kAlignment) {
      Access<kAlignment>::store(reinterpret_cast<char*>(to) + i, words_ + i / 4);
    }
  }
  __device__ __forceinline__ V operator[](int i) const { return number_of(words_, i, T{}); }
  __device__ __forceinline__ void set(const V (&x)[kCount]) { words_of(x, words_, T{}); }

 private:
  static_assert(kBytes == 2 || kBytes % 4 == 0, "whole words, or half of one");
  unsigned words_[(kBytes + 3) / 4] = {};
};

// Whether all rows are aligned for Channels<T, kCount>: they begin at data and follow each other by
// stride elements.
template <class T, int kCount>
inline bool lie_aligned(const void* data, std::int64_t stride = 0) {
  constexpr int kAlignment = Channels<T, kCount>::kAlignment;
  return reinterpret_cast<std::uintptr_t>(data) % kAlignment == 0 &&
         stride * static_cast<std::int64_t>(sizeof(T)) % kAlignment == 0;
}

}  // namespace cuda
}  // namespace minserve
