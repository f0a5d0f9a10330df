// A stage of weights, by their type, and how a warp multiplies it on the tensor cores: two tiles of
// 8 rows by 8 columns of inputs (activation_tiles.cuh).
#pragma once

#include "../arch/ptx.cuh"
#include "activation_tiles.cuh"
#include "smem_layout.cuh"

namespace minserve {
namespace cuda {
namespace persistent {

// Rows of weights lie swizzled, so that what a warp loads at once meets all banks.
template <WeightType kType, bool kSplit>
struct Tiles;

// Of all tokens: a lane has two neighbouring ones of a row of each tile.
struct AllTokenSums {
  static __device__ __forceinline__ int first_token(int lane) { return lane % 4 * 2; }
  float parts[2][4] = {};
  __device__ __forceinline__ void store(float* first, float* second, bool two) const {
    first[0] = parts[0][0] + parts[1][0];
    first[kUnit] = parts[0][1] + parts[1][1];
    if (!two) return;
    second[0] = parts[0][2] + parts[1][2];
    second[kUnit] = parts[0][3] + parts[1][3];
  }
};

// Fragments as they lie.
template <>
struct Tiles<WeightType::bf16, false> {
  using Sums = AllTokenSums;
  // Inputs 0 to 31 of all tokens, then the others. (Tokens that are not there are another's: what
  // becomes of them is not looked at.)
  struct Inputs {
    std::uint32_t at, step;  // to the other half
    __device__ __forceinline__ Inputs(std::uint32_t own, int lane, int batch)
        : at(own + (lane / 8 * batch + min(lane % 8, batch - 1)) * 16), step(4 * batch * 16) {}
    __device__ __forceinline__ void advance(int bytes) { at += bytes; }
  };

  uint4 w[4];

  // Of the four matrices that a lane has an address of a row of: inputs 0 to 7 of the first tile,
  // of the second, inputs 8 to 15 of both.
  static __device__ __forceinline__ int offset_of(int lane) {
    return lane % 8 * kBlockBytes + ((lane / 16 ^ lane % 8) << 4);
  }
  __device__ __forceinline__ void load(std::uint32_t first, std::uint32_t second, int lane) {
    const std::uint32_t from = lane / 8 % 2 ? second : first;
#pragma unroll
    for (int i = 0; i < 4; ++i) w[i] = ldmatrix_x4(from ^ (i << 5));
  }
  __device__ __forceinline__ void multiply(Sums& sums, const Inputs& inputs) const {
    const uint4 x = ldmatrix_x4(inputs.at), y = ldmatrix_x4(inputs.at + inputs.step);
    mma_bf16(sums.parts[0], w[0], x.x, x.y);
    mma_bf16(sums.parts[1], w[1], x.z, x.w);
    mma_bf16(sums.parts[0], w[2], y.x, y.y);
    mma_bf16(sums.parts[1], w[3], y.z, y.w);
  }
};

// A lane has twice 16 neighbouring inputs of a row and of a column: which inputs a fragment's
// registers stand for does not matter as long as both agree.
struct EightBitWeights {
  uint4 w[2][2];

  static __device__ __forceinline__ int offset_of(int lane) {
    return lane / 4 * kBlockBytes + ((lane % 4 * 2 ^ lane / 4) << 4);
  }
  __device__ __forceinline__ void load(std::uint32_t first, std::uint32_t second, int) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      w[half][0] = load_shared(first ^ (half << 4));
      w[half][1] = load_shared(second ^ (half << 4));
    }
  }
};

// (x & mask) | bits, in one instruction.
__device__ __forceinline__ unsigned masked(unsigned x, unsigned mask, unsigned bits) {
  unsigned y;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(y) : "r"(x), "r"(mask), "r"(bits));
  return y;
}

// Two finite bytes, the first or last of four, as two bfloat16; exact.
template <WeightType kType, bool kLast>
__device__ __forceinline__ unsigned widened(unsigned four) {
  unsigned low, high;
  if (kType == WeightType::int8) {
    // 128 + the low seven bits, less 128 or, where the sign is set, 256.
    const unsigned spread = __byte_perm(four, 0, kLast ? 0x4342 : 0x4140);
    low = masked(spread, 0x007f007fu, 0x43004300u);
    high = masked(spread, 0x00800080u, 0x43004300u);
    const __nv_bfloat162 value = __hsub2(*reinterpret_cast<const __nv_bfloat162*>(&low),
                                         *reinterpret_cast<const __nv_bfloat162*>(&high));
    return *reinterpret_cast<const unsigned*>(&value);
  }
  // Exponent and mantissa to where bfloat16 has theirs, and the difference of the biases, 2^120.
  const unsigned spread = __byte_perm(four, 0, kLast ? 0x3424 : 0x1404);
  low = masked(spread, 0x80008000u, spread >> 4 & 0x07f007f0u), high = 0x7b807b80u;
  const __nv_bfloat162 value = __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&low),
                                       *reinterpret_cast<const __nv_bfloat162*>(&high));
  return *reinterpret_cast<const unsigned*>(&value);
}

