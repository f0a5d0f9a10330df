// What a stage holds of each type of weights, and how a warp multiplies it: two tiles of 8 rows by
// 8 tokens on the tensor cores, 16 inputs at a time. The inputs lie as [units][tokens][8] for each
// block of a warp.
#pragma once

#include "../common/device.cuh"
#include "shared.cuh"

namespace minserve {
namespace cuda {
namespace whole {

// Four matrices of 8 rows by 16 bytes; lanes 8 i to 8 i + 7 have the addresses of matrix i's rows.
__device__ __forceinline__ uint4 load_matrices(std::uint32_t address) {
  uint4 all;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(all.x), "=r"(all.y), "=r"(all.z), "=r"(all.w)
               : "r"(address)
               : "memory");
  return all;
}
__device__ __forceinline__ uint4 load_shared(std::uint32_t address) {
  uint4 all;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(all.x), "=r"(all.y), "=r"(all.z), "=r"(all.w)
               : "r"(address)
               : "memory");
  return all;
}

// 16 rows of weights times 8 tokens, 16 inputs: rows 0 to 7 and 8 to 15 of the first eight inputs,
// then of the others.
__device__ __forceinline__ void multiply_step(float (&sums)[4], const uint4& w, unsigned x0,
                                              unsigned x1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(w.x), "r"(w.y), "r"(w.z), "r"(w.w), "r"(x0), "r"(x1));
}

template <WeightType kType>
struct Tiles;

// Fragments as they lie: rows of 128 bytes, swizzled.
template <>
struct Tiles<WeightType::bf16> {
  static constexpr bool kScaled = false;
  static constexpr int kBlocks = 1;  // of a warp in a stage
  uint4 w[4];

  // Of the four matrices that a lane has an address of a row of: inputs 0 to 7 of the first tile,
  // of the second, inputs 8 to 15 of both; inputs 0 to 31 of all tokens (those that are not there
  // are another's: what becomes of them is not looked at).
  static __device__ __forceinline__ std::uint32_t place_of_weights(int warp, int lane) {
    return warp * kBlock * kUnit * 2 + lane % 8 * 128 + ((lane / 16 ^ lane % 8) << 4);
  }
  static __device__ __forceinline__ std::uint32_t place_of_inputs(int lane, int batch) {
    return (lane / 8 * batch + min(lane % 8, batch - 1)) * 16;
  }
  __device__ __forceinline__ void load(std::uint32_t first, std::uint32_t second, int lane) {
    const std::uint32_t from = lane / 8 % 2 ? second : first;
#pragma unroll
    for (int i = 0; i < 4; ++i) w[i] = load_matrices(from ^ (i << 5));
  }
  __device__ __forceinline__ void multiply(float (&sums)[2][4], int, std::uint32_t inputs,
                                           int batch) const {
    const uint4 x = load_matrices(inputs), y = load_matrices(inputs + 4 * batch * 16);
    multiply_step(sums[0], w[0], x.x, x.y);
    multiply_step(sums[1], w[1], x.z, x.w);
    multiply_step(sums[0], w[2], y.x, y.y);
    multiply_step(sums[1], w[3], y.z, y.w);
  }
};

// Two finite bytes, the first or last of four, as two bfloat16; exact.
template <WeightType kType, bool kLast>
__device__ __forceinline__ unsigned widened(unsigned four) {
  unsigned low, high;
  if (kType == WeightType::int8) {
    // 128 + the low seven bits, less 128 or, where the sign is set, 256.
    const unsigned spread = __byte_perm(four, 0, kLast ? 0x4342 : 0x4140);
    low = (spread & 0x007f007fu) | 0x43004300u, high = (spread & 0x00800080u) | 0x43004300u;
    const __nv_bfloat162 value = __hsub2(*reinterpret_cast<const __nv_bfloat162*>(&low),
                                         *reinterpret_cast<const __nv_bfloat162*>(&high));
    return *reinterpret_cast<const unsigned*>(&value);
  }
  // Exponent and mantissa to where bfloat16 has theirs, and the difference of the biases, 2^120.
  const unsigned spread = __byte_perm(four, 0, kLast ? 0x3424 : 0x1404);
  low = (spread & 0x80008000u) | (spread >> 4 & 0x07f007f0u), high = 0x7b807b80u;
  const __nv_bfloat162 value = __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&low),
                                       *reinterpret_cast<const __nv_bfloat162*>(&high));
  return *reinterpret_cast<const unsigned*>(&value);
}

// A lane has 16 neighbouring inputs of a row and of a token: which inputs a fragment's registers
// stand for does not matter as long as both agree. Rows of 64 bytes.
template <WeightType kType>
struct EightBitTiles {
  static constexpr bool kScaled = true;
  static constexpr int kBlocks = 2;
  uint4 w[kBlocks][2];

  static __device__ __forceinline__ std::uint32_t place_of_weights(int warp, int lane) {
    return warp * kBlock * kUnit + lane * 16;
  }
  static __device__ __forceinline__ std::uint32_t place_of_inputs(int lane, int batch) {
    return (lane % 4 * 2 * batch + min(lane / 4, batch - 1)) * 16;
  }
  __device__ __forceinline__ void load(std::uint32_t first, std::uint32_t second, int) {
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      w[i][0] = load_shared(first + i * kMultiplying * kBlock * kUnit);
      w[i][1] = load_shared(second + i * kMultiplying * kBlock * kUnit);
    }
  }
  __device__ __forceinline__ void multiply(float (&sums)[2][4], int block, std::uint32_t inputs,
                                           int batch) const {
    const uint4 x = load_shared(inputs), y = load_shared(inputs + batch * 16);
    const uint4 &a = w[block][0], &b = w[block][1];
    step(sums[0], a.x, b.x, x.x, x.y);
    step(sums[1], a.y, b.y, x.z, x.w);
    step(sums[0], a.z, b.z, y.x, y.y);
    step(sums[1], a.w, b.w, y.z, y.w);
  }

 private:
  static __device__ __forceinline__ void step(float (&sums)[4], unsigned a, unsigned b, unsigned x0,
                                              unsigned x1) {
    multiply_step(sums,
                  make_uint4(widened<kType, false>(a), widened<kType, false>(b),
                             widened<kType, true>(a), widened<kType, true>(b)),
                  x0, x1);
  }
};
template <>
struct Tiles<WeightType::int8> : EightBitTiles<WeightType::int8> {};
template <>
struct Tiles<WeightType::fp8> : EightBitTiles<WeightType::fp8> {};

}  // namespace whole
}  // namespace cuda
}  // namespace minserve
