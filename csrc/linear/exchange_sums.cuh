// Sums over parts of the inputs, which the blocks of a cluster have, become whole ones.
#pragma once

#include "hopper.cuh"
#include "product.cuh"

namespace minserve {
namespace cuda {

// The blocks of a cluster have sums over a part of the inputs each. Sends each of the others those
// of its share of the tokens; `own` becomes the whole sums of this block's share, added up in the
// order of the inputs. All rings are free; `received` expects kSentBytes.
template <class S>
__device__ __forceinline__ void exchange_sums(const float (&sums)[S::kBlocks][S::kTokens / 2],
                                              float (&own)[S::kBlocks][S::kFinish / 2], int part,
                                              unsigned char* ring, std::uint64_t& received) {
  constexpr int kOwn = S::kFinish / 2, kShare = S::kSentBytes / (S::kParts - 1);
  unsigned char* outbox = ring + S::kSentBytes;
  // Boxes for and from the others: first of the block that comes next.
  const auto box_of = [&](int other) { return (other - part - 1) % S::kParts * kShare; };
  // Of four sums number i of a block of rows: neighbouring threads' are neighbours.
  const auto four_in = [&](unsigned char* box, int block, int i) -> float4& {
    const int group = threadIdx.x / kGroupThreads;
    return reinterpret_cast<float4*>(
        box)[((group * S::kBlocks + block) * (kOwn / 4) + i / 4) * kGroupThreads +
             threadIdx.x % kGroupThreads];
  };
#pragma unroll
  for (int to = 0; to < S::kParts; ++to) {  // no index of sums that is known only when it runs
#pragma unroll
    for (int block = 0; block < S::kBlocks; ++block) {
#pragma unroll
      for (int i = 0; i < kOwn; i += 4) {
        const float* four = &sums[block][to * kOwn + i];
        if (to == part) {
#pragma unroll
          for (int k = 0; k < 4; ++k) own[block][i + k] = four[k];
        } else {
          four_in(outbox + box_of(to + S::kParts), block, i) = {four[0], four[1], four[2], four[3]};
        }
      }
    }
  }
  fence_for_copies();
  meet(8, S::kComputing);
  if (threadIdx.x == 0) {
    for (int n = 1; n < S::kParts; ++n) {
      // To where it is the box of this block.
      copy_to_block((part + n) % S::kParts, ring + (S::kParts - 1 - n) * kShare,
                    outbox + (n - 1) * kShare, kShare, received);
    }
  }
  __syncwarp();
  wait_barrier(received, 0);
#pragma unroll
  for (int block = 0; block < S::kBlocks; ++block) {
#pragma unroll
    for (int i = 0; i < kOwn; i += 4) {
      float total[4] = {};
#pragma unroll
      for (int from = 0; from < S::kParts; ++from) {
        float4 four = {own[block][i], own[block][i + 1], own[block][i + 2], own[block][i + 3]};
        if (from != part) four = four_in(ring + box_of(from + S::kParts), block, i);
        total[0] += four.x, total[1] += four.y, total[2] += four.z, total[3] += four.w;
      }
#pragma unroll
      for (int k = 0; k < 4; ++k) own[block][i + k] = total[k];
    }
  }
}

}  // namespace cuda
}  // namespace minserve
