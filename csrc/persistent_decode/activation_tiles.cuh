// The inputs of a product as the tensor cores take them, in shared memory.
//
// Each warp takes its own blocks of them as soon as all words of a few are written, times the
// weights of their norm where there is one; the norm's division is left for the sums.
//
// Usually a block is [units][tokens][8] in bfloat16. But 8-bit weights of one or two tokens are not
// widened: then a block has what the tensor cores multiply them with as they are, two 8-bit parts
// of every input, the second for what the first leaves, and a power of two for all inputs of a
// token in the block: [tokens][2][128] bytes, in the order in which lanes take them
// (weight_tiles.cuh), then those factors. Two int8 have 14 bits and a sign, of the largest input;
// two e4m3 have as many as bfloat16, of an input that is not 2^13 times smaller than the largest.
#pragma once

#include "../core/vector_access.cuh"
#include "global_exchange.cuh"
#include "../arch/mma.cuh"

namespace minserve {
namespace cuda {
namespace persistent {

constexpr unsigned kInfinity = 0x7f800000u;  // the exponent's bits

__device__ __forceinline__ unsigned word_of(const uint4& words, int i) {
  return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w;
}

// Words that have not been written yet.
__device__ __forceinline__ uint4 missing() {
  return make_uint4(kNotWritten, kNotWritten, kNotWritten, kNotWritten);
}
// Until no lane misses any of its words, which are at address_of(0), address_of(1), ...; those that
// it has are not asked for again.
template <int kWords, class AddressOf>
__device__ __forceinline__ void wait_for_words(uint4 (&words)[kWords],
                                               const AddressOf& address_of) {
  bool all;
  do {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if (!written(words[i])) words[i] = load_words(address_of(i));
    }
    all = true;
#pragma unroll
    for (int i = 0; i < kWords; ++i) all = all && written(words[i]);
  } while (!__all_sync(0xffffffffu, all));
}

// The same for words and a number of each that says for itself whether it has been written, which
// are at sum_at(0), sum_at(1), ...
template <int kWords, class AddressOf, class SumAt, class Number>
__device__ __forceinline__ void wait_for_words(uint4 (&words)[kWords], Number (&sums)[kWords],
                                               const AddressOf& address_of, const SumAt& sum_at) {
  bool all;
  do {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if (!written(words[i])) words[i] = load_words(address_of(i));
      if (!written(sums[i])) load_number(sums[i], sum_at(i));
    }
    all = true;
#pragma unroll
    for (int i = 0; i < kWords; ++i) all = all && written(words[i]) && written(sums[i]);
  } while (!__all_sync(0xffffffffu, all));
}

// What a product's inputs have a norm of, for which a warp adds up squares of its blocks: of
// nothing, of themselves, or of a cell's outputs before they were gated, whose sums of squares lie
// in the exchange too.
enum class NormOf { nothing, inputs, outputs };

// Adds to the diagonal of a square of sums, whose rows and columns are quads of lanes, the squares
// of the numbers in two words of each lane.
__device__ __forceinline__ void add_squares(float (&sums)[4], unsigned x, unsigned y) {
  mma_bf16(sums, make_uint4(x, 0, y, 0), x, y);
}
__device__ __forceinline__ float of_diagonal(const float (&sums)[4]) {
  const int lane = threadIdx.x % 32, quad = lane / 4;
  return lane % 4 != quad / 2 ? 0.0f : quad % 2 == 0 ? sums[0] : sums[1];
}

__device__ __forceinline__ unsigned product(unsigned x, unsigned y) {
  const __nv_bfloat162 of_both = __hmul2_rn(*reinterpret_cast<const __nv_bfloat162*>(&x),
                                            *reinterpret_cast<const __nv_bfloat162*>(&y));
  return *reinterpret_cast<const unsigned*>(&of_both);
}
// Pairs of numbers times those of a norm's weight.
__device__ __forceinline__ uint4 product(const uint4& x, const uint4& norm) {
  return make_uint4(product(x.x, norm.x), product(x.y, norm.y), product(x.z, norm.z),
                    product(x.w, norm.w));
}
__device__ __forceinline__ void add_squares(float& sum, const uint4& words) {
  const unsigned x[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    const float number = number_of(x, k, bf16{});
    sum = fmaf(number, number, sum);
  }
}
// Of the token of each quad of lanes, which have a part of its sum of squares each; more: to those
// of inputs that came before.
template <bool kMore = false>
__device__ __forceinline__ void tell_squares(float* squares, float sum, bool more = false) {
  const int lane = threadIdx.x % 32;
  sum += __shfl_xor_sync(0xffffffffu, sum, 1);
  sum += __shfl_xor_sync(0xffffffffu, sum, 2);
  if (lane % 4 != 0) return;
  if (kMore && more) sum += squares[lane / 4];
  squares[lane / 4] = sum;
}

// All inputs, or with kPieces as many from block `first` on as are here at a time. A lane has every
// fourth unit of a block of a token.
//
// Sums of squares: of all blocks of this warp, [token], or in batch-invariant mode of every block
// of the product's inputs by itself, [block][token].
template <WeightType kType, NormOf kNormOf, bool kBatchInvariant, bool kPieces>
__device__ __forceinline__ void take_whole(const PersistentDecodeArgs& args,
                                           const DecodePhase& phase, int first,
                                           const unsigned char* set, unsigned char* own,
                                           float* squares) {
  constexpr int kBlock = inputs_of_block(kType), kEach = kBlock / kUnit / 4, kWords = 4;
  constexpr int kAtOnce = kWords / kEach;            // blocks
  constexpr int kStep = kMmaWarps * kBlock / kUnit;  // units to this warp's next block
  constexpr int kLine = bytes_of_unit(false);
  constexpr bool kNorm = kNormOf == NormOf::inputs, kOutputs = kNormOf == NormOf::outputs;
  constexpr bool kSquared = kNorm || kOutputs;
  using Told = std::conditional_t<kBatchInvariant, float2, float>;  // of a unit's squares
  constexpr int kToldLine = bytes_of_squares(kBatchInvariant);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, token = lane / 4;
  const bool real = token < args.batch;
  if (!kPieces) first = 0;
  const int blocks = phase.inputs / kBlock - first;
  const int first_unit = (first + warp) * kBlock / kUnit + lane % 4;
  const unsigned char* from = set + phase.in + first_unit * kLine + token * 16;
  const unsigned char* sums_from =
      kOutputs ? set + phase.squares + first_unit * kToldLine + token * sizeof(Told) : nullptr;
  const uint4* weights = static_cast<const uint4*>(phase.norm) + first_unit;
  unsigned char* to = own + (lane % 4 * args.batch + token) * 16;
  const int of_word = 4 * args.batch * 16, of_block = kMmaWarps * kEach * of_word;
  float squared = 0.0f;
  if (kSquared && kBatchInvariant) squares += warp * kColumns;
#pragma unroll 1
  for (int left = (kPieces ? min(blocks, phase.at_once) : blocks) - warp; left > 0;
       left -= kAtOnce * kMmaWarps) {
    uint4 words[kWords], norm[kWords];
    float of_quads[kAtOnce][2] = {};  // of a block: first ones of this lane's units, second ones
    const auto there = [&](int i) { return i < kEach || left > kMmaWarps; };
    if (kNorm) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        if (there(i)) norm[i] = __ldg(weights + i / kEach * kStep + i % kEach * 4);
      }
      weights += kAtOnce * kStep;
    }
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = real && there(i) ? missing() : uint4{};
    const auto unit_of = [](int i) { return i / kEach * kStep + i % kEach * 4; };
    const auto address_of = [&](int i) { return from + unit_of(i) * kLine; };
    Told told[kOutputs ? kWords : 1];
    if constexpr (kOutputs) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) told[i] = real && there(i) ? missing_number<Told>() : Told{};
      wait_for_words(words, told, address_of,
                     [&](int i) { return sums_from + unit_of(i) * kToldLine; });
    } else {
      wait_for_words(words, address_of);
    }
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if (!there(i)) continue;
      if constexpr (kOutputs && kBatchInvariant) {
        of_quads[i / kEach][0] += told[i].x, of_quads[i / kEach][1] += told[i].y;
      } else if constexpr (kOutputs) {
        squared += told[i];
      } else if (kNorm && kBatchInvariant) {
        const unsigned x[4] = {words[i].x, words[i].y, words[i].z, words[i].w};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float of_quad = 0.0f;
#pragma unroll
          for (int k = 4 * half; k < 4 * half + 4; ++k) {
            const float number = number_of(x, k, bf16{});
            of_quad += number * number;
          }
          of_quads[i / kEach][half] += of_quad;
        }
      } else if (kNorm) {
        add_squares(squared, words[i]);
      }
      if (kNorm) words[i] = product(words[i], norm[i]);
      if (real) {
        *reinterpret_cast<uint4*>(to + i / kEach * of_block + i % kEach * of_word) = words[i];
      }
    }
    if (kSquared && kBatchInvariant) {
      // In the order of write_residual() (gemm/epilogue.cuh): quads 8, 4, 2 and 1 apart.
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (!there(i * kEach)) continue;
#pragma unroll
        for (float& of_quad : of_quads[i]) {
          of_quad += __shfl_xor_sync(0xffffffffu, of_quad, 2);
          of_quad += __shfl_xor_sync(0xffffffffu, of_quad, 1);
        }
        if (lane % 4 == 0) {
          squares[i * kMmaWarps * kColumns + token] = of_quads[i][0] + of_quads[i][1];
        }
      }
      squares += kAtOnce * kMmaWarps * kColumns;
    }
    from += kAtOnce * kStep * kLine;
    if (kOutputs) sums_from += kAtOnce * kStep * kToldLine;
    to += kAtOnce * of_block;
  }
  if (kSquared && !kBatchInvariant) tell_squares<kOutputs && kPieces>(squares, squared, first > 0);
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

