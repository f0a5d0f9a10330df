// The argmax head for Hopper: the head of a decode step whose rows are all greedy. It writes the
// best of each tile of W x and no logits. 32,000 logits are 128 KB for each token, which would be
// written and read again for one number.
//
// Here tokens are the rows of the tensor cores' products and rows of weights their columns, the
// other way round than in small_batch_kernel.cuh: a thread has many logits of a token, so that it
// finds their best without asking others. A block stays on its multiprocessor and takes tiles in
// turn; one thread feeds a ring of stages, two warpgroups multiply, each all rows of weights by its
// tokens. Sums of a row of weights are added up in the order of the inputs, whatever the number of
// tokens: the logits are to the bit those of GEMMs in batch-invariant mode, where these have no
// split-K.
#pragma once

#include "../core/reduce/argmax_key.cuh"
#include "../core/vector_access.cuh"
#include "../core/reduce/row_reader.cuh"
#include "argmax_head_args.h"
#include "epilogue.cuh"
#include "../arch/sm90.cuh"
#include "../arch/wgmma.cuh"

namespace minserve {
namespace cuda {

static_assert(kSquareRows == kStep, "squares come as the steps of a product do");

struct ArgmaxHeadShape {
  static constexpr int kGroups = 2;
  static constexpr int kTokens = kGroups * kBlockRows, kColumns = kArgmaxColumns;  // of a tile
  static constexpr int kComputing = kGroups * kGroupThreads, kThreads = kComputing + 32;
  static constexpr int kInputBytes = kTokens * kStep * 2, kWeightBytes = kColumns * kStep * 2;
  static constexpr int kStageBytes = kInputBytes + kWeightBytes;
  static constexpr int kStages = 4;
  static constexpr int kShared = kStages * kStageBytes + 1024;
};

// What a thread has of a warpgroup's product: of two tokens, `half` 0 and 1, columns 8 j and 8 j +
// 1 from its first one on in sums 4 j + 2 half and the next.
using ArgmaxHeadSums = float[kArgmaxColumns / 2];

__device__ __forceinline__ std::uint64_t best_of_thread(const ArgmaxHeadSums& sums, int half,
                                                        unsigned first) {
  float best = kImpossible;
  unsigned at = 0;
#pragma unroll
  for (int j = 0; j < kArgmaxColumns / 8; ++j) {
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      const float x = sums[4 * j + 2 * half + odd];
      if (x > best) at = 8 * j + odd;
      best = max_or_nan(best, x);
    }
  }
  return ArgmaxKey::of(best + 0.0f, first + at).key;
}

// A warpgroup's part of a tile, whose sums are there: thread t has tokens t / 32 * 16 + t % 32 / 4
// and the eighth one after it.
struct ArgmaxHeadTile {
  using S = ArgmaxHeadShape;

  const ArgmaxHeadArgs& args;
  int first_token, first_column;  // of the warpgroup

  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
  __device__ __forceinline__ int thread_column() const { return first_column + lane() % 4 * 2; }
  __device__ __forceinline__ std::int64_t thread_token(int half) const {
    return first_token + threadIdx.x % kGroupThreads / 32 * 16 + lane() / 4 + 8 * half;
  }
  // Of a token the sum of the squares of one step's inputs.
  __device__ __forceinline__ float squares_of(int step, int half) const {
    const std::int64_t token = thread_token(half);
    return token < args.tokens ? args.squares[step * args.tokens + token] : 0.0f;
  }

  // squares: of the thread's two tokens, where a norm's division was left.
  __device__ __forceinline__ void epilogue(ArgmaxHeadSums& sums, const float (&squares)[2]) const {
    if (args.squares) divide(sums, squares);
    if (args.bias) add_bias(sums);
    if (first_column + S::kColumns > args.vocabulary) leave_out_padding(sums);
    write_bests(sums);
  }

 private:
  // Does not change which is the best, but by rounding, as which logits are equal depends on it.
  __device__ __forceinline__ void divide(ArgmaxHeadSums& sums, const float (&squares)[2]) const {
    const float scale[2] = {norm_scale_of(args, squares[0]), norm_scale_of(args, squares[1])};
#pragma unroll
    for (int i = 0; i < S::kColumns / 2; ++i) sums[i] *= scale[i / 2 % 2];
  }

  __device__ __forceinline__ void add_bias(ArgmaxHeadSums& sums) const {
#pragma unroll
    for (int j = 0; j < S::kColumns / 8; ++j) {
      const int column = thread_column() + 8 * j;
      if (column >= args.channels) continue;
      Channels<bf16, 2> bias;
      bias.load(static_cast<const bf16*>(args.bias) + column);
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[4 * j + i] += bias[i % 2];
    }
  }

  // Rows of weights beyond the vocabulary.
  __device__ __forceinline__ void leave_out_padding(ArgmaxHeadSums& sums) const {
#pragma unroll
    for (int j = 0; j < S::kColumns / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (thread_column() + 8 * j + i % 2 >= args.vocabulary) sums[4 * j + i] = kImpossible;
      }
    }
  }

