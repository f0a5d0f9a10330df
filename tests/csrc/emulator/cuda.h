// What nvcc knows without any header, for kernels that a host compiler compiles.
//
// Included before the kernels; standard headers come first, since some of them look at __CUDACC__.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "machine.h"

#define __CUDACC__ 1
#define __device__
#define __host__
#define __global__
#define __shared__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __grid_constant__
#define __launch_bounds__(...)
#define __maxnreg__(...)

using std::max;
using std::min;

struct dim3 {
  unsigned x, y, z;
  explicit dim3(unsigned of_x, unsigned of_y = 1, unsigned of_z = 1) : x(of_x), y(of_y), z(of_z) {}
};
struct int2 {
  int x, y;
};
struct float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
inline int2 make_int2(int x, int y) {
  return {x, y};
}

using emulator::blockDim;
using emulator::blockIdx;
using emulator::gridDim;
using emulator::threadIdx;

// Kernels name their dynamic shared memory so. There is one such array; whichever block runs finds
// its own content in it.
namespace minserve {
namespace cuda {
extern uint4 memory[];
}
}  // namespace minserve

// --- bits

template <class To, class From>
inline To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From), "as many bits");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}
inline float __uint_as_float(unsigned x) {
  return bits_as<float>(x);
}
inline unsigned __float_as_uint(float x) {
  return bits_as<unsigned>(x);
}
inline long long __double_as_longlong(double x) {
  return bits_as<long long>(x);
}
inline double __longlong_as_double(long long x) {
  return bits_as<double>(x);
}
inline double __hiloint2double(int high, int low) {
  return bits_as<double>(static_cast<std::uint64_t>(static_cast<unsigned>(high)) << 32 |
                         static_cast<unsigned>(low));
}
inline int __double2loint(double x) {
  return static_cast<int>(bits_as<std::uint64_t>(x));
}
inline int __double2hiint(double x) {
  return static_cast<int>(bits_as<std::uint64_t>(x) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) {
  return static_cast<unsigned>((static_cast<unsigned long long>(high) << 32 | low) >> by % 32);
}
inline int __ffs(int x) {
  return __builtin_ffs(x);
}
template <class T>
T __ldcs(const T* at) {
  return *at;
}
inline int __clz(int x) {
  return x ? __builtin_clz(static_cast<unsigned>(x)) : 32;
}
inline int __popc(unsigned x) {
  return __builtin_popcount(x);
}
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const std::uint64_t bytes = static_cast<std::uint64_t>(y) << 32 | x;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    result |= static_cast<unsigned>(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  }
  return result;
}

// --- arithmetic

inline float rsqrtf(float x) {
  return 1.0f / std::sqrt(x);
}
inline float __fmaf_rn(float x, float y, float z) {
  return std::fma(x, y, z);
}
inline double __fma_rn(double x, double y, double z) {
  return std::fma(x, y, z);
}

inline float __fmaf_rd(float x, float y, float z) {
  // Exact, of what is multiplied and added so.
  const double exact =
      std::fma(static_cast<double>(x), static_cast<double>(y), static_cast<double>(z));
  const float sum = static_cast<float>(exact);
  return static_cast<double>(sum) > exact ? std::nextafter(sum, -INFINITY) : sum;
}
inline float __fadd_rd(float x, float y) {
  return __fmaf_rd(x, 1.0f, y);
}
inline double __dadd_rd(double x, double y) {
  const double sum = x + y, of_y = sum - x;
  const double lost = (x - (sum - of_y)) + (y - of_y);  // exactly (Knuth's TwoSum)
  return lost < 0 ? std::nextafter(sum, -INFINITY) : sum;
}

// --- two-byte floats

struct __nv_bfloat16 {
  unsigned short bits;
};
struct __nv_bfloat162 {
  __nv_bfloat16 x, y;
};
struct __half {
  unsigned short bits;
};
struct __half2 {
  __half x, y;
};

inline __nv_bfloat16 __float2bfloat16_rn(float x) {
  const unsigned bits = __float_as_uint(x);
  if (x != x) return {0x7fff};
  return {static_cast<unsigned short>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 x) {
  return x.bits;
}
inline __nv_bfloat162 __floats2bfloat162_rn(float low, float high) {
  return {__float2bfloat16_rn(low), __float2bfloat16_rn(high)};
}
inline __half __float2half_rn(float x) {
  return {bits_as<unsigned short>(static_cast<_Float16>(x))};
}
inline float __half2float(__half x) {
  return static_cast<float>(bits_as<_Float16>(x.bits));
}
inline __half __ushort_as_half(unsigned short bits) {
  return {bits};
}
inline unsigned short __half_as_ushort(__half x) {
  return x.bits;
}
inline __half2 __floats2half2_rn(float low, float high) {
  return {__float2half_rn(low), __float2half_rn(high)};
}
inline float2 __half22float2(__half2 pair) {
  return {__half2float(pair.x), __half2float(pair.y)};
}

// --- threads together

inline void __syncthreads() {
  emulator::sync_block();
}
inline void __syncwarp(unsigned mask = 0xffffffffu) {
  emulator::sync_warp(mask);
}
inline void __nanosleep(unsigned) {
  emulator::yield();
}
inline unsigned __ballot_sync(unsigned mask, bool mine) {
  return emulator::ballot(mask, mine);
}
inline int __syncthreads_count(int mine) {
  return emulator::count_block(mine != 0);
}
inline bool __all_sync(unsigned mask, bool mine) {
  return emulator::ballot(mask, mine) == 0xffffffffu;
}
inline bool __any_sync(unsigned mask, bool mine) {
  return emulator::ballot(mask, mine) != 0;
}
template <class T>
inline T exchange_of(unsigned mask, T mine, int from) {
  std::uint64_t bits = 0;
  static_assert(sizeof(T) <= sizeof bits, "one register or two");
  std::memcpy(&bits, &mine, sizeof mine);
  bits = emulator::exchange(mask, bits, from);
  std::memcpy(&mine, &bits, sizeof mine);
  return mine;
}
template <class T>
inline T __shfl_sync(unsigned mask, T mine, int from) {
  return exchange_of(mask, mine, from % 32);
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T mine, unsigned distance) {
  const int lane = static_cast<int>(threadIdx.x % 32), from = lane - static_cast<int>(distance);
  return exchange_of(mask, mine, from < 0 ? lane : from);
}
template <class T>
inline T __shfl_down_sync(unsigned mask, T mine, unsigned distance) {
  const int lane = static_cast<int>(threadIdx.x % 32), from = lane + static_cast<int>(distance);
  return exchange_of(mask, mine, from > 31 ? lane : from);
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T mine, int distance) {
  return exchange_of(mask, mine, static_cast<int>(threadIdx.x % 32) ^ distance);
}
inline unsigned atomicAdd(unsigned* at, unsigned more) {
  return emulator::change(at, [=](unsigned x) { return x + more; });
}
inline unsigned atomicCAS(unsigned* at, unsigned expected, unsigned wanted) {
  return emulator::change(at, [=](unsigned x) { return x == expected ? wanted : x; });
}
