// Split-K in a thread-block cluster: each block sums a part of the inputs, and the parts are added
// through distributed shared memory. (Split-K and stream-K: Osama et al., arXiv 2301.03598;
// CUTLASS, "Efficient GEMM in CUDA".) The order of the addition is fixed, whichever part arrives
// first.
#pragma once

#include "../arch/sm90.cuh"
#include "../arch/wgmma.cuh"

namespace minserve {
namespace cuda {

// The blocks of a cluster have sums over a part of the inputs each, or over S::kSplitsEach that are
// kept apart. Sends each of the others those of its share of the tokens; `own` becomes the whole
// sums of this block's share, added up in the order of the inputs. All rings are free; `received`
// expects kSentBytes.
template <class S>
__device__ __forceinline__ void reduce_split_k(
    const float (&sums)[S::kSplitsEach][S::kBlocks][S::kTokens / 2],
    float (&own)[S::kBlocks][S::kEpilogueTokens / 2], int part, unsigned char* ring,
    std::uint64_t& received) {
  constexpr int kOwn = S::kEpilogueTokens / 2, kShare = S::kSentBytes / (S::kSplitK - 1);
  unsigned char* outgoing = ring + S::kSentBytes;
  // Slots for and from the others: first of the block that comes next.
  const auto slot_of = [&](int other) { return (other - part - 1) % S::kSplitK * kShare; };
  // Of four sums number i of a block of rows: neighbouring threads' are neighbours.
  const auto four_in = [&](unsigned char* slot, int each, int block, int i) -> float4& {
    const int group = threadIdx.x / kGroupThreads;
    const int blocks = (each * S::kGroups + group) * S::kBlocks + block;
    return reinterpret_cast<float4*>(
        slot)[(blocks * (kOwn / 4) + i / 4) * kGroupThreads + threadIdx.x % kGroupThreads];
  };
  float mine[S::kSplitsEach][S::kBlocks][kOwn];
#pragma unroll
  for (int to = 0; to < S::kSplitK; ++to) {  // no index of sums that is known only when it runs
#pragma unroll
    for (int each = 0; each < S::kSplitsEach; ++each) {
#pragma unroll
      for (int block = 0; block < S::kBlocks; ++block) {
#pragma unroll
        for (int i = 0; i < kOwn; i += 4) {
          const float* four = &sums[each][block][to * kOwn + i];
          if (to == part) {
#pragma unroll
            for (int k = 0; k < 4; ++k) mine[each][block][i + k] = four[k];
          } else {
            four_in(outgoing + slot_of(to + S::kSplitK), each, block, i) = {four[0], four[1],
                                                                            four[2], four[3]};
          }
        }
      }
    }
  }
  fence_proxy_async();
  named_barrier_sync(8, S::kComputing);
  if (threadIdx.x == 0) {
    for (int n = 1; n < S::kSplitK; ++n) {
      // To where it is the slot of this block.
      tma_copy_to_block((part + n) % S::kSplitK, ring + (S::kSplitK - 1 - n) * kShare,
                        outgoing + (n - 1) * kShare, kShare, received);
    }
  }
  __syncwarp();
  mbarrier_wait(received, 0);
#pragma unroll
  for (int block = 0; block < S::kBlocks; ++block) {
#pragma unroll
    for (int i = 0; i < kOwn; i += 4) {
      float total[4] = {};
#pragma unroll
      for (int n = 0; n < S::kSplitK * S::kSplitsEach; ++n) {
        const int from = n / S::kSplitsEach, each = n % S::kSplitsEach;
        const float* here = &mine[each][block][i];
        float4 four = {here[0], here[1], here[2], here[3]};
        if (from != part) four = four_in(ring + slot_of(from + S::kSplitK), each, block, i);
        total[0] += four.x, total[1] += four.y, total[2] += four.z, total[3] += four.w;
      }
#pragma unroll
      for (int k = 0; k < 4; ++k) own[block][i + k] = total[k];
    }
  }
}

}  // namespace cuda
}  // namespace minserve
