// The inputs of a product as the tensor cores take them, in shared memory.
//
// Each warp takes its own blocks of them as soon as all words of a few are written, times the
// weights of their norm where there is one; the norm's division is left for the sums.
//
// Usually a block is [units][tokens][8] in bfloat16. But 8-bit weights of one or two tokens are not
// widened: then a block has what the tensor cores multiply them with as they are, two 8-bit parts
// of every input, the second for what the first leaves, and a power of two for all inputs of a
// token in the block. [tokens][2][128] bytes, of which sixteens are exchanged so that all banks are
// met, then those factors. Two int8 have 14 bits and a sign, of the largest input; two e4m3 have as
// many as bfloat16, of an input that is not 2^13 times smaller than the largest.
#pragma once

#include "../common/channels.cuh"
#include "exchange.cuh"

namespace minserve {
namespace cuda {
namespace whole {

constexpr unsigned kInfinity = 0x7f800000u;  // the exponent's bits

__device__ __forceinline__ unsigned word_of(const uint4& words, int i) {
  return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w;
}

// A lane has every fourth unit of a block of a token.
template <WeightType kType, bool kNorm>
__device__ __forceinline__ void take_whole(const WholeStepArgs& args, const WholeStepPhase& phase,
                                           const unsigned char* set, unsigned char* own,
                                           float* squares) {
  constexpr int kBlock = inputs_of_block(kType), kEach = kBlock / kUnit / 4, kWords = 4;
  constexpr int kAtOnce = kWords / kEach;               // blocks
  constexpr int kStep = kMultiplying * kBlock / kUnit;  // units to this warp's next block
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, token = lane / 4;
  const bool real = token < args.batch;
  const int first_unit = warp * kBlock / kUnit + lane % 4;
  const unsigned char* from = set + phase.in + first_unit * kUnitLine + token * 16;
  const uint4* weights = static_cast<const uint4*>(phase.norm) + first_unit;
  unsigned char* to = own + (lane % 4 * args.batch + token) * 16;
  const int of_word = 4 * args.batch * 16, of_block = kMultiplying * kEach * of_word;
  float sum = 0.0f;
#pragma unroll 1
  for (int left = phase.inputs / kBlock - warp; left > 0; left -= kAtOnce * kMultiplying) {
    uint4 words[kWords], norm[kWords];
    const auto there = [&](int i) { return i < kEach || left > kMultiplying; };
    if (kNorm) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        if (there(i)) norm[i] = __ldg(weights + i / kEach * kStep + i % kEach * 4);
      }
      weights += kAtOnce * kStep;
    }
    bool all;
    do {
      all = true;
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        words[i] = uint4{};
        if (real && there(i))
          words[i] = load_words(from + (i / kEach * kStep + i % kEach * 4) * kUnitLine);
      }
#pragma unroll
      for (int i = 0; i < kWords; ++i) all = all && written(words[i]);
    } while (!__all_sync(0xffffffffu, all));
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if (!there(i)) continue;
      if (kNorm) {
        const unsigned x[4] = {words[i].x, words[i].y, words[i].z, words[i].w};
        const unsigned w[4] = {norm[i].x, norm[i].y, norm[i].z, norm[i].w};
        unsigned scaled[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const float low = number_of(x, 2 * k, bf16{}), high = number_of(x, 2 * k + 1, bf16{});
          sum = fmaf(low, low, sum), sum = fmaf(high, high, sum);
          scaled[k] = rounded(low * number_of(w, 2 * k, bf16{}),
                              high * number_of(w, 2 * k + 1, bf16{}), bf16{});
        }
        words[i] = make_uint4(scaled[0], scaled[1], scaled[2], scaled[3]);
      }
      if (real) {
        *reinterpret_cast<uint4*>(to + i / kEach * of_block + i % kEach * of_word) = words[i];
      }
    }
    from += kAtOnce * kStep * kUnitLine;
    to += kAtOnce * of_block;
  }
  if (kNorm) {
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    if (lane % 4 == 0) squares[token] = sum;
  }
  __syncwarp();
}

// Both parts of four inputs.
struct Split {
  unsigned first, second;
};
template <WeightType kType>
struct Splitting;
template <>
struct Splitting<WeightType::int8> {
  static constexpr unsigned kExponent = 13;
  // x times `up` is 256 times the first part plus the second one.
  static __device__ __forceinline__ Split split(const float (&x)[4], float up) {
    unsigned bits[4];  // of 1.5 * 2^23 + 128 + x, whose last two bytes are those parts
#pragma unroll
    for (int i = 0; i < 4; ++i) bits[i] = __float_as_uint(fmaf(x[i], up, 12582912.0f + 128.0f));
    const unsigned low = __byte_perm(bits[0], bits[1], 0x5140);
    const unsigned high = __byte_perm(bits[2], bits[3], 0x5140);
    return {__byte_perm(low, high, 0x7632), __byte_perm(low, high, 0x5410) ^ 0x80808080u};
  }
};
template <>
struct Splitting<WeightType::fp8> {
  static constexpr unsigned kExponent = 7;
  // x times `up` is the first part plus a sixteenth of the second one.
  static __device__ __forceinline__ Split split(const float (&x)[4], float up) {
    unsigned first[2], second[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float low = x[2 * i] * up, high = x[2 * i + 1] * up;
      first[i] = nearest(low, high);
      const float2 there = value(first[i]);
      second[i] = nearest((low - there.x) * 16.0f, (high - there.y) * 16.0f);
    }
    return {first[0] | first[1] << 16, second[0] | second[1] << 16};
  }
  // Of a pair of e4m3 in the lower half.
  static __device__ __forceinline__ float2 value(unsigned pair) {
    unsigned halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<unsigned short>(pair)));
    return __half22float2(*reinterpret_cast<const __half2*>(&halves));
  }

 private:
  static __device__ __forceinline__ unsigned nearest(float low, float high) {
    unsigned short pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
  }
};

