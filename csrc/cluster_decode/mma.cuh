// Products of a block's weights with the sequences of its cluster: 16 rows of weights by eight
// tokens by 16 inputs at a time (mma.sync.m16n8k16).
//
// Inputs lie in granules, eight channels of eight tokens in 128 bytes, as a warp holds them: lane t
// has the channels 2 (t % 4) and 2 (t % 4) + 1 of token t / 4. Of the sums it has, as the tensor
// cores leave them, the rows t / 4 and t / 4 + 8 of the tokens 2 (t % 4) and 2 (t % 4) + 1.
#pragma once

#include "../arch/mma.cuh"
#include "weight_pipeline.cuh"

namespace minserve {
namespace cuda {
namespace cluster {

constexpr int kGranule = 128;  // bytes

__device__ __forceinline__ std::uint32_t load_word(std::uint32_t address) {
  std::uint32_t word;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
  return word;
}

// Where the pair of channels at `channel` of a token is among granules of kTiles x 8 tokens.
template <int kTiles>
__device__ __forceinline__ int place_of_pair(int channel, int token) {
  return ((channel / 8 * kTiles + token / 8) * 32 + token % 8 * 4 + channel % 8 / 2) * 4;
}

// A pair of warps has the same rows of weights and half of each chunk's inputs each; then each
// has every other token in the epilogue.
struct Share {
  int pair, half;
  __device__ __forceinline__ Share() : pair(threadIdx.x / 64), half(threadIdx.x / 32 % 2) {}
};

// Sums of a tile of rows and so many tiles of tokens; of one, those of even steps and of odd ones,
// since a step's result is long in coming.
template <int kTiles>
struct Sums {
  static constexpr int kChains = kTiles > 1 ? 1 : 2;
  float of[kTiles][kChains][4] = {};

  __device__ __forceinline__ void add(int step, int i, const uint4& weights, unsigned low,
                                      unsigned high) {
    mma_bf16(of[i][step % kChains], weights, low, high);
  }
  // Products come before what follows.
  __device__ __forceinline__ void are_there() {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
      for (float (&chain)[4] : of[i]) fence_operands(chain);
    }
  }
  __device__ __forceinline__ float operator()(int i, int k) const {
    return kChains > 1 ? of[i][0][k] + of[i][kChains - 1][k] : of[i][0][k];
  }
};

// Chunks whose weights wait in registers for their inputs.
template <int kTiles>
constexpr int most_held(int chunks) {
  constexpr int kMost = kTiles > 2 ? 1 : 3;
  int held = 1;
  for (int n = 2; n <= kMost; ++n) {
    if (chunks % n == 0) held = n;
  }
  return held;
}

// Up to kRows tiles of rows times this warp's half of the inputs, of which this lane's first are at
// `inputs`; calls ready() before it reads them. The inputs' products with themselves have the
// tokens' squares on their diagonal.
template <int kTiles, int kWidth, int kRows, class Ready>
__device__ __forceinline__ void multiply_rows(Chunks& chunks, int rows, std::uint32_t inputs,
                                              Ready ready, Sums<kTiles> (&sums)[kRows],
                                              Sums<kTiles>& squares) {
  constexpr int kSteps = kChunkTiles / 2, kInputs = kSteps * 2 * kTiles * kGranule;
  constexpr int kCount = kWidth / 16 / kChunkTiles, kHeld = most_held<kTiles>(kCount);
  const int half = Share().half;
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    if (row >= rows) break;
    std::uint32_t x = inputs + half * kInputs;
#pragma unroll 1
    for (int first = 0; first < kCount; first += kHeld) {
      uint4 weights[kHeld][kSteps];
#pragma unroll
      for (int n = 0; n < kHeld; ++n) {
        const std::uint32_t at = chunks.next() + half * (kSteps * kTileBytes);
#pragma unroll
        for (int k = 0; k < kSteps; ++k) weights[n][k] = load_shared(at + k * kTileBytes);
      }
      ready();
#pragma unroll
      for (int n = 0; n < kHeld; ++n, x += 2 * kInputs) {
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
#pragma unroll
          for (int i = 0; i < kTiles; ++i) {
            const unsigned low = load_word(x + (2 * k * kTiles + i) * kGranule);
            const unsigned high = load_word(x + ((2 * k + 1) * kTiles + i) * kGranule);
            sums[row].add(k, i, weights[n][k], low, high);
            if (row == 0) squares.add(k, i, {low, 0, high, 0}, low, high);
          }
        }
        sums[row].are_there();
        chunks.release();
      }
    }
  }
}

// All rows of the residual stream, some tiles of them a warp, times this block's part of the
// inputs, so many steps of 16, at `inputs`; calls ready() before it reads them, and leave(first
// row, sums) for each tile of rows.
template <int kTiles, int kWidth, class Ready, class Leave>
__device__ __forceinline__ void multiply_split_k(Chunks& chunks, int steps, std::uint32_t inputs,
                                                 Ready ready, Leave leave) {
  constexpr int kEach = ClusterShape{kWidth}.tiles_of_warp();
  constexpr int kSteps = ClusterShape{kWidth}.steps_of_chunk();
  const int warp = threadIdx.x / 32;
  float sums[kEach][kTiles][4] = {};
  std::uint32_t x = inputs + threadIdx.x % 32 * 4;
  uint4 weights[kSteps][kEach];
  const auto load = [&] {
    const std::uint32_t at = chunks.next() + warp % 2 * kTileBytes;
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
#pragma unroll
      for (int m = 0; m < kEach; ++m) {
        weights[k][m] = load_shared(at + (k * kEach + m) * 2 * kTileBytes);
      }
    }
  };
  load();
  ready();
#pragma unroll 1
  for (int first = 0; first < steps; first += kSteps) {
    if (first > 0) load();
#pragma unroll
    for (int k = 0; k < kSteps; ++k, x += 2 * kTiles * kGranule) {
      if (first + k >= steps) break;  // what has been loaded of weights lies behind the last
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        const unsigned low = load_word(x + i * kGranule);
        const unsigned high = load_word(x + (kTiles + i) * kGranule);
#pragma unroll
        for (int m = 0; m < kEach; ++m) {
          mma_bf16(sums[m][i], weights[k][m], low, high);
        }
      }
    }
#pragma unroll
    for (int m = 0; m < kEach; ++m) {
#pragma unroll
      for (float (&four)[4] : sums[m]) fence_operands(four);
    }
    chunks.release();
  }
#pragma unroll
  for (int m = 0; m < kEach; ++m) {
    const int tile = warp + m * kComputingWarps;
    if (tile * 16 < kWidth) leave(tile * 16, sums[m]);
  }
}

}  // namespace cluster
}  // namespace cuda
}  // namespace minserve
