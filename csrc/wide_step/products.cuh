// Products of a block's weights with the sequences of its cluster, by warpgroups: 64 rows of
// weights by all of its tokens by 16 inputs at a time.
//
// Inputs and weights lie in granules of eight rows (tokens) by eight inputs, 128 bytes, which need
// no swizzle. Of the sums a lane has rows r = lane / 4 and r + 8 of its warp's sixteen, of the
// tokens 2 (lane % 4) and the next of each eight (linear/product.cuh).
#pragma once

#include "../linear/product.cuh"
#include "ring.cuh"

namespace minserve {
namespace cuda {
namespace wide {

constexpr int kGranule = 128;  // bytes

// Where a channel of a token is among granules of so many tokens.
template <int kTokens>
__device__ __forceinline__ int place_of(int channel, int token) {
  return (channel / 8 * kTokens + token) * 16 + channel % 8 * 2;
}

// A matrix of granules (PTX ISA, "Matrix descriptor" without swizzle). The low word has its place,
// and from a granule to the next inputs', the high one from a granule to the next rows'; all in
// units of sixteen bytes, as addresses are here.
__device__ __forceinline__ std::uint32_t low_word(std::uint32_t place, unsigned across) {
  return (place & 0x3fffu) | across << 16;
}
__device__ __forceinline__ std::uint64_t described(std::uint32_t low, unsigned down) {
  return static_cast<std::uint64_t>(down) << 32 | low;
}
__device__ __forceinline__ std::uint32_t place_in_units(const void* shared) {
  return shared_address(shared) >> 4;
}

// What a group of warps has given to the tensor cores, and the weights' stages that it holds.
template <int kTokens, int kSlabs>
class Products {
  // Stages whose products may be under way at once: of few, others are on their way meanwhile.
  static constexpr int kUnderWay = kTokens > 40 ? 1 : 2;
  static_assert(kUnderWay < kFewestStages, "another one comes meanwhile");

 public:
  template <int kHigh>
  using Sums = float[kHigh][kTokens / 2];

  __device__ __forceinline__ explicit Products(const Stages<kSlabs>& stages) : stages_(stages) {}

  // Sums are written before anything is added to them, and before any products are under way: if
  // the first ones wrote them, they would have their registers for good, in a loop.
  template <int kHigh>
  __device__ __forceinline__ static void clear(Sums<kHigh>& sums) {
#pragma unroll
    for (auto& slab : sums) {
#pragma unroll
      for (float& sum : slab) sum = 0.0f;
      sums_are_there(slab);
    }
  }
  // kHigh slabs' rows times so many steps of 16 inputs, an even number, which lie at `place`:
  // await(n) waits for the first n steps' inputs. meanwhile() is called when the first ones have
  // been given.
  template <int kHigh, class Await, class Meanwhile>
  __device__ __forceinline__ void give(int steps, std::uint32_t place, Await await,
                                       Meanwhile meanwhile, Sums<kHigh>& sums) {
    constexpr int kSteps = kSlabs / kHigh;
    static_assert(kSteps * kHigh == kSlabs && (kSteps == 4 || kSteps == 2 || kSteps == 1),
                  "a stage has whole steps, and what is left over is half of one");
#pragma unroll 1
    for (int first = 0; first + kSteps <= steps; first += kSteps, place += kSteps * 2 * kTokens) {
      await(first + kSteps);
      give_stage<kHigh, kSteps>(place, sums);
      if (first == 0) meanwhile();
      keep_few();
    }
    if (kSteps > 2 && steps % kSteps > 0) {
      await(steps);
      give_stage<kHigh, kSteps / 2>(place, sums);
      if (steps < kSteps) meanwhile();
      keep_few();
    }
  }
  // Until all are done.
  __device__ __forceinline__ void finish() {
    wait_products<0>();
#pragma unroll 1
    while (under_way_ > 0) release();
  }

 private:
  template <int kHigh, int kSteps>
  __device__ __forceinline__ void give_stage(std::uint32_t place, Sums<kHigh>& sums) {
    delay(64, 4000);
    const std::uint32_t weights = same_in_warp(low_word(stages_.next(), kGranule / 16));
    const std::uint32_t inputs = same_in_warp(low_word(place, kTokens));
    stages_.look_ahead();
    begin_products();
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
#pragma unroll
      for (int high = 0; high < kHigh; ++high) {
        Product<kTokens>::add(
            sums[high],
            described(weights + (k * kHigh + high) * (kSlabBytes / 16), 2 * kGranule / 16),
            described(inputs + k * 2 * kTokens, kGranule / 16), 1);
      }
    }
    commit_products();
    ++under_way_;
  }
  // No more stages are held than leave one to be filled.
  __device__ __forceinline__ void keep_few() {
    if (under_way_ > kUnderWay) {
      wait_products<kUnderWay>();
      release();
    }
  }
  __device__ __forceinline__ void release() {
    stages_.release();
    --under_way_;
  }

  Stages<kSlabs> stages_;
  int under_way_ = 0;
};

}  // namespace wide
}  // namespace cuda
}  // namespace minserve
