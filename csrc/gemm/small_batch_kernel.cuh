// out [tokens, channels] = epilogue(W x) for Hopper: the weights are the product's rows, the tokens
// its columns, so that a small batch wastes a few columns rather than most of a tile.
//
// One warp feeds a ring of stages in shared memory, kStep inputs of the block's rows and tokens
// each; a warpgroup multiplies. Weights depend on no kernel before, so the ring's first stages of
// them are asked for before that kernel has ended.
//
// Where there are too few tiles for the GPU, the blocks of a cluster take a part of the inputs
// each (split-K), sum it from zero and send every other one its share of the tokens, who adds up in
// order.
#pragma once

#include "epilogue.cuh"
#include "../arch/sm90.cuh"
#include "../arch/wgmma.cuh"

namespace minserve {
namespace cuda {

// The block has a block of 64 rows for each gate, of 64 channels. Step: epilogue.cuh.
template <class Step_, int kTokens_, bool kDeep = false>
struct SmallBatchShape {
  using Step = Step_;
  static constexpr int kGates = Step::kGates, kTokens = kTokens_;
  static constexpr bool kStepping = Step::kStepping;
  static constexpr int kComputing = kGroupThreads;
  // One warp copies, one prepares; with two more, all run the epilogue.
  static constexpr int kThreads = kComputing + 128;
  static constexpr int kRows = kGates * kBlockRows, kChannels = kBlockRows;
  static constexpr int kTileBytes = kBlockRows * kStep * 2;
  static constexpr int kWeightBytes = kRows * kStep * 2;
  static constexpr int kStageBytes = kWeightBytes + kTokens * kStep * 2;
  // Sums of a token, padded so that a warp's fragments meet 32 banks.
  static constexpr int kSumRows = kRows + 4;
  static constexpr int kSumBytes = kTokens * kSumRows * 4;
  // Blocks of two kernels, or several of one, share a multiprocessor: while one waits or finishes
  // its sums, the copies of another go on.
  static constexpr int kWanted = (kDeep ? 200 : kTokens >= 64 ? 96 : 64) * 1024;
  static constexpr int kFit = (kWanted - (kDeep ? kSumBytes : 0)) / kStageBytes;
  static constexpr int kStages = kFit > 8 ? 8 : kFit < 2 ? 2 : kFit;
  static constexpr int kRing =
      ((kStages * kStageBytes > kSumBytes ? kStages * kStageBytes : kSumBytes) + 1023) / 1024 *
      1024;
  static constexpr int kMinBlocks = kDeep ? 1 : kGates == 1 && kTokens <= 16 ? 3 : 2;
  // With split-K, what blocks are sent lies behind the ring.
  static constexpr int shared_bytes(int parts) {
    return kRing + (parts > 1 ? kSumBytes : 0) + 1024;
  }
};

template <class S>
__global__ void __launch_bounds__(S::kThreads, S::kMinBlocks)
    small_batch_kernel(const __grid_constant__ CUtensorMap weight_map,
                       const __grid_constant__ CUtensorMap input_map,
                       const __grid_constant__ GemmArgs args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using At = PipelineState<S::kStages>;
  extern __shared__ unsigned char unaligned[];
  unsigned char* ring = unaligned + (1024 - shared_address(unaligned) % 1024) % 1024;
  __shared__ std::uint64_t full[S::kStages], empty[S::kStages], received;
  __shared__ float scale[S::kTokens];
  __shared__ int slots[S::kTokens];
  __shared__ EpilogueOperands<S::kGates, S::kChannels, S::Step::kParameters> vectors;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int parts = gridDim.z, part = blockIdx.z;
  const bool alone = parts == 1;
  const int share = S::kTokens / parts;  // tokens of this block's epilogue
  const std::int64_t first_token = static_cast<std::int64_t>(blockIdx.x) * S::kTokens;
  const std::int64_t first_channel = static_cast<std::int64_t>(blockIdx.y) * S::kChannels;
  if (threadIdx.x == 0) {
    for (int i = 0; i < S::kStages; ++i) {
      mbarrier_init(full[i], 1);
      mbarrier_init(empty[i], S::kComputing / 32);
    }
    mbarrier_init(received, 1);
    fence_mbarrier_init();
    if (parts > 1) mbarrier_arrive_expect_tx(received, (parts - 1) * share * S::kSumRows * 4);
  }
  __syncthreads();
  if (!alone) arrive_at_cluster();
  pdl_launch_dependents();

  const int steps = static_cast<int>((args.inputs + kStep - 1) / kStep);
  const int begin = part * steps / parts, count = (part + 1) * steps / parts - begin;

  float sums[S::kGates][S::kTokens / 2];
  if (warp == S::kComputing / 32) {
    if (lane == 0) {
      prefetch_tensor_map(weight_map);
      prefetch_tensor_map(input_map);
    }
    const RingAddresses<S::kStageBytes> stages(full, empty, ring);
    const auto load_weights = [&](int slot, int n) {
      const std::uint32_t stage = stages.stage(slot), barrier = stages.full(slot);
      mbarrier_arrive_expect_tx(barrier, S::kStageBytes);
#pragma unroll
      for (int gate = 0; gate < S::kGates; ++gate) {
        tma_load_tile(stage + gate * S::kTileBytes, weight_map, (begin + n) * kStep,
                      static_cast<int>(first_channel + gate * args.channels), barrier);
      }
    };
    const auto load_inputs = [&](int slot, int n) {
      tma_load_tile(stages.stage(slot) + S::kWeightBytes, input_map, (begin + n) * kStep,
                    static_cast<int>(first_token), stages.full(slot));
    };
    const int ahead = min(count, S::kStages);
    if (lane == 0) {
      for (int n = 0; n < ahead; ++n) load_weights(n, n);
    }
    __syncwarp();
    wait_for_previous_kernel();
    if (!alone) wait_for_cluster();
    if (lane == 0) {
      At at;
      for (int n = 0; n < ahead; ++n, ++at) load_inputs(at.slot, n);
      for (int n = ahead; n < count; ++n, ++at) {
        mbarrier_wait(stages.empty(at.slot), (at.round - 1) % 2);
        load_weights(at.slot, n);
        load_inputs(at.slot, n);
      }
    }
    __syncwarp();
  } else if (warp == S::kComputing / 32 + 1) {
    vectors.ask(args, static_cast<int>(first_channel), lane, 32);
    if constexpr (S::kStepping) S::Step::prefetch_operands(args, first_channel, lane);
    wait_for_previous_kernel();
#pragma unroll 1
    for (int n = lane; n < share; n += 32) {
      const std::int64_t token = first_token + part * share + n;
      scale[n] = norm_scale<4>(args, token);  // few registers: others share the multiprocessor
      if (S::kStepping) slots[n] = token < args.tokens ? args.slots[token] : -1;
    }
    __syncwarp();
    if constexpr (S::kStepping) {
      constexpr int kLines = S::kChannels * 4 / 128;
      for (int n = lane; n < share * kLines; n += 32) {
        S::Step::prefetch_state(args, slots[n / kLines], first_channel + n % kLines * 32);
      }
    }
    wait_for_copies();
    __syncwarp();
    if (!alone) wait_for_cluster();
  } else if (warp > S::kComputing / 32) {
    wait_for_previous_kernel();
    if (!alone) wait_for_cluster();
  } else {
    if (!alone) wait_for_cluster();
    const RingAddresses<S::kStageBytes> stages(full, empty, ring);
    At at;
    for (int n = 0, last = 0; n < count; ++n, ++at) {
      mbarrier_wait(stages.full(at.slot), at.round % 2);
      const std::uint32_t stage = stages.stage(at.slot);
      const std::uint64_t inputs = smem_descriptor(stage + S::kWeightBytes);
      wgmma_fence();
#pragma unroll
      for (int gate = 0; gate < S::kGates; ++gate) {
        const std::uint64_t weights = smem_descriptor(stage + gate * S::kTileBytes);
#pragma unroll
        for (int k = 0; k < kStep / 16; ++k) {
          Wgmma<S::kTokens>::add(sums[gate], weights + 2 * k, inputs + 2 * k, n > 0 || k > 0);
        }
      }
      wgmma_commit();
      if (n > 0) {
        wgmma_wait<1>();
        if (lane == 0) mbarrier_arrive(stages.empty(last));
      }
      last = at.slot;
    }
    wgmma_wait<0>();
  }

  // Short code that runs in a loop: long code that runs once would wait for its instructions. What
  // is read of global memory for a quad is asked for while the one before is finished, for the
  // first one while sums are on their way.
  constexpr int kQuads = S::kChannels / kQuad;
  const int quads = share * kQuads, stride = share * S::kSumRows;
  const auto position_of = [&](int n) {
    const int token = n / kQuads, quad = n % kQuads * kQuad;
    return QuadPosition{static_cast<int>(first_token) + part * share + token,
                        static_cast<int>(first_channel) + quad, token, quad};
  };
  QuadPosition at = position_of(threadIdx.x), next = at;
  typename S::Step::Before before, coming;

  // The ring becomes [tokens][rows] of this block's sums. In parts, each gets its share of the
  // tokens from all, behind its ring; what a block tells itself it writes there at once.
  __syncthreads();
  if (threadIdx.x < quads) before.load(args, at, S::kStepping ? slots[at.own_token] : 0);
  float* staged = reinterpret_cast<float*>(ring);
  unsigned char* incoming = ring + S::kRing;
  const int own_share = parts > 1 ? share : 0;
  if (warp < S::kComputing / 32) {
    const int row = warp * 16 + lane / 4;
#pragma unroll
    for (int j = 0; j < S::kTokens / 8; ++j) {
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const int token = 8 * j + lane % 4 * 2 + odd;
        const bool own = static_cast<unsigned>(token - part * own_share) < own_share;
        float* to = staged + (own ? S::kRing / 4 : 0) + token * S::kSumRows + row;
#pragma unroll
        for (int gate = 0; gate < S::kGates; ++gate) {
          to[gate * kBlockRows] = sums[gate][4 * j + odd];
          to[gate * kBlockRows + 8] = sums[gate][4 * j + 2 + odd];
        }
      }
    }
  }
  if (parts > 1) fence_proxy_async();
  __syncthreads();
  const float* parts_sums = staged;  // [parts][share][rows]
  if (parts > 1) {
    const int bytes = share * S::kSumRows * 4;
    if (warp == S::kComputing / 32 && lane < parts && lane != part) {
      tma_copy_to_block(lane, incoming + part * bytes, ring + lane * bytes, bytes, received);
    }
    __syncwarp();
    mbarrier_wait(received, 0);
    parts_sums = reinterpret_cast<const float*>(incoming);
  }
  // Nobody ends while what it sent is still being read.
  if (!alone) arrive_at_cluster();

#pragma unroll 1
  for (int n = threadIdx.x; n < quads; n += S::kThreads, at = next, before = coming) {
    if (n + S::kThreads < quads) {
      next = position_of(n + S::kThreads);
      coming.load(args, next, S::kStepping ? slots[next.own_token] : 0);
    }
    if (!at.inside(args)) continue;
    const float* sums_of_part = parts_sums + at.own_token * S::kSumRows + at.own_channel;
    float y[S::kGates][kQuad] = {};
#pragma unroll 2
    for (int from = 0; from < parts; ++from, sums_of_part += stride) {
#pragma unroll
      for (int gate = 0; gate < S::kGates; ++gate) {
        const float4 sum = *reinterpret_cast<const float4*>(sums_of_part + gate * kBlockRows);
        y[gate][0] += sum.x, y[gate][1] += sum.y, y[gate][2] += sum.z, y[gate][3] += sum.w;
      }
    }
    const float factor = scale[at.own_token];
#pragma unroll
    for (int gate = 0; gate < S::kGates; ++gate) {
#pragma unroll
      for (int i = 0; i < kQuad; ++i) y[gate][i] *= factor;
    }
    if constexpr (S::kGates > 1) {
      gates_epilogue(typename S::Step{}, args, at, vectors, before, y);
    } else {
      epilogue(args, at, vectors, before, y[0]);
    }
  }
  __syncwarp();
  if (!alone) wait_for_cluster();
#endif
}

}  // namespace cuda
}  // namespace minserve