// The largest of both magnitudes, as bits of a bfloat16 pair; those of NaN are the largest.
__device__ __forceinline__ unsigned larger(unsigned x, unsigned y) {
  return __vmaxu2(x & 0x7fff7fffu, y & 0x7fff7fffu);
}

// A lane has a unit of a block. The halves of a warp have a token each, or a block of one token.
template <WeightType kType, NormOf kNormOf>
__device__ __forceinline__ void take_split(const PersistentDecodeArgs& args,
                                           const DecodePhase& phase, const unsigned char* set,
                                           unsigned char* own, float* squares) {
  constexpr int kAtOnce = 2, kUnits = inputs_of_block(kType) / kUnit, kLine = bytes_of_unit(true);
  static_assert(kUnits == 16 && kMostSplit == 2, "a unit for each lane of a half");
  constexpr bool kNorm = kNormOf == NormOf::inputs, kOutputs = kNormOf == NormOf::outputs;
  constexpr int kToldLine = bytes_of_squares(false);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, unit = lane % kUnits;
  const int half = lane / kUnits;
  const bool alone = args.batch == 1;
  const int token = alone ? 0 : half;
  // Blocks from the first half's to this one's, and to the next ones.
  const int beside = alone ? half * kMmaWarps : 0;
  const int step = alone ? 2 * kMmaWarps : kMmaWarps;
  const int of_block = bytes_of_block(kType, true, args.batch), bytes_of_step = step * of_block;
  const int first_unit = (warp + beside) * kUnits + unit;
  const unsigned char* from = set + phase.in + first_unit * kLine + token * 16;
  const uint4* weights = static_cast<const uint4*>(phase.norm) + first_unit;
  own += beside * of_block;
  const unsigned char* sums_from =
      kOutputs ? set + phase.squares + first_unit * kToldLine + token * 4 : nullptr;
  float squared[4] = {}, told_sum = 0.0f;
#pragma unroll 1
  for (int left = phase.inputs / inputs_of_block(kType) - warp; left > 0; left -= kAtOnce * step) {
    const auto there = [&](int i) { return left - beside > i * step; };
    uint4 words[kAtOnce], norm[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      words[i] = there(i) ? missing() : uint4{};
      if (kNorm) norm[i] = there(i) ? __ldg(weights + i * step * kUnits) : uint4{};
    }
    const auto address_of = [&](int i) { return from + i * step * (kUnits * kLine); };
    if constexpr (kOutputs) {
      float told[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) told[i] = there(i) ? missing_number<float>() : 0.0f;
      wait_for_words(words, told, address_of,
                     [&](int i) { return sums_from + i * step * (kUnits * kToldLine); });
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) told_sum += told[i];
      sums_from += kAtOnce * step * (kUnits * kToldLine);
    } else {
      wait_for_words(words, address_of);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (left <= i * step) continue;
      unsigned x[4] = {words[i].x, words[i].y, words[i].z, words[i].w};
      if (kNorm) {
        add_squares(squared, x[0], x[1]);
        add_squares(squared, x[2], x[3]);
#pragma unroll
        for (int k = 0; k < 4; ++k) x[k] = product(x[k], word_of(norm[i], k));
      }
      const unsigned two = larger(larger(x[0], x[1]), larger(x[2], x[3]));
      const unsigned one = max(two & 0xffffu, two >> 16);
      const unsigned of_first = __reduce_max_sync(0xffffffffu, half == 0 ? one : 0u);
      const unsigned of_second = __reduce_max_sync(0xffffffffu, half == 0 ? 0u : one);
      const unsigned largest = (half == 0 ? of_first : of_second) << 16;
      // `up` makes them less than 2^(kExponent + 1).
      const unsigned exponent = max(largest & kInfinity, 64u << 23);
      const float up = __uint_as_float((254 + Splitting<kType>::kExponent << 23) - exponent);
      const auto number = [&](int k) { return number_of(x, k, bf16{}); };
      const Split low = Splitting<kType>::split({number(0), number(1), number(2), number(3)}, up);
      const Split high = Splitting<kType>::split({number(4), number(5), number(6), number(7)}, up);
      if (!there(i)) continue;
      unsigned char* block = own + i * bytes_of_step;
      // Four units for each lane of four: its even words of both sixteens, then its odd ones.
      unsigned* to = reinterpret_cast<unsigned*>(block + 2 * token * kBlockBytes) +
                     (unit / 4 * 8 + unit / 2 % 2 * 2 + unit % 2);
      to[0] = low.first, to[4] = high.first;
      to[kBlockBytes / 4] = low.second, to[kBlockBytes / 4 + 4] = high.second;
      if (unit == 0) {
        // No number is one again.
        reinterpret_cast<unsigned*>(block + 2 * args.batch * kBlockBytes)[token] =
            largest < kInfinity ? exponent - (Splitting<kType>::kExponent << 23) : kNotWritten;
      }
    }
    from += kAtOnce * step * (kUnits * kLine);
    weights += kAtOnce * step * kUnits;
    own += kAtOnce * bytes_of_step;
  }
  if (kNorm || kOutputs) {
    float sum = kOutputs ? told_sum : of_diagonal(squared);
#pragma unroll
    for (int distance = kUnits / 2; distance > 0; distance /= 2) {
      sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    }
    const float other = __shfl_xor_sync(0xffffffffu, sum, kUnits);
    if (unit == 0) squares[token] = alone ? sum + other : sum;
  }
  __syncwarp();
}

template <WeightType kType, bool kSplit, NormOf kNormOf, bool kPieces>
__device__ __forceinline__ void take_inputs(const PersistentDecodeArgs& args,
                                            const DecodePhase& phase, int first,
                                            const unsigned char* set, unsigned char* own,
                                            float* squares) {
  if constexpr (kSplit) {
    static_assert(!kPieces);
    take_split<kType, kNormOf>(args, phase, set, own, squares);
  } else {
    take_whole<kType, kNormOf, false, kPieces>(args, phase, first, set, own, squares);
  }
}

}  // namespace persistent
}  // namespace cuda
}  // namespace minserve
