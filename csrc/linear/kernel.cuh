// out [tokens, channels] = epilogue(W x) for Hopper: the weights are the product's rows, the tokens
// its columns, so that a small batch wastes a few columns rather than most of a tile.
//
// One warp feeds a ring of stages in shared memory, kStep inputs of the block's rows and tokens
// each; warpgroups multiply. Weights depend on no kernel before, so the ring's first stages of them
// are asked for before that kernel has ended.
//
// The inputs are cut in segments whose sums are formed from zero and added in order. Where there
// are too few tiles for the GPU, a cluster of blocks takes one segment each and every block
// finishes a share of the tokens; elsewhere one block takes them all. The cuts depend on the
// weights' shape alone: a token's result is the same in every batch.
#pragma once

#include "epilogue.cuh"
#include "hopper.cuh"
#include "product.cuh"

namespace minserve {
namespace cuda {

constexpr int kStep = 64;        // inputs a stage: rows of 128 bytes
constexpr int kBlockRows = 64;   // rows of a warpgroup's product
constexpr int kGroupThreads = 128;

// kBlocks: of kBlockRows rows for each warpgroup; a cell's gates, or neighbours.
template <class T, int kBlocks_, int kGroups_, int kTokens_, bool kStepping_, bool kManySegments_>
struct LinearShape {
  using Type = T;
  static constexpr int kBlocks = kBlocks_, kGroups = kGroups_, kTokens = kTokens_;
  static constexpr bool kStepping = kStepping_;          // rows are gates of kGroups * 64 channels
  static constexpr bool kManySegments = kManySegments_;  // may take several
  static constexpr int kComputing = kGroups * kGroupThreads;
  static constexpr int kThreads = kComputing + 64;  // one warp copies, one prepares
  static constexpr int kRows = kGroups * kBlocks * kBlockRows;
  static constexpr int kChannels = kStepping ? kGroups * kBlockRows : kRows;
  static constexpr int kTileBytes = kBlockRows * kStep * 2;
  static constexpr int kStageBytes = kRows * kStep * 2 + kTokens * kStep * 2;
  // Sums of a token, padded so that a warp's fragments meet 32 banks.
  static constexpr int kSumRows = kRows + 4;
  static constexpr int kSumBytes = kTokens * kSumRows * 4;
  // Three small blocks to a multiprocessor, so that the next kernel's have room beside this one's.
  static constexpr bool kSmall = kGroups == 1 && kBlocks * kTokens <= 128;
  static constexpr int kRingBytes = (kSmall ? 72 : 200) * 1024;
  static constexpr int kFit = kRingBytes / kStageBytes;
  static constexpr int kStages = kFit > 8 ? 8 : kFit < 2 ? 2 : kFit;
  static constexpr int kShared =
      (kStages * kStageBytes > kSumBytes ? kStages * kStageBytes : kSumBytes) + 1024;
  static constexpr int kMinBlocks = kSmall ? 2 : 1;
};


template <class S>
__global__ void __launch_bounds__(S::kThreads, S::kMinBlocks)
    linear_kernel(const __grid_constant__ CUtensorMap weight_map,
                  const __grid_constant__ CUtensorMap input_map,
                  const __grid_constant__ LinearArgs args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using T = typename S::Type;
  extern __shared__ unsigned char unaligned[];
  unsigned char* ring = unaligned + (1024 - shared_address(unaligned) % 1024) % 1024;
  __shared__ std::uint64_t full[S::kStages], empty[S::kStages];
  __shared__ float scale[S::kTokens];
  __shared__ int slots[S::kTokens];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int parts = gridDim.z, part = blockIdx.z;  // of the cluster
  const int share = S::kTokens / parts;            // tokens that this block finishes
  const std::int64_t first_token = static_cast<std::int64_t>(blockIdx.x) * S::kTokens;
  const std::int64_t first_channel = static_cast<std::int64_t>(blockIdx.y) * S::kChannels;
  if (threadIdx.x == 0) {
    for (int i = 0; i < S::kStages; ++i) {
      init_barrier(full[i], 1);
      init_barrier(empty[i], S::kComputing / 32);
    }
    fence_barriers();
  }
  __syncthreads();
  let_next_kernel_start();

  const int steps = static_cast<int>((args.inputs + kStep - 1) / kStep);
  const int segments = args.segments / parts;  // of this block
  const auto segment_begin = [&](int n) { return (part * segments + n) * steps / args.segments; };
  const int begin = segment_begin(0), count = segment_begin(segments) - begin;

  if (warp == S::kComputing / 32) {
    if (lane == 0) {
      prefetch_map(weight_map);
      prefetch_map(input_map);
      const auto copy_weights = [&](int n) {
        unsigned char* stage = ring + n % S::kStages * S::kStageBytes;
        std::uint64_t& barrier = full[n % S::kStages];
        arrive_expecting(barrier, S::kStageBytes);
#pragma unroll
        for (int group = 0; group < S::kGroups; ++group) {
#pragma unroll
          for (int block = 0; block < S::kBlocks; ++block) {
            const int index = group * S::kBlocks + block;
            const int row =
                S::kStepping ? static_cast<int>(block * args.channels + first_channel) +
                                   group * kBlockRows
                             : static_cast<int>(first_channel) + index * kBlockRows;
            copy_box(stage + index * S::kTileBytes, weight_map, (begin + n) * kStep, row, barrier);
          }
        }
      };
      const auto copy_inputs = [&](int n) {
        unsigned char* stage = ring + n % S::kStages * S::kStageBytes;
        copy_box(stage + S::kRows * kStep * 2, input_map, (begin + n) * kStep,
                 static_cast<int>(first_token), full[n % S::kStages]);
      };
      const int ahead = min(count, S::kStages);
      for (int n = 0; n < ahead; ++n) copy_weights(n);
      wait_for_previous_kernel();
      for (int n = 0; n < ahead; ++n) copy_inputs(n);
      for (int n = ahead; n < count; ++n) {
        wait_barrier(empty[n % S::kStages], (n / S::kStages - 1) % 2);
        copy_weights(n);
        copy_inputs(n);
      }
    } else {
      wait_for_previous_kernel();
    }
    __syncwarp();
  } else if (warp == S::kComputing / 32 + 1) {
    wait_for_previous_kernel();
    for (int n = lane; n < share; n += 32) {
      const std::int64_t token = first_token + part * share + n;
      float sum = 0.0f;
      if (args.squares && token < args.tokens) {
#pragma unroll 8
        for (int block = 0; block < args.square_blocks; ++block) {
          sum += args.squares[block * args.tokens + token];
        }
      }
      scale[n] = args.squares ? rsqrtf(sum / args.width + args.eps) : 1.0f;
      if (S::kStepping) slots[n] = token < args.tokens ? args.slots[token] : -1;
    }
    if (S::kStepping) {
      __syncwarp();
      constexpr int kLines = S::kChannels * 4 / 128;
      for (int n = lane; n < share * kLines; n += 32) {
        const int slot = slots[n / kLines];
        if (slot >= 0 && slot < args.num_slots) {
          prefetch_to_l2(args.state + slot * args.state_stride + first_channel + n % kLines * 32);
        }
      }
    }
  }

  float sums[S::kBlocks][S::kTokens / 2];
  if (warp < S::kComputing / 32) {
    const int group = warp / 4;
    float totals[S::kManySegments ? S::kBlocks : 1][S::kManySegments ? S::kTokens / 2 : 1];
    int n = 0;
    for (int segment = 0; segment < segments; ++segment) {
      const int end = segment_begin(segment + 1) - begin;
      for (int first = n; n < end; ++n) {
        const int at = n % S::kStages;
        wait_barrier(full[at], n / S::kStages % 2);
        const unsigned char* stage = ring + at * S::kStageBytes;
        const std::uint64_t inputs = describe_tile(stage + S::kRows * kStep * 2);
        begin_products();
#pragma unroll
        for (int block = 0; block < S::kBlocks; ++block) {
          const std::uint64_t weights =
              describe_tile(stage + (group * S::kBlocks + block) * S::kTileBytes);
#pragma unroll
          for (int k = 0; k < kStep / 16; ++k) {
            Product<T, S::kTokens>::add(sums[block], weights + 2 * k, inputs + 2 * k,
                                        n > first || k > 0);
          }
        }
        commit_products();
        if (n > first) {
          wait_products<1>();
          if (lane == 0) arrive(empty[(n - 1) % S::kStages]);
        }
      }
      wait_products<0>();
      if (n > 0 && lane == 0) arrive(empty[(n - 1) % S::kStages]);
      if constexpr (S::kManySegments) {
#pragma unroll
        for (int block = 0; block < S::kBlocks; ++block) {
#pragma unroll
          for (int i = 0; i < S::kTokens / 2; ++i) {
            totals[block][i] = segment == 0 ? sums[block][i] : totals[block][i] + sums[block][i];
          }
        }
      }
    }
    if constexpr (S::kManySegments) {
#pragma unroll
      for (int block = 0; block < S::kBlocks; ++block) {
#pragma unroll
        for (int i = 0; i < S::kTokens / 2; ++i) sums[block][i] = totals[block][i];
      }
    }
  }

  // The ring becomes [parts][share tokens][rows] of sums, those of every block for this one's share.
  const auto meet = [&] {
    if (parts > 1) {
      cluster_sync();
    } else {
      __syncthreads();
    }
  };
  meet();
  if (warp < S::kComputing / 32) {
    const int row = warp / 4 * S::kBlocks * kBlockRows + warp % 4 * 16 + lane / 4;
#pragma unroll
    for (int j = 0; j < S::kTokens / 8; ++j) {
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const int token = 8 * j + lane % 4 * 2 + odd, owner = token / share;
        const int at = (part * share + token % share) * S::kSumRows + row;
        std::uint32_t to = shared_address(ring) + at * 4;
        if (parts > 1) to = address_in_block(to, owner);
#pragma unroll
        for (int block = 0; block < S::kBlocks; ++block) {
#pragma unroll
          for (int lower = 0; lower < 2; ++lower) {
            const float sum = sums[block][4 * j + 2 * lower + odd];
            const int offset = block * kBlockRows + 8 * lower;
            if (parts > 1) {
              store_in_cluster(to + offset * 4, sum);
            } else {
              reinterpret_cast<float*>(ring)[at + offset] = sum;
            }
          }
        }
      }
    }
  }
  meet();
  if (warp >= S::kComputing / 32) return;

