// The product of a step of a scan: a block's rows of the weight times h of some sequences.
//
// A warp has some of the inputs, for all rows of an octet of units and all sequences of a group;
// what the warps give is added up in their order. So an output's bits depend on its sequence alone.
#pragma once

#include "../arch/mma.cuh"
#include "../core/vec16.cuh"
#include "exchange.cuh"

namespace minserve {
namespace cuda {

constexpr int kScanWarps = 8, kScanThreads = 32 * kScanWarps;

// Sixteen bytes of a unit's gate in the weight, from input k on; zeros where there is none. whole:
// pieces are aligned, and none reaches beyond a row.
template <class T>
__device__ __forceinline__ uint4 weight_piece(const GatedRnnArgs& args, bool whole, int gate,
                                              std::int64_t unit, std::int64_t k) {
  constexpr int kCount = 16 / static_cast<int>(sizeof(T));
  const std::int64_t units = args.layout.channels;
  uint4 bits = {0, 0, 0, 0};
  if (unit >= units || k >= units) return bits;
  const T* const at =
      static_cast<const T*>(args.weight.data) + (gate * units + unit) * args.weight.stride + k;
  if (whole) return *reinterpret_cast<const uint4*>(at);
  unsigned words[4] = {0, 0, 0, 0};
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (k + i >= units) continue;
    if constexpr (sizeof(T) == 4) {
      words[i] = __float_as_uint(at[i]);
    } else {
      words[i / 2] |= static_cast<unsigned>(at[i].bits) << i % 2 * 16;
    }
  }
  bits = {words[0], words[1], words[2], words[3]};
  return bits;
}

// A block's rows of the weight: octet by octet of its units, gate by gate.
template <class T, int kGates, bool kShared>
class BlockWeights;

// In shared memory, from where it stays for all steps.
template <class T, int kGates>
class BlockWeights<T, kGates, true> {
 public:
  // Half a line more than whole ones, so that two rows lie in different banks.
  MS_HD static std::int64_t row_bytes(std::int64_t inputs) {
    return up_to(inputs * static_cast<std::int64_t>(sizeof(T)), 128) + 64;
  }
  MS_HD static std::int64_t bytes(std::int64_t octets, std::int64_t inputs) {
    return octets * kGates * kOctet * row_bytes(inputs);
  }

  __device__ __forceinline__ BlockWeights(const GatedRnnArgs& args, bool whole,
                                          std::int64_t first_unit, int octets, std::int64_t inputs,
                                          unsigned char* shared)
      : row_bytes_(static_cast<int>(row_bytes(inputs))), rows_(shared) {
    constexpr int kCount = 16 / static_cast<int>(sizeof(T));
    const int pieces = static_cast<int>(inputs) / kCount;
    for (int i = static_cast<int>(threadIdx.x); i < octets * kGates * kOctet * pieces;
         i += kScanThreads) {
      const int row = i / pieces, k = i % pieces * kCount, of_octet = row % (kGates * kOctet);
      const std::int64_t unit = first_unit + row / (kGates * kOctet) * kOctet + of_octet % kOctet;
      *reinterpret_cast<uint4*>(rows_ + row * row_bytes_ + k * static_cast<int>(sizeof(T))) =
          weight_piece<T>(args, whole, of_octet / kOctet, unit, k);
    }
  }
  __device__ __forceinline__ uint4 at(int octet, int gate, int unit, int k) const {
    const int row = (octet * kGates + gate) * kOctet + unit;
    return *reinterpret_cast<const uint4*>(rows_ + row * row_bytes_ +
                                           k * static_cast<int>(sizeof(T)));
  }

 private:
  const int row_bytes_;
  unsigned char* const rows_;
};

// Where it is, which is in the L2 cache from the second step on.
template <class T, int kGates>
class BlockWeights<T, kGates, false> {
 public:
  MS_HD static std::int64_t bytes(std::int64_t, std::int64_t) { return 0; }

  __device__ __forceinline__ BlockWeights(const GatedRnnArgs& args, bool whole,
                                          std::int64_t first_unit, int, std::int64_t,
                                          unsigned char*)
      : args_(args), whole_(whole), first_unit_(first_unit) {}
  __device__ __forceinline__ uint4 at(int octet, int gate, int unit, int k) const {
    return weight_piece<T>(args_, whole_, gate, first_unit_ + octet * kOctet + unit, k);
  }