  __device__ __forceinline__ void write_bests(const ArgmaxHeadSums& sums) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      std::uint64_t key = best_of_thread(sums, half, thread_column());
#pragma unroll
      for (int distance = 1; distance < 4; distance *= 2) {
        key = greater(key, __shfl_xor_sync(0xffffffffu, key, distance));
      }
      const std::int64_t token = thread_token(half);
      if (lane() % 4 == 0 && token < args.tokens) {
        args.best[token * args.tiles + first_column / S::kColumns] = key;
      }
    }
  }
};

__global__ void __launch_bounds__(ArgmaxHeadShape::kThreads, 1)
    argmax_head_kernel(const __grid_constant__ CUtensorMap weight_map,
                       const __grid_constant__ CUtensorMap input_map,
                       const __grid_constant__ ArgmaxHeadArgs args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using S = ArgmaxHeadShape;
  extern __shared__ unsigned char unaligned[];
  unsigned char* ring = unaligned + (1024 - shared_address(unaligned) % 1024) % 1024;
  __shared__ std::uint64_t full[S::kStages], empty[S::kStages];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int steps = static_cast<int>((args.inputs + kStep - 1) / kStep);
  // Neighbours have the same rows of weights, which so are read from memory once.
  const int pieces = static_cast<int>((args.tokens + S::kTokens - 1) / S::kTokens);
  const int tiles = pieces * static_cast<int>(args.tiles);
  const int first = blockIdx.x, stride = gridDim.x;

  using Stages = RingAddresses<S::kStageBytes>;
  using At = PipelineState<S::kStages>;
  const auto load_weights = [&](const Stages& stages, int slot, int tile, int n) {
    mbarrier_arrive_expect_tx(stages.full(slot), S::kStageBytes);
    tma_load_tile(stages.stage(slot) + S::kInputBytes, weight_map, n * kStep,
                  tile / pieces * S::kColumns, stages.full(slot));
  };
  const auto load_inputs = [&](const Stages& stages, int slot, int tile, int n) {
    tma_load_tile(stages.stage(slot), input_map, n * kStep, tile % pieces * S::kTokens,
                  stages.full(slot));
  };
  const int ahead = min(steps, S::kStages);
  // The thread that feeds the ring: weights are on their way before the block has met.
  if (threadIdx.x == S::kComputing) {
    prefetch_tensor_map(weight_map);
    for (int i = 0; i < S::kStages; ++i) {
      mbarrier_init(full[i], 1);
      mbarrier_init(empty[i], S::kComputing / 32);
    }
    fence_mbarrier_init();
    fence_proxy_async();
    const Stages stages(full, empty, ring);
    for (int n = 0; n < ahead; ++n) load_weights(stages, n, first, n);
    prefetch_tensor_map(input_map);
  }
  __syncthreads();
  pdl_launch_dependents();
  wait_for_previous_kernel();

  const Stages stages(full, empty, ring);
  if (warp == S::kComputing / 32) {
    if (lane > 0) return;
    At at;
    for (int n = 0; n < ahead; ++n, ++at) load_inputs(stages, n, first, n);
    for (int tile = first; tile < tiles; tile += stride) {
#pragma unroll 1
      for (int n = tile == first ? ahead : 0; n < steps; ++n, ++at) {
        if (at.round > 0) mbarrier_wait(stages.empty(at.slot), (at.round - 1) % 2);
        load_weights(stages, at.slot, tile, n);
        load_inputs(stages, at.slot, tile, n);
      }
    }
    return;
  }
  const int group = warp / 4;
  const std::uint32_t own_rows = warp_uniform(group * kBlockRows * kStep * 2);
  const auto release = [&](int slot) {
    if (lane == 0) mbarrier_arrive(stages.empty(slot));
  };
  ArgmaxHeadSums sums;
  At at;
  for (int tile = first; tile < tiles; tile += stride) {
    const ArgmaxHeadTile of{args, tile % pieces * S::kTokens + group * kBlockRows,
                            tile / pieces * S::kColumns};
    float squares[2] = {0.0f, 0.0f};  // added up in their order
    int last = 0;
#pragma unroll 1
    for (int n = 0; n < steps; ++n, ++at) {
      float next[2] = {0.0f, 0.0f};  // asked for while the step is multiplied
      if (args.squares) next[0] = of.squares_of(n, 0), next[1] = of.squares_of(n, 1);
      mbarrier_wait(stages.full(at.slot), at.round % 2);
      const std::uint64_t inputs = smem_descriptor(stages.stage(at.slot) + own_rows);
      const std::uint64_t weights = smem_descriptor(stages.stage(at.slot) + S::kInputBytes);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < kStep / 16; ++k) {
        Wgmma<S::kColumns>::add(sums, inputs + 2 * k, weights + 2 * k, n > 0 || k > 0);
      }
      wgmma_commit();
      if (n > 0) {
        wgmma_wait<1>();
        release(last);
      }
      squares[0] += next[0], squares[1] += next[1];
      last = at.slot;
    }
    wgmma_wait<0>();
    fence_operands(sums);
    release(last);
    of.epilogue(sums, squares);
  }
#endif
}

}  // namespace cuda
}  // namespace minserve
