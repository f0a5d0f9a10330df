// out [tokens, channels] = epilogue(W x) for Hopper, many tokens: as kernel.cuh, in large tiles.
//
// A block stays on its multiprocessor and takes tiles in turn. One thread feeds a ring of stages in
// shared memory, kStep inputs of the tile's rows and tokens each; a set of warpgroups multiplies.
// What is staged while a tile is finished lies in stages of the same ring, which come after the
// tile's own: the thread that feeds the ring leaves them out, or puts the residual stream there.
// Or two sets take tiles in turn, and one multiplies while the other finishes its tile; staged is
// then beside the ring, which goes on meanwhile.
//
// What a multiprocessor can ask of the L2 cache is the first limit (about 39 bytes a cycle of the
// 64 that a tile of 128 by 128 needs), so tiles are large, or blocks of a cluster that have
// different rows of the same tokens send each other their share of the inputs.
#pragma once

#include "finish_tile.cuh"
#include "hopper.cuh"
#include "product.cuh"

namespace minserve {
namespace cuda {

// A set has kGroups warpgroups of kBlocks blocks of 64 rows each; kShare blocks of a cluster have
// the same tokens, or kParts blocks a part of the inputs each; kResident blocks share a
// multiprocessor.
template <class T, int kGates_, int kSets_, int kGroups_, int kBlocks_, int kTokens_,
          int kShare_ = 1, int kParts_ = 1, int kResident_ = 1>
struct WideShape {
  using Type = T;
  static constexpr int kGates = kGates_, kSets = kSets_, kGroups = kGroups_, kBlocks = kBlocks_;
  static constexpr int kTokens = kTokens_, kShare = kShare_, kParts = kParts_;
  static constexpr int kResident = kResident_;
  static constexpr bool kStepping = kGates > 1;
  static_assert(kGates < 3 || (kGroups == 3 && kBlocks == 1), "a warpgroup for each gate");
  static_assert(kShare == 1 || kParts == 1, "a cluster shares tokens or inputs");
  static_assert(kSets == 1 || (kSets == 2 && kParts == 1), "a part has one tile");
  static_assert(kTokens % (16 * kParts) == 0 && kTokens % (8 * kShare) == 0, "whole squares");
  static constexpr int kSetThreads = kGroups * kGroupThreads;
  static constexpr int kComputing = kSets * kSetThreads;
  // A warp feeds the ring and one prepares. Two more make a warpgroup of them, which can give its
  // registers to those that multiply.
  static constexpr bool kGiving = kResident_ == 1 && kSets * kGroups > 1;
  static constexpr int kThreads = kComputing + (kGiving ? 128 : 64);
  static constexpr int kFewRegisters = kSets * kGroups == 3 ? 56 : 40;
  static constexpr int kManyRegisters = kSets * kGroups == 3 ? 152 : 232;
  static constexpr int kRows = kGroups * kBlocks * kBlockRows;
  static constexpr int kChannels = kRows / kGates;
  // All gates of a unit's channels are in one block of rows, of three gates in three.
  static constexpr int kUnitBlocks = kGates == 3 ? 3 : 1;
  static constexpr int kUnitChannels = kUnitBlocks * kBlockRows / kGates;
  static constexpr int kBoxes = kRows / kUnitChannels;
  static constexpr int kBoxBytes = kUnitChannels * kStep * 2;
  static constexpr int kWeightBytes = kRows * kStep * 2;
  static constexpr int kInputBytes = kTokens * kStep * 2;
  static constexpr int kStageBytes = kWeightBytes + kInputBytes;
  // Tokens that a block finishes, and what is staged of a block of rows for them.
  static constexpr int kFinish = kTokens / kParts;
  static constexpr int kStagedBytes = kFinish * kBlockRows * 2;
  static constexpr int kBlocksOfStage = kStageBytes / kStagedBytes;
  static constexpr int kAllBlocks = kGroups * kBlocks;
  static constexpr int kStagesToFinish = (kAllBlocks + kBlocksOfStage - 1) / kBlocksOfStage;
  // With parts, the ring takes their sums when the products are done; staged is behind it.
  static constexpr int kSumsBytes = kRows * kTokens * 4;
  static constexpr int kPieceBytes = kSumsBytes / kParts;
  static constexpr int kExchange = kParts == 1 ? 0 : kSumsBytes + kPieceBytes * (kParts - 1);
  static constexpr bool kBeside = kParts > 1 || kSets > 1;
  static constexpr int kSide = kBeside ? kAllBlocks * kStagedBytes : 0;
  static constexpr int kFit = ((kResident == 1   ? 221
                                : kResident == 2 ? 107
                                                 : 70) *
                                   1024 -
                               kSide) /
                              kStageBytes;
  static constexpr int kStages = kFit > 10 ? 10 : kFit;
  static_assert(kStages >= 3, "a ring");
  static_assert(kBeside || kStages >= kStagesToFinish, "room to finish a tile");
  static constexpr int kRing =
      kStages * kStageBytes > kExchange ? kStages * kStageBytes : (kExchange + 1023) / 1024 * 1024;
  static constexpr int kShared = kRing + kSide + 1024;
};

// The tiles of a call in the order in which they are taken: few pieces of tokens, then the next
// rows, so that what blocks ask for at the same time stays in the L2 cache.
struct Walk {
  static constexpr int kWidth = 16;
  int rows, pieces;  // tiles of rows (of all blocks of a cluster), pieces of tokens
  __device__ __forceinline__ int count() const { return rows * pieces; }
  __device__ __forceinline__ void find(int n, int& row, int& piece) const {
    const int band = n / (rows * kWidth), width = min(kWidth, pieces - band * kWidth);
    const int inside = n - band * rows * kWidth;
    row = inside / width;
    piece = band * kWidth + inside % width;
  }
};

// A place in the ring.
template <int kStages>
struct Stage {
  int slot, turn;
  __device__ __forceinline__ explicit Stage(int n) : slot(n % kStages), turn(n / kStages) {}
  __device__ __forceinline__ void operator++() {
    if (++slot == kStages) slot = 0, ++turn;
  }
};

template <class S>
__global__ void __launch_bounds__(S::kThreads, S::kResident)
    wide_kernel(const __grid_constant__ CUtensorMap weight_map,
                const __grid_constant__ CUtensorMap input_map,
                const __grid_constant__ CUtensorMap side_map,  // what is staged: x, or out
                const __grid_constant__ LinearArgs args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using T = typename S::Type;
  using At = Stage<S::kStages>;
  constexpr bool kClustered = S::kShare > 1 || S::kParts > 1;
  extern __shared__ unsigned char unaligned[];
  unsigned char* ring = unaligned + (1024 - shared_address(unaligned) % 1024) % 1024;
  unsigned char* side = ring + S::kRing;
  __shared__ std::uint64_t full[S::kStages], empty[S::kStages], ready[2], taken[2], multiplied[2],
      received, beside;
  __shared__ float scale[2][S::kTokens];
  __shared__ int slots[2][S::kStepping ? S::kTokens : 1];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int rank = S::kShare > 1 ? static_cast<int>(rank_in_cluster()) : 0;
  const int part = S::kParts > 1 ? static_cast<int>(blockIdx.z) : 0;
  if (threadIdx.x == 0) {
    for (int i = 0; i < S::kStages; ++i) {
      init_barrier(full[i], 1);
      init_barrier(empty[i], S::kGroups * 4 * S::kShare);
    }
    for (int i = 0; i < 2; ++i) {
      init_barrier(ready[i], 32);
      init_barrier(taken[i], S::kGroups * 4);
      init_barrier(multiplied[i], S::kGroups * 4);
    }
    init_barrier(received, 1);
    init_barrier(beside, 1);
    fence_barriers();
    if (S::kParts > 1) arrive_expecting(received, S::kPieceBytes * (S::kParts - 1));
  }
  __syncthreads();
  if (S::kShare > 1) arrive_at_cluster();
  let_next_kernel_start();

  const int steps = static_cast<int>((args.inputs + kStep - 1) / kStep);
  const int begin = part * steps / S::kParts;
  const int count = (part + 1) * steps / S::kParts - begin;
  const bool residual = !S::kStepping && args.epilogue == Epilogue::residual;
  const bool logits = !S::kStepping && args.epilogue == Epilogue::logits;
  const int finishing = S::kBeside || logits ? 0 : S::kStagesToFinish;
  constexpr int kTileRows = S::kChannels * S::kShare;
  const Walk walk{static_cast<int>((args.channels + kTileRows - 1) / kTileRows),
                  static_cast<int>((args.tokens + S::kTokens - 1) / S::kTokens)};
  const int tiles = walk.count(), first = blockIdx.x / S::kShare, stride = gridDim.x / S::kShare;
  const auto find = [&](int tile, int& channel, int& token) {
    int row, piece;
    walk.find(tile, row, piece);
    channel = (row * S::kShare + rank) * S::kChannels;
    token = piece * S::kTokens;
  };

  if (warp >= S::kComputing / 32) {
    if constexpr (S::kGiving) give_registers<S::kFewRegisters>();
    if (warp == S::kComputing / 32) {
      // The ring.
      int channel, token;
      const auto copy_weights = [&](const At& at, int n) {
        arrive_expecting(full[at.slot], S::kStageBytes);
#pragma unroll
        for (int box = 0; box < S::kBoxes; ++box) {
          const int row = static_cast<int>(box % S::kGates * args.channels) + channel +
                          box / S::kGates * S::kUnitChannels;
          copy_box(ring + at.slot * S::kStageBytes + box * S::kBoxBytes, weight_map,
                   (begin + n) * kStep, row, full[at.slot]);
        }
      };
      const auto copy_inputs = [&](const At& at, int n) {
        unsigned char* to = ring + at.slot * S::kStageBytes + S::kWeightBytes;
        if constexpr (S::kShare == 1) {
          copy_box(to, input_map, (begin + n) * kStep, token, full[at.slot]);
        } else {
          constexpr int kOwn = S::kTokens / S::kShare;
          copy_box_to_blocks(to + rank * kOwn * kStep * 2, input_map, (begin + n) * kStep,
                             token + rank * kOwn, full[at.slot], (1 << S::kShare) - 1);
        }
      };
      if (lane == 0) {
        prefetch_map(weight_map);
        prefetch_map(input_map);
        prefetch_map(side_map);
      }
      const int ahead = first < tiles ? min(count, S::kStages) : 0;
      if (lane == 0 && ahead > 0) {
        find(first, channel, token);
        At at(0);
        for (int n = 0; n < ahead; ++n, ++at) copy_weights(at, n);
      }
      __syncwarp();
      wait_for_previous_kernel();
      if (S::kShare > 1) wait_for_cluster();
      if (lane == 0 && ahead > 0) {
        At at(0);
        for (int n = 0; n < ahead; ++n, ++at) copy_inputs(at, n);
        if (S::kParts > 1 && residual) {
          arrive_expecting(beside, S::kSide);
          for (int block = 0; block < S::kAllBlocks; ++block) {
            copy_box(side + block * S::kStagedBytes, side_map, channel + block * kBlockRows,
                     token + part * S::kFinish, beside);
          }
        }
        for (int tile = first; tile < tiles; tile += stride) {
          find(tile, channel, token);
          for (int n = tile == first ? ahead : 0; n < count; ++n, ++at) {
            if (at.turn > 0) wait_barrier(empty[at.slot], (at.turn - 1) % 2);
            copy_weights(at, n);
            copy_inputs(at, n);
          }
          for (int n = 0; n < finishing; ++n, ++at) {
            if (at.turn > 0) wait_barrier(empty[at.slot], (at.turn - 1) % 2);
            if (!residual) {
              arrive(full[at.slot]);
              continue;
            }
            const int from = n * S::kBlocksOfStage;
            const int to = min(from + S::kBlocksOfStage, S::kAllBlocks);
            arrive_expecting(full[at.slot], (to - from) * S::kStagedBytes);
            for (int block = from; block < to; ++block) {
              copy_box(ring + at.slot * S::kStageBytes + (block - from) * S::kStagedBytes, side_map,
                       channel + block * kBlockRows, token, full[at.slot]);
            }
          }
        }
      }
      __syncwarp();
    } else if (warp == S::kComputing / 32 + 1) {
      // What the finishing of a tile needs of its tokens.
      wait_for_previous_kernel();
      if (S::kShare > 1) wait_for_cluster();
      for (int tile = first, turn = 0; tile < tiles; tile += stride, ++turn) {
        int channel, first_token;
        find(tile, channel, first_token);
        const int half = turn % 2;
        if constexpr (S::kSets == 2) {  // of the tile before: staged has one place
          if (turn > 0) wait_barrier(taken[1 - half], (turn - 1) / 2 % 2);
        } else {
          if (turn > 1) wait_barrier(taken[half], (turn / 2 - 1) % 2);
        }
        for (int n = lane; n < S::kFinish; n += 32) {
          const std::int64_t token = first_token + part * S::kFinish + n;
          float sum = 0.0f;
          if (args.squares && token < args.tokens) {
#pragma unroll 16
            for (int block = 0; block < args.square_blocks; ++block) {
              sum += args.squares[block * args.tokens + token];
            }
          }
          scale[half][n] = args.squares ? rsqrtf(sum / args.width + args.eps) : 1.0f;
          if (S::kStepping) slots[half][n] = token < args.tokens ? args.slots[token] : -1;
        }
        if (S::kSets == 2 && residual && lane == 0) {
          arrive_expecting(ready[half], S::kSide);
          for (int block = 0; block < S::kAllBlocks; ++block) {
            copy_box(side + block * S::kStagedBytes, side_map, channel + block * kBlockRows,
                     first_token, ready[half]);
          }
        } else {
          arrive(ready[half]);
        }
        if (S::kStepping) {
          __syncwarp();
          constexpr int kLines = S::kChannels * 4 / 128;
          for (int n = lane; n < S::kFinish * kLines; n += 32) {
            const int slot = slots[half][n / kLines];
            if (slot >= 0 && slot < args.num_slots && channel + n % kLines * 32 < args.channels) {
              prefetch_to_l2(args.state + slot * args.state_stride + channel + n % kLines * 32);
            }
          }
        }
      }
    } else {
      wait_for_previous_kernel();
      if (S::kShare > 1) wait_for_cluster();
    }
    if (S::kParts > 1) {
      __syncwarp();
      arrive_at_cluster();
      wait_for_cluster();
    }
  } else {
    if constexpr (S::kGiving) take_registers<S::kManyRegisters>();
    wait_for_previous_kernel();
    if (S::kShare > 1) wait_for_cluster();
    const int set = warp / (S::kGroups * 4), group = warp / 4 % S::kGroups;
    const auto release = [&](int slot) {
      if (lane != 0) return;
      if constexpr (S::kShare == 1) {
        arrive(empty[slot]);
      } else {
#pragma unroll
        for (int other = 0; other < S::kShare; ++other) arrive_at_block(empty[slot], other);
      }
    };
    float sums[S::kBlocks][S::kTokens / 2];
    int turn = set;
    for (int tile = first + set * stride; tile < tiles;
         tile += S::kSets * stride, turn += S::kSets) {
      At at(turn * (count + finishing));
      int last = 0;
      // One set at a time asks for products. (And a parity names one turn of the ring only while
      // no set is ahead of the other.)
      if (S::kSets == 2 && turn > 0) wait_barrier(multiplied[1 - set], (turn - 1) / 2 % 2);
#pragma unroll 1
      for (int n = 0; n < count; ++n, ++at) {
        wait_barrier(full[at.slot], at.turn % 2);
        const unsigned char* stage = ring + at.slot * S::kStageBytes;
        const std::uint64_t inputs = describe_tile(stage + S::kWeightBytes);
        const std::uint64_t weights =
            describe_tile(stage + group * S::kBlocks * kBlockRows * kStep * 2);
        begin_products();
#pragma unroll
        for (int block = 0; block < S::kBlocks; ++block) {
#pragma unroll
          for (int k = 0; k < kStep / 16; ++k) {
            Product<T, S::kTokens>::add(sums[block],
                                        weights + 2 * k + block * (kBlockRows * kStep * 2 / 16),
                                        inputs + 2 * k, n > 0 || k > 0);
          }
        }
        commit_products();
        if (n > 0) {
          wait_products<1>();
          release(last);
        }
        last = at.slot;
      }
      if (S::kSets == 2 && lane == 0) arrive(multiplied[set]);
      wait_products<0>();
      release(last);

      int first_channel, first_token;
      find(tile, first_channel, first_token);
      const int half = turn % 2;
      const auto staged = [&](int block) -> unsigned char* {
        if (S::kBeside) return side + block * S::kStagedBytes;
        int slot = at.slot + block / S::kBlocksOfStage;
        if (slot >= S::kStages) slot -= S::kStages;
        return ring + slot * S::kStageBytes + block % S::kBlocksOfStage * S::kStagedBytes;
      };
      const Tile<S> of{args,
                       side_map,
                       scale[half],
                       slots[half],
                       first_token + part * S::kFinish,
                       first_channel,
                       group,
                       set * S::kGroups + group};
      if constexpr (S::kParts == 1) {
        wait_barrier(ready[half], turn / 2 % 2);
        At place = at;
        for (int n = 0; n < finishing; ++n, ++place) {
          wait_barrier(full[place.slot], place.turn % 2);
        }
        of.finish(sums, staged);
        __syncwarp();
        if (lane == 0) arrive(taken[half]);
        for (int n = 0; n < finishing; ++n, ++at) release(at.slot);
      } else {
        // The ring is free in all blocks; each is sent its share of the tokens.
        arrive_at_cluster();
        wait_for_cluster();
        constexpr int kOwn = S::kFinish / 2;  // sums of a thread, of each block of rows
        float own[S::kBlocks][kOwn];
        unsigned char* inbox = ring;
        unsigned char* outbox = ring + S::kSumsBytes;
#pragma unroll
        for (int to = 0; to < S::kParts; ++to) {
          float* box =
              reinterpret_cast<float*>(to == part ? inbox + part * S::kPieceBytes
                                                  : outbox + (to - (to > part)) * S::kPieceBytes);
#pragma unroll
          for (int block = 0; block < S::kBlocks; ++block) {
#pragma unroll
            for (int i = 0; i < kOwn; i += 4) {
              const float* four = &sums[block][to * kOwn + i];
              reinterpret_cast<float4*>(
                  box)[((group * S::kBlocks + block) * (kOwn / 4) + i / 4) * kGroupThreads +
                       threadIdx.x % kGroupThreads] = {four[0], four[1], four[2], four[3]};
            }
          }
        }
        fence_for_copies();
        meet(8, S::kSetThreads);
        if (threadIdx.x < S::kParts && static_cast<int>(threadIdx.x) != part) {
          const int to = threadIdx.x;
          copy_to_block(to, inbox + part * S::kPieceBytes,
                        outbox + (to - (to > part)) * S::kPieceBytes, S::kPieceBytes, received);
        }
        __syncwarp();
        wait_barrier(ready[half], 0);
        if (residual) wait_barrier(beside, 0);
        wait_barrier(received, 0);
#pragma unroll
        for (int block = 0; block < S::kBlocks; ++block) {
#pragma unroll
          for (int i = 0; i < kOwn; ++i) own[block][i] = 0.0f;
#pragma unroll
          for (int from = 0; from < S::kParts; ++from) {
            const float4* box = reinterpret_cast<const float4*>(inbox + from * S::kPieceBytes);
#pragma unroll
            for (int i = 0; i < kOwn; i += 4) {
              const float4 four =
                  box[((group * S::kBlocks + block) * (kOwn / 4) + i / 4) * kGroupThreads +
                      threadIdx.x % kGroupThreads];
              own[block][i] += four.x, own[block][i + 1] += four.y;
              own[block][i + 2] += four.z, own[block][i + 3] += four.w;
            }
          }
        }
        of.finish(own, staged);
      }
    }
  }
  // Nobody ends while others still send to it, or what it has sent is being read.
  if (kClustered) {
    __syncwarp();
    arrive_at_cluster();
    wait_for_cluster();
  }
#endif
}

}  // namespace cuda
}  // namespace minserve