 private:
  const GatedRnnArgs& args_;
  const bool whole_;
  const std::int64_t first_unit_;
};

// Sums of a warp, [row][sequence] with this stride; a row is a unit's gate.
template <int kTiles>
constexpr int kSumsStride = kOctet * kTiles + 8;
template <int kGates, int kTiles>
constexpr int kWarpSums = kGates * kOctet * kSumsStride<kTiles>;

__device__ __forceinline__ void mma_16_bit(float (&sums)[4], const uint4& w, unsigned x0,
                                           unsigned x1, bf16) {
  mma_bf16(sums, w, x0, x1);
}
__device__ __forceinline__ void mma_16_bit(float (&sums)[4], const uint4& w, unsigned x0,
                                           unsigned x1, f16) {
  mma_f16(sums, w, x0, x1);
}

// Chunks [first, last) of the inputs, of kTiles times eight sequences whose rows begin at h.
//
// Tensor cores take 16 rows at once: two gates of the octet. Which inputs an instruction has as its
// first and which as its last makes no difference, if weights and h agree: so a lane loads eight
// neighbours of both, for two instructions.
template <class T, int kGates, int kTiles>
struct GatedProduct {
  template <class Weights>
  static __device__ __forceinline__ void run(const Weights& weights, int octet, const T* h,
                                             std::int64_t inputs, int first, int last,
                                             float* sums) {
    constexpr int kAtOnce = kTiles > 4 ? 2 : 4;  // chunks, as many as registers hold
    const int lane = static_cast<int>(threadIdx.x % 32), row = lane / 4, part = lane % 4;
    const T* const own = h + row * inputs + part * 8;
    float of[2][kTiles][4] = {};
    for (int chunk = first; chunk < last; chunk += kAtOnce) {
      uint4 x[kAtOnce][kTiles];
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        if (chunk + n >= last) continue;
#pragma unroll
        for (int c = 0; c < kTiles; ++c) {
          x[n][c] = load_relaxed_16(own + c * kOctet * inputs + (chunk + n) * kChunk);
        }
      }
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        if (chunk + n >= last) continue;
        const int k = (chunk + n) * kChunk + part * 8;
        uint4 w[4] = {};
#pragma unroll
        for (int gate = 0; gate < kGates; ++gate) w[gate] = weights.at(octet, gate, row, k);
#pragma unroll
        for (int c = 0; c < kTiles; ++c) {
#pragma unroll
          for (int two = 0; two < 2; ++two) {
            const uint4 &low = w[2 * two], &high = w[2 * two + 1];
            mma_16_bit(of[two][c], {low.x, high.x, low.y, high.y}, x[n][c].x, x[n][c].y, T{});
            mma_16_bit(of[two][c], {low.z, high.z, low.w, high.w}, x[n][c].z, x[n][c].w, T{});
          }
        }
      }
    }
#pragma unroll
    for (int gate = 0; gate < kGates; ++gate) {
#pragma unroll
      for (int c = 0; c < kTiles; ++c) {
        const float* const two = of[gate / 2][c] + gate % 2 * 2;
        float* const to =
            sums + (gate * kOctet + row) * kSumsStride<kTiles> + c * kOctet + part * 2;
        *reinterpret_cast<float2*>(to) = {two[0], two[1]};
      }
    }
  }
};

// In fp32: a lane has all gates of two neighbouring units, for every eighth sequence.
template <int kGates, int kTiles>
struct GatedProduct<float, kGates, kTiles> {
  template <class Weights>
  static __device__ __forceinline__ void run(const Weights& weights, int octet, const float* h,
                                             std::int64_t inputs, int first, int last,
                                             float* sums) {
    constexpr int kAtOnce = 8 / kTiles;  // runs of four inputs
    constexpr int kRows = 2 * kGates;
    const int lane = static_cast<int>(threadIdx.x % 32), column = lane % 8;
    const int first_unit = lane / 8 * 2;
    const float* const own = h + column * inputs;
    float of[kTiles][kRows] = {};
    uint4 next[kAtOnce][kTiles];
    const auto fetch = [&](int k) {
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
#pragma unroll
        for (int c = 0; c < kTiles; ++c) {
          next[n][c] = load_relaxed_16(own + c * kOctet * inputs + k + n * 4);
        }
      }
    };
    const int end = last * kChunk;
    if (first < last) fetch(first * kChunk);
    for (int k = first * kChunk; k < end; k += 4 * kAtOnce) {
      uint4 x[kAtOnce][kTiles];
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
#pragma unroll
        for (int c = 0; c < kTiles; ++c) x[n][c] = next[n][c];
      }
      if (k + 4 * kAtOnce < end) fetch(k + 4 * kAtOnce);
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        float inputs_of[kTiles][4];
#pragma unroll
        for (int c = 0; c < kTiles; ++c) unpack(x[n][c], inputs_of[c], 0.0f);
#pragma unroll
        for (int row = 0; row < kRows; ++row) {
          float w[4];
          unpack(weights.at(octet, row / 2, first_unit + row % 2, k + n * 4), w, 0.0f);
#pragma unroll
          for (int c = 0; c < kTiles; ++c) {
#pragma unroll
            for (int i = 0; i < 4; ++i) of[c][row] = fmadd(w[i], inputs_of[c][i], of[c][row]);
          }
        }
      }
    }
#pragma unroll
    for (int c = 0; c < kTiles; ++c) {
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        sums[(row / 2 * kOctet + first_unit + row % 2) * kSumsStride<kTiles> + c * kOctet +
             column] = of[c][row];
      }
    }
  }
};

}  // namespace cuda
}  // namespace minserve