// A half of the warp has a token, a lane a unit of a block.
template <WeightType kType, bool kNorm>
__device__ __forceinline__ void take_split(const WholeStepArgs& args, const WholeStepPhase& phase,
                                           const unsigned char* set, unsigned char* own,
                                           float* squares) {
  constexpr int kAtOnce = 4, kUnits = inputs_of_block(kType) / kUnit;
  constexpr int kStep = kMultiplying * kUnits;  // units to this warp's next block
  static_assert(kUnits == 16 && kMostSplit == 2, "a unit for each lane of a half");
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, unit = lane % kUnits;
  const int token = lane / kUnits;
  const bool real = token < args.batch;
  const int of_block = kMultiplying * bytes_of_block(kType, true, args.batch);
  const unsigned char* from = set + phase.in + (warp * kUnits + unit) * kUnitLine + token * 16;
  const uint4* weights = static_cast<const uint4*>(phase.norm) + warp * kUnits + unit;
  float sum = 0.0f;
#pragma unroll 1
  for (int left = phase.inputs / inputs_of_block(kType) - warp; left > 0;
       left -= kAtOnce * kMultiplying) {
    uint4 words[kAtOnce], norm[kAtOnce];
    if (kNorm) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (left > i * kMultiplying) norm[i] = __ldg(weights + i * kStep);
      }
    }
    bool all;
    do {
      all = true;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        words[i] = uint4{};
        if (real && left > i * kMultiplying) words[i] = load_words(from + i * (kStep * kUnitLine));
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) all = all && written(words[i]);
    } while (!__all_sync(0xffffffffu, all));
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (left <= i * kMultiplying) continue;
      float x[kUnit];
      unsigned largest = 0;  // as bits, of which those of NaN are the largest
#pragma unroll
      for (int k = 0; k < kUnit; ++k) {
        const unsigned word = word_of(words[i], k / 2);
        x[k] = number_of(&word, k % 2, bf16{});
        if (kNorm) {
          const unsigned weight = word_of(norm[i], k / 2);
          sum = fmaf(x[k], x[k], sum);
          x[k] *= number_of(&weight, k % 2, bf16{});
        }
        largest = max(largest, __float_as_uint(x[k]) & 0x7fffffffu);
      }
#pragma unroll
      for (int distance = kUnits / 2; distance > 0; distance /= 2) {
        largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, distance));
      }
      // `up` makes them less than 2^(kExponent + 1).
      const unsigned exponent = max(largest & kInfinity, 64u << 23);
      const float up = __uint_as_float((254 + Splitting<kType>::kExponent << 23) - exponent);
      const Split low = Splitting<kType>::split({x[0], x[1], x[2], x[3]}, up);
      const Split high = Splitting<kType>::split({x[4], x[5], x[6], x[7]}, up);
      if (!real) continue;
      unsigned char* block = own + i * of_block;
      const auto place = [&](int column) {
        return column * kBlockBytes + ((unit / 2 ^ column) << 4) + unit % 2 * 8;
      };
      *reinterpret_cast<uint2*>(block + place(2 * token)) = make_uint2(low.first, high.first);
      *reinterpret_cast<uint2*>(block + place(2 * token + 1)) = make_uint2(low.second, high.second);
      if (unit == 0) {
        // No number is one again.
        reinterpret_cast<unsigned*>(block + 2 * args.batch * kBlockBytes)[token] =
            largest < kInfinity ? exponent - (Splitting<kType>::kExponent << 23) : kNothing;
      }
    }
    from += kAtOnce * (kStep * kUnitLine);
    weights += kAtOnce * kStep;
    own += kAtOnce * of_block;
  }
  if (kNorm) {
#pragma unroll
    for (int distance = kUnits / 2; distance > 0; distance /= 2) {
      sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    }
    if (unit == 0) squares[token] = sum;
  }
  __syncwarp();
}

template <WeightType kType, bool kSplit, bool kNorm>
__device__ __forceinline__ void take_inputs(const WholeStepArgs& args, const WholeStepPhase& phase,
                                            const unsigned char* set, unsigned char* own,
                                            float* squares) {
  if constexpr (kSplit) {
    take_split<kType, kNorm>(args, phase, set, own, squares);
  } else {
    take_whole<kType, kNorm>(args, phase, set, own, squares);
  }
}

}  // namespace whole
}  // namespace cuda
}  // namespace minserve
