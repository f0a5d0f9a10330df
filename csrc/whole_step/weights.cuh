// What a stage holds of each type of weights, and how a warp multiplies it: two tiles of 8 rows by
// 8 columns of inputs (inputs.cuh) on the tensor cores.
#pragma once

#include "../common/device.cuh"
#include "inputs.cuh"
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
__device__ __forceinline__ float load_float(std::uint32_t address) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
  return x;
}

// Rows of weights lie swizzled, so that what a warp loads at once meets all banks.
template <WeightType kType, bool kSplit>
struct Tiles;

// 16 rows of weights times eight columns of 16 inputs in bfloat16: rows 0 to 7 and 8 to 15 of the
// first eight inputs, then of the others.
__device__ __forceinline__ void multiply_step(float (&sums)[4], const uint4& w, unsigned x0,
                                              unsigned x1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(w.x), "r"(w.y), "r"(w.z), "r"(w.w), "r"(x0), "r"(x1));
}

// Of all tokens: a lane has two neighbouring ones of a row of each tile.
struct WholeSums {
  static __device__ __forceinline__ int first_token(int lane) { return lane % 4 * 2; }
  float parts[2][4] = {};
  __device__ __forceinline__ void store(float* to, int tile) const {
    to[0] = parts[0][2 * tile] + parts[1][2 * tile];
    to[kUnit] = parts[0][2 * tile + 1] + parts[1][2 * tile + 1];
  }
};

// Fragments as they lie.
template <>
struct Tiles<WeightType::bf16, false> {
  using Sums = WholeSums;
  // Inputs 0 to 31 of all tokens, then the others. (Tokens that are not there are another's: what
  // becomes of them is not looked at.)
  struct Inputs {
    std::uint32_t at;
    int half;
    __device__ __forceinline__ Inputs(std::uint32_t own, int lane, int batch)
        : at(own + (lane / 8 * batch + min(lane % 8, batch - 1)) * 16), half(4 * batch * 16) {}
    __device__ __forceinline__ void advance(int bytes) { at += bytes; }
  };

  uint4 w[4];

  // Of the four matrices that a lane has an address of a row of: inputs 0 to 7 of the first tile,
  // of the second, inputs 8 to 15 of both.
  static __device__ __forceinline__ int place(int lane) {
    return lane % 8 * kBlockBytes + ((lane / 16 ^ lane % 8) << 4);
  }
  __device__ __forceinline__ void load(std::uint32_t first, std::uint32_t second, int lane) {
    const std::uint32_t from = lane / 8 % 2 ? second : first;
#pragma unroll
    for (int i = 0; i < 4; ++i) w[i] = load_matrices(from ^ (i << 5));
  }
  __device__ __forceinline__ void multiply(Sums& sums, const Inputs& inputs) const {
    const uint4 x = load_matrices(inputs.at), y = load_matrices(inputs.at + inputs.half);
    multiply_step(sums.parts[0], w[0], x.x, x.y);
    multiply_step(sums.parts[1], w[1], x.z, x.w);
    multiply_step(sums.parts[0], w[2], y.x, y.y);
    multiply_step(sums.parts[1], w[3], y.z, y.w);
  }
};

// A lane has twice 16 neighbouring inputs of a row and of a column: which inputs a fragment's
// registers stand for does not matter as long as both agree.
struct EightBitWeights {
  uint4 w[2][2];

  static __device__ __forceinline__ int place(int lane) {
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
  using Sums = WholeSums;
  struct Inputs {
    std::uint32_t at;
    int next;  // from a unit to the next one
    __device__ __forceinline__ Inputs(std::uint32_t own, int lane, int batch)
        : at(own + (lane % 4 * 4 * batch + min(lane / 4, batch - 1)) * 16), next(batch * 16) {}
    __device__ __forceinline__ void advance(int bytes) { at += bytes; }
  };

  __device__ __forceinline__ void multiply(Sums& sums, const Inputs& inputs) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 x = load_shared(inputs.at + 2 * half * inputs.next);
      const uint4 y = load_shared(inputs.at + (2 * half + 1) * inputs.next);
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
    multiply_step(sums,
                  make_uint4(widened<kType, false>(a), widened<kType, false>(b),
                             widened<kType, true>(a), widened<kType, true>(b)),
                  x0, x1);
  }
};

// 16 rows of 8-bit weights times eight columns of 32 inputs.
__device__ __forceinline__ void multiply_step(int (&sums)[4], unsigned a0, unsigned b0, unsigned a1,
                                              unsigned b1, unsigned x0, unsigned x1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+r"(sums[0]), "+r"(sums[1]), "+r"(sums[2]), "+r"(sums[3])
      : "r"(a0), "r"(b0), "r"(a1), "r"(b1), "r"(x0), "r"(x1));
}
__device__ __forceinline__ void multiply_step(float (&sums)[4], unsigned a0, unsigned b0,
                                              unsigned a1, unsigned b1, unsigned x0, unsigned x1) {
  asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a0), "r"(b0), "r"(a1), "r"(b1), "r"(x0), "r"(x1));
}
// Of both parts' sums: at most 128 * 127 * 128 of the first, which leaves room for 256 times that.
__device__ __forceinline__ float joined(int first, int second) {
  return static_cast<float>(first * 256 + second);
}
__device__ __forceinline__ float joined(float first, float second) {
  return fmaf(second, 1.0f / 16.0f, first);
}

// 8-bit weights as they are: columns are the parts of up to four tokens' inputs.
template <WeightType kType>
struct Tiles<kType, true> : EightBitWeights {
  using Sum = std::conditional_t<kType == WeightType::int8, int, float>;
  // A lane has a token of a row of each tile.
  struct Sums {
    static __device__ __forceinline__ int first_token(int lane) { return lane % 4; }
    float of_tile[2] = {};
    __device__ __forceinline__ void store(float* to, int tile) const { to[0] = of_tile[tile]; }
  };
  struct Inputs {
    std::uint32_t at, factors;
    __device__ __forceinline__ Inputs(std::uint32_t own, int lane, int batch)
        : factors(own + 2 * batch * kBlockBytes + Sums::first_token(lane) * 4) {
      const int column = min(lane / 4, 2 * batch - 1);
      at = own + column * kBlockBytes + ((lane % 4 * 2 ^ column) << 4);
    }
    __device__ __forceinline__ void advance(int bytes) { at += bytes, factors += bytes; }
  };

  __device__ __forceinline__ void multiply(Sums& sums, const Inputs& inputs) const {
    Sum products[2][4] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 x = load_shared(inputs.at ^ (half << 4));
      const uint4 &a = w[half][0], &b = w[half][1];
      multiply_step(products[half], a.x, b.x, a.y, b.y, x.x, x.y);
      multiply_step(products[half], a.z, b.z, a.w, b.w, x.z, x.w);
    }
    const float factor = load_float(inputs.factors);
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      const Sum first = products[0][2 * tile] + products[1][2 * tile];
      const Sum second = products[0][2 * tile + 1] + products[1][2 * tile + 1];
      sums.of_tile[tile] = fmaf(joined(first, second), factor, sums.of_tile[tile]);
    }
  }
};

}  // namespace whole
}  // namespace cuda
}  // namespace minserve
