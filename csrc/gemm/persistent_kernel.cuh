// out [tokens, channels] = epilogue(W x) for Hopper, many tokens: as small_batch_kernel.cuh, in
// large tiles.
//
// Persistent and warp-specialised: a block stays on its multiprocessor and takes tiles in turn.
// (CUTLASS's persistent kernels; the grid is one block a multiprocessor.) One thread feeds a ring
// of stages in shared memory, kStep inputs of the tile's rows and tokens each; warpgroups multiply.
// What is staged while a tile is finished lies in stages of the same ring, which come after the
// tile's own: the thread that feeds the ring leaves them out, or puts the residual stream there.
//
// What a multiprocessor can ask of the L2 cache is the first limit (about 42 bytes a cycle of the
// 64 that a tile of 128 by 128 needs), so many tokens have large tiles. Fewer have the smallest of
// which there are no more than multiprocessors; where sums are long, the blocks of a cluster have a
// part of the inputs each (split-K) and give each other their sums of a share of the tokens. In
// batch-invariant mode one block takes these parts in turn (serial split-K): each is summed from
// zero and added to the totals, which start at zero as those of a cluster do, so the bits are the
// same. Or each block of a cluster takes two parts, and gives the others both.
#pragma once

#include "cluster_split_k.cuh"
#include "tile_epilogue.cuh"
#include "../arch/sm90.cuh"
#include "../arch/wgmma.cuh"