  constexpr int kQuads = S::kChannels / kQuad;
  for (int n = threadIdx.x; n < share * kQuads; n += S::kComputing) {
    const int mine = n / kQuads, quad = n % kQuads * kQuad;
    const std::int64_t token = first_token + part * share + mine;
    const std::int64_t channel = first_channel + quad;
    if (token >= args.tokens || channel >= args.channels) continue;
    constexpr int kOutputs = S::kStepping ? S::kBlocks : 1;
    float y[kOutputs][kQuad];
#pragma unroll
    for (int gate = 0; gate < kOutputs; ++gate) {
      const int row = S::kStepping ? (quad / kBlockRows * S::kBlocks + gate) * kBlockRows +
                                         quad % kBlockRows
                                   : quad;
      for (int from = 0; from < parts; ++from) {
        const float4 sum = *reinterpret_cast<const float4*>(
            reinterpret_cast<const float*>(ring) + (from * share + mine) * S::kSumRows + row);
        const float four[kQuad] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
        for (int i = 0; i < kQuad; ++i) y[gate][i] = from == 0 ? four[i] : y[gate][i] + four[i];
      }
#pragma unroll
      for (int i = 0; i < kQuad; ++i) y[gate][i] *= scale[mine];
    }
    if constexpr (!S::kStepping) {
      finish<T>(args, token, channel, y[0]);
    } else if constexpr (S::kBlocks == 2) {
      finish_step<T, MinGruCell>(args, token, channel, slots[mine], y);
    } else {
      finish_step<T, MinLstmCell>(args, token, channel, slots[mine], y);
    }
  }
#endif
}

}  // namespace cuda
}  // namespace minserve