// 8-bit weights, widened.
template <WeightType kType>
struct Tiles<kType, false> : EightBitWeights {
  using Sums = AllTokenSums;
  struct Inputs {
    std::uint32_t at, step;  // from a unit to the next one
    __device__ __forceinline__ Inputs(std::uint32_t own, int lane, int batch)
        : at(own + (lane % 4 * 4 * batch + min(lane / 4, batch - 1)) * 16), step(batch * 16) {}
    __device__ __forceinline__ void advance(int bytes) { at += bytes; }
  };

  __device__ __forceinline__ void multiply(Sums& sums, const Inputs& inputs) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 x = load_shared(inputs.at + 2 * half * inputs.step);
      const uint4 y = load_shared(inputs.at + (2 * half + 1) * inputs.step);
      const uint4 &a = w[half][0], &b = w[half][1];
      step(sums.parts[0], a.x, b.x, x.x, x.y);
      step(sums.parts[1], a.y, b.y, x.z, x.w);
      step(sums.parts[0], a.z, b.z, y.x, y.y);
      step(sums.parts[1], a.w, b.w, y.z, y.w);
    }
  }

 private:
  static __device__ __forceinline__ void step(float (&sums)[4], unsigned a, unsigned b, unsigned x0,
                                              unsigned x1) {
    mma_bf16(sums,
             make_uint4(widened<kType, false>(a), widened<kType, false>(b), widened<kType, true>(a),
                        widened<kType, true>(b)),
             x0, x1);
  }
};

// Of both parts' sums: at most 64 * 127 * 128 of the first, which leaves room for 256 times that.
__device__ __forceinline__ float joined(int first, int second) {
  return static_cast<float>(first * 256 + second);
}
__device__ __forceinline__ float joined(float first, float second) {
  return fmaf(second, 1.0f / 16.0f, first);
}

// 8-bit weights as they are. Sixteen neighbouring ones of a row are a fragment as they lie, whose
// first and third word the tensor cores take for one row, the second and fourth for another. So a
// token has columns for the inputs of the even words and columns for those of the odd ones, both
// parts of either: four of eight. What comes of even columns and odd words is not looked at.
template <WeightType kType>
struct Tiles<kType, true> : EightBitWeights {
  using Sum = std::conditional_t<kType == WeightType::int8, int, float>;
  // A lane has a token of a row of each tile, of the even words or the odd ones.
  struct Sums {
    static __device__ __forceinline__ int first_token(int lane) { return lane % 4 / 2; }
    float of_tile[2] = {};
    // Of neighbouring lanes, the even one has all of the first tile then, the odd one of the
    // second.
    __device__ __forceinline__ void store(float* first, float* second, bool two) const {
      const bool odd = threadIdx.x % 2 == 1;
      const float other = __shfl_xor_sync(0xffffffffu, odd ? of_tile[0] : of_tile[1], 1);
      if (!odd || two) *(odd ? second : first) = (odd ? of_tile[1] : of_tile[0]) + other;
    }
  };
  struct Inputs {
    std::uint32_t at, step;  // to the factor
    __device__ __forceinline__ Inputs(std::uint32_t own, int lane, int batch) {
      const int column = lane / 4, part = min(column / 4, batch - 1) * 2 + column % 2;
      at = own + part * kBlockBytes + lane % 4 * 32 + column / 2 % 2 * 16;
      step = own + 2 * batch * kBlockBytes + min(Sums::first_token(lane), batch - 1) * 4 - at;
    }
    __device__ __forceinline__ void advance(int bytes) { at += bytes; }
  };

  __device__ __forceinline__ void multiply(Sums& sums, const Inputs& inputs) const {
    const uint4 x = load_shared(inputs.at);
    const float factor = load_shared_float(inputs.at + inputs.step);
    const bool odd = threadIdx.x % 2 == 1;
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      Sum products[4] = {};
      mma_8_bit(products, w[0][tile], x.x, x.y);
      mma_8_bit(products, w[1][tile], x.z, x.w);
      const Sum first = odd ? products[2] : products[0], second = odd ? products[3] : products[1];
      sums.of_tile[tile] = fmaf(joined(first, second), factor, sums.of_tile[tile]);
    }
  }
};

}  // namespace persistent
}  // namespace cuda
}  // namespace minserve