namespace minserve {
namespace cuda {

// kGroups warpgroups of kBlocks blocks of 64 rows each; kSplitK blocks have a part of the inputs
// each, and then one tile. kSerialSplitK: a block takes parts of its inputs one after the other; of
// kSplitK blocks each takes two.
template <class Step_, int kGroups_, int kBlocks_, int kTokens_, int kSplitK_ = 1,
          bool kSerialSplitK_ = false>
struct PersistentShape {
  using Step = Step_;
  static constexpr int kGates = Step::kGates, kGroups = kGroups_, kBlocks = kBlocks_;
  static constexpr int kTokens = kTokens_, kSplitK = kSplitK_;
  static constexpr bool kStepping = Step::kStepping, kIsSplit = kSplitK > 1,
                        kSerialSplitK = kSerialSplitK_;
  static_assert(kGates < 3 || (kGroups == 3 && kBlocks == 1), "a warpgroup for each gate");
  static_assert(kSplitK == 1 || kSplitK == 2 || kSplitK == 4, "each sends the others' sums");
  // Sums that are kept apart: the last are those to which products are added, the ones before them
  // of serial split-K the totals, or the first part's of two.
  static constexpr int kSets = kSerialSplitK ? 2 : 1,
                       kSplitsEach = kIsSplit && kSerialSplitK ? 2 : 1;
  static_assert(kTokens % 32 == 0 && kTokens % (16 * kSplitK) == 0,
                "a token for each lane, and whole squares");
  static constexpr int kComputing = kGroups * kGroupThreads;
  // A warp feeds the ring and one prepares. Two more help, for a warpgroup can give its registers
  // to those that multiply.
  static constexpr int kPreparing = 3;  // warps
  static constexpr int kThreads = kComputing + kGroupThreads;
  static constexpr int kFewRegisters = kGroups == 3 ? 56 : 40;
  static constexpr int kManyRegisters = kGroups == 3 ? 152 : 232;
  static constexpr int kRows = kGroups * kBlocks * kBlockRows;
  static constexpr int kChannels = kRows / kGates;
  // All gates of a unit's channels are in one block of rows, of three gates in three.
  static constexpr int kUnitBlocks = kGates == 3 ? 3 : 1;
  static constexpr int kUnitChannels = kUnitBlocks * kBlockRows / kGates;
  static constexpr int kWeightTiles = kRows / kUnitChannels;
  static constexpr int kWeightTileBytes = kUnitChannels * kStep * 2;
  static constexpr int kWeightBytes = kRows * kStep * 2;
  static constexpr int kInputBytes = kTokens * kStep * 2;
  static constexpr int kStageBytes = kWeightBytes + kInputBytes;
  // Tokens of a block's epilogue, and what is staged of a block of rows for them.
  static constexpr int kEpilogueTokens = kTokens / kSplitK;
  static constexpr int kStagedBytes = kEpilogueTokens * kBlockRows * 2;
  // Tiles of tokens in which TMA takes them.
  static constexpr int kPieces = kEpilogueTokens >= 64 ? 2 : 1,
                       kPieceTokens = kEpilogueTokens / kPieces;
  static constexpr int kPieceBytes = kStagedBytes / kPieces;
  static constexpr int kBlocksOfStage = kStageBytes / kStagedBytes;
  static constexpr int kAllBlocks = kGroups * kBlocks;
  static constexpr int kStagesToFinish = (kAllBlocks + kBlocksOfStage - 1) / kBlocksOfStage;
  // Parts: when the products are done the ring takes the sums that come, then those that go; what
  // is staged is beside it.
  static constexpr int kSentBytes = (kSplitK - 1) * kRows * kEpilogueTokens * 4 * kSplitsEach;
  static constexpr int kSide = kIsSplit ? kAllBlocks * kStagedBytes : 0;
  static constexpr int kMemory = 221 * 1024;
  static constexpr int kFit = (kMemory - kSide) / kStageBytes;
  static constexpr int kStages = kFit > 10 ? 10 : kFit;
  static constexpr int kRing = kStages * kStageBytes;
  // Weights that are asked for before the kernel ahead has ended. The first inputs come behind
  // them, and stages of 192 rows are large: half of them are there as soon as those.
  static constexpr int kAhead = kGroups == 3 ? (kStages + 1) / 2 : kStages;
  static_assert(kRing >= 2 * kSentBytes, "room for sums");
  static_assert(kStages >= 3 && (kIsSplit || kStages >= kStagesToFinish), "room to finish a tile");
  static constexpr int kShared = kRing + kSide + 1024;
};

// The tiles of a call in the order in which they are taken: few pieces of tokens, then the next
// rows, so that what blocks ask for at the same time stays in the L2 cache.
struct Walk {
  static constexpr int kWidth = 16;
  int rows, pieces;  // tiles of rows, pieces of tokens
  __device__ __forceinline__ int count() const { return rows * pieces; }
  __device__ __forceinline__ void find(int n, int& row, int& piece) const {
    const int band = n / (rows * kWidth), width = min(kWidth, pieces - band * kWidth);
    const int inside = n - band * rows * kWidth;
    row = inside / width;
    piece = band * kWidth + inside % width;
  }
};

template <class S>
__global__ void __launch_bounds__(S::kThreads, 1)
    persistent_kernel(const __grid_constant__ CUtensorMap weight_map,
                      const __grid_constant__ CUtensorMap input_map,
                      const __grid_constant__ CUtensorMap side_map,  // what is staged: x, or out
                      const __grid_constant__ GemmArgs args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using At = PipelineState<S::kStages>;
  using Stages = RingAddresses<S::kStageBytes>;
  extern __shared__ unsigned char unaligned[];
  unsigned char* ring = unaligned + (1024 - shared_address(unaligned) % 1024) % 1024;
  unsigned char* side = ring + S::kRing;
  __shared__ std::uint64_t full[S::kStages], empty[S::kStages], ready[2], taken[2], received,
      beside;
  __shared__ float scale[2][S::kTokens];
  __shared__ int slots[2][S::kStepping ? S::kTokens : 1];
  __shared__ EpilogueOperands<S::kGates, S::kChannels, S::Step::kParameters> vectors[2];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int part = S::kIsSplit ? static_cast<int>(blockIdx.z) : 0;
  const int steps = static_cast<int>((args.inputs + kStep - 1) / kStep);
  const int begin = part * steps / S::kSplitK;
  const int count = (part + 1) * steps / S::kSplitK - begin;
  const bool residual = S::kGates == 1 && args.epilogue == Epilogue::residual;
  const bool logits = S::kGates == 1 && args.epilogue == Epilogue::logits;
  const int finishing = S::kIsSplit || logits ? 0 : S::kStagesToFinish;
  const Walk walk{static_cast<int>((args.channels + S::kChannels - 1) / S::kChannels),
                  static_cast<int>((args.tokens + S::kTokens - 1) / S::kTokens)};
  const int tiles = walk.count(), first = blockIdx.x, stride = gridDim.x;
  const auto find = [&](int tile, int& channel, int& token) {
    int row, piece;
    walk.find(tile, row, piece);
    channel = row * S::kChannels;
    token = piece * S::kTokens;
  };

  // Of the tile whose stages are filled; the thread that feeds the ring alone knows them.
  int channel, token;
  const auto load_weights = [&](const Stages& stages, int slot, int n) {
    mbarrier_arrive_expect_tx(stages.full(slot), S::kStageBytes);
#pragma unroll
    for (int weight_tile = 0; weight_tile < S::kWeightTiles; ++weight_tile) {
      const int row = static_cast<int>(weight_tile % S::kGates * args.channels) + channel +
                      weight_tile / S::kGates * S::kUnitChannels;
      tma_load_tile(stages.stage(slot) + weight_tile * S::kWeightTileBytes, weight_map,
                    (begin + n) * kStep, row, stages.full(slot));
    }
  };
  const int ahead = min(count, S::kAhead);
  // The thread that feeds the ring: weights are on their way before the block has met.
  if (threadIdx.x == S::kComputing) {
    prefetch_tensor_map(weight_map);
    for (int i = 0; i < S::kStages; ++i) {
      mbarrier_init(full[i], 1);
      mbarrier_init(empty[i], S::kComputing / 32);
    }
    for (int i = 0; i < 2; ++i) {
      mbarrier_init(ready[i], 32 * S::kPreparing);
      mbarrier_init(taken[i], S::kComputing / 32);
    }
    mbarrier_init(received, 1);
    mbarrier_init(beside, 1);
    fence_mbarrier_init();
    fence_proxy_async();  // the block has not met between this and the first copies
    if (S::kIsSplit) mbarrier_arrive_expect_tx(received, S::kSentBytes);
    find(first, channel, token);
    const Stages stages(full, empty, ring);
    for (int n = 0; n < ahead; ++n) load_weights(stages, n, n);
    prefetch_tensor_map(input_map);
    prefetch_tensor_map(side_map);
  }
  __syncthreads();
  pdl_launch_dependents();

  if (warp >= S::kComputing / 32) {
    setmaxnreg_dec<S::kFewRegisters>();
    if (warp == S::kComputing / 32) {
      // The ring.
      const Stages stages(full, empty, ring);
      const auto load_inputs = [&](int slot, int n) {
        tma_load_tile(stages.stage(slot) + S::kWeightBytes, input_map, (begin + n) * kStep, token,
                      stages.full(slot));
      };
      const auto copy_staged = [&](std::uint32_t to, int block, std::uint32_t barrier) {
        for (int piece = 0; piece < S::kPieces; ++piece) {
          tma_load_tile(to + piece * S::kPieceBytes, side_map, channel + block * kBlockRows,
                        token + part * S::kEpilogueTokens + piece * S::kPieceTokens, barrier);
        }
      };
      wait_for_previous_kernel();
      if (lane == 0) {
        At at;
        for (int n = 0; n < ahead; ++n, ++at) load_inputs(at.slot, n);
        if (S::kIsSplit && residual) {
          mbarrier_arrive_expect_tx(beside, S::kSide);
          for (int block = 0; block < S::kAllBlocks; ++block) {
            copy_staged(shared_address(side + block * S::kStagedBytes), block,
                        shared_address(&beside));
          }
        }
        for (int tile = first; tile < tiles; tile += stride) {
          find(tile, channel, token);
#pragma unroll 1
          for (int n = tile == first ? ahead : 0; n < count; ++n, ++at) {
            if (at.round > 0) mbarrier_wait(stages.empty(at.slot), (at.round - 1) % 2);
            load_weights(stages, at.slot, n);
            load_inputs(at.slot, n);
          }
          for (int n = 0; n < finishing; ++n, ++at) {
            if (at.round > 0) mbarrier_wait(stages.empty(at.slot), (at.round - 1) % 2);
            if (!residual) {
              mbarrier_arrive(stages.full(at.slot));
              continue;
            }
            const int from = n * S::kBlocksOfStage;
            const int to = min(from + S::kBlocksOfStage, S::kAllBlocks);
            mbarrier_arrive_expect_tx(stages.full(at.slot), (to - from) * S::kStagedBytes);
            for (int block = from; block < to; ++block) {
              copy_staged(stages.stage(at.slot) + (block - from) * S::kStagedBytes, block,
                          stages.full(at.slot));
            }
          }
        }
      }
      __syncwarp();
    } else {
      const int helper = warp - S::kComputing / 32 - 1;
      // What the epilogue of a tile needs of its channels and of its tokens: 32 for each of these
      // warps in turn. One alone has not done with sums of squares when a tile of a thousand inputs
      // is multiplied.
      for (int tile = first, turn = 0; tile < tiles; tile += stride, ++turn) {
        int channel, first_token;
        find(tile, channel, first_token);
        const int half = turn % 2;
        if (turn > 1) mbarrier_wait(taken[half], (turn / 2 - 1) % 2);
        vectors[half].ask(args, channel, threadIdx.x - (S::kComputing + 32), S::kPreparing * 32);
        if (turn == 0) wait_for_previous_kernel();
        for (int from = helper * 32; from < S::kEpilogueTokens; from += S::kPreparing * 32) {
          const std::int64_t token = first_token + part * S::kEpilogueTokens + from + lane;
          scale[half][from + lane] = norm_scale<16>(args, token);
          if (S::kStepping) {
            slots[half][from + lane] = token < args.tokens ? args.slots[token] : -1;
          }
        }
        wait_for_copies();
        mbarrier_arrive(ready[half]);
        if constexpr (!S::kStepping) continue;
        __syncwarp();
        constexpr int kLines = S::kChannels * 4 / 128;
        for (int from = helper * 32; from < S::kEpilogueTokens; from += S::kPreparing * 32) {
          for (int n = lane; n < 32 * kLines; n += 32) {
            const int slot = slots[half][from + n / kLines], line = n % kLines * 32;
            if (slot >= 0 && slot < args.num_slots && channel + line < args.channels) {
              prefetch_to_l2(args.state + slot * args.state_stride + channel + line);
            }
          }
        }
      }
    }
    if (S::kIsSplit) {
      __syncwarp();
      arrive_at_cluster();
      wait_for_cluster();
    }
  } else {
    setmaxnreg_inc<S::kManyRegisters>();
    wait_for_previous_kernel();
    const int group = warp / 4;
    const Stages stages(full, empty, ring);
    const std::uint32_t own_rows = warp_uniform(group * S::kBlocks * kBlockRows * kStep * 2);
    const auto release = [&](int slot) {
      if (lane == 0) mbarrier_arrive(stages.empty(slot));
    };
    float sets[S::kSets][S::kBlocks][S::kTokens / 2];
    auto& totals = sets[0];  // of serial split-K
    auto& sums = sets[S::kSets - 1];
    const int turns = S::kSplitsEach > 1 ? S::kSplitsEach : args.serial_split_k;  // of a block's
    At at;
    for (int tile = first, turn = 0; tile < tiles; tile += stride, ++turn) {
      int last = 0;
      if constexpr (S::kSerialSplitK) {
#pragma unroll
        for (auto& block : totals) {
#pragma unroll
          for (float& total : block) total = 0.0f;
        }
      }
      // Loops of their own, not one that goes on early: else the compiler waits for products at
      // every step.
#pragma unroll 1
      for (int share = 0; share < (S::kSerialSplitK ? turns : 1); ++share) {
        const int number = part * turns + share, all = S::kSplitK * turns;
        const int since = S::kSerialSplitK ? number * steps / all - begin : 0;
        const int until = S::kSerialSplitK ? (number + 1) * steps / all - begin : count;
#pragma unroll 1
        for (int n = since; n < until; ++n, ++at) {
          mbarrier_wait(stages.full(at.slot), at.round % 2);
          const std::uint32_t stage = stages.stage(at.slot);
          const std::uint64_t inputs = smem_descriptor(stage + S::kWeightBytes);
          const std::uint64_t weights = smem_descriptor(stage + own_rows);
          wgmma_fence();
#pragma unroll
          for (int block = 0; block < S::kBlocks; ++block) {
#pragma unroll
            for (int k = 0; k < kStep / 16; ++k) {
              Wgmma<S::kTokens>::add(sums[block],
                                     weights + 2 * k + block * (kBlockRows * kStep * 2 / 16),
                                     inputs + 2 * k, n > since || k > 0);
            }
          }
          wgmma_commit();
          if (n > since) {
            wgmma_wait<1>();
            release(last);
          }
          last = at.slot;
        }
        wgmma_wait<0>();
#pragma unroll
        for (int block = 0; block < S::kBlocks; ++block) {
          fence_operands(sums[block]);
          if (S::kSerialSplitK && (!S::kIsSplit || share == 0)) {
#pragma unroll
            for (int i = 0; i < S::kTokens / 2; ++i) totals[block][i] += sums[block][i];
          }
        }
        release(last);
      }

      int first_channel, first_token;
      find(tile, first_channel, first_token);
      const int half = turn % 2;
      const auto staged = [&](int block) -> unsigned char* {
        if (S::kIsSplit) return side + block * S::kStagedBytes;
        int slot = at.slot + block / S::kBlocksOfStage;
        if (slot >= S::kStages) slot -= S::kStages;
        return ring + slot * S::kStageBytes + block % S::kBlocksOfStage * S::kStagedBytes;
      };
      const Tile<S> of{args,          side_map,      scale[half],
                       slots[half],   vectors[half], first_token + part * S::kEpilogueTokens,
                       first_channel, group};
      if constexpr (S::kIsSplit) {
        // The rings of all blocks are free.
        arrive_at_cluster();
        wait_for_cluster();
        float own[S::kBlocks][S::kEpilogueTokens / 2];
        reduce_split_k<S>(sets, own, part, ring, received);
        mbarrier_wait(ready[half], 0);
        if (residual) mbarrier_wait(beside, 0);
        of.epilogue(own, staged);
      } else {
        mbarrier_wait(ready[half], turn / 2 % 2);
        At taken_stage = at;
        for (int n = 0; n < finishing; ++n, ++taken_stage) {
          mbarrier_wait(full[taken_stage.slot], taken_stage.round % 2);
        }
        of.epilogue(totals, staged);
        __syncwarp();
        if (lane == 0) mbarrier_arrive(taken[half]);
        for (int n = 0; n < finishing; ++n, ++at) release(at.slot);
      }
    }
  }
  // Nobody ends while what it has sent is being read.
  if (S::kIsSplit) {
    __syncwarp();
    arrive_at_cluster();
    wait_for_cluster();
  }
#endif
}

}  // namespace cuda
}  // namespace minserve
