// The epilogue of a large tile. It takes the sums as the tensor cores leave them in registers.
//
// A thread has sums of two channels of a square of 8 channels by 8 tokens, and memory wants
// neighbouring channels together. So sums, scaled and with their bias, are rounded and turned into
// staging memory: for each block of 64 rows [tokens][64 rows], rows of 128 bytes whose sixteens are
// exchanged as TMA does it. The residual stream is already there and is added before.
// From there TMA takes them, or threads, which finish four channels or eight of a token
// at a time. Logits go straight to memory: 8 neighbours of 4 bytes are a sector.
//
// Sums are finished by the operations of epilogue.cuh in their order, so that the tile has no part
// in the bits of what is written.
#pragma once

#include "epilogue.cuh"
#include "../arch/sm90.cuh"
#include "../arch/wgmma.cuh"

namespace minserve {
namespace cuda {

template <class S>
struct Tile {
  const GemmArgs& args;
  const CUtensorMap& map;  // of x or out
  const float* scale;      // of this tile's tokens
  const int* slots;
  const EpilogueOperands<S::kGates, S::kChannels, S::Step::kParameters>& vectors;
  int first_token, first_channel;
  int group;

  static constexpr int kTokens = S::kEpilogueTokens, kBlocks = S::kBlocks;
  static constexpr int kUnitThreads = S::kUnitBlocks * kGroupThreads;
  static constexpr int kRowBytes = kBlockRows * 2;

  __device__ __forceinline__ static int lane() { return threadIdx.x % 32; }
  __device__ __forceinline__ static int warp_of_group() { return threadIdx.x / 32 % 4; }
  // Of row `row` of this group's block.
  __device__ __forceinline__ float bias_of(int block, int row) const {
    if (!args.bias) return 0.0f;
    const int all = (group * kBlocks + block) * kBlockRows + row;
    const int unit = all / (S::kUnitChannels * S::kGates);
    const int inside = all % (S::kUnitChannels * S::kGates);
    return to_lane(vectors.bias[inside / S::kUnitChannels]
                               [unit * S::kUnitChannels + inside % S::kUnitChannels]);
  }
  // Where sixteen bytes number `chunk` of a staged token are.
  __device__ __forceinline__ static int offset_of(int token, int chunk) {
    return token * kRowBytes + (chunk ^ token % 8) * 16;
  }

  template <class Staged>
  __device__ __forceinline__ void epilogue(float (&sums)[kBlocks][kTokens / 2],
                                           const Staged& staged) const {
    const auto same = [](float y) { return y; };
    if constexpr (S::kGates > 1) {
      States first;  // on their way while gates are staged
      ask(first, 0);
#pragma unroll
      for (int piece = 0; piece < S::kPieces; ++piece) stage<false>(sums, piece, staged, same);
      __syncwarp();
      meet_unit();
      finish(staged, first);
    } else if (args.epilogue == Epilogue::logits) {
      write_logits(sums);
    } else if (args.epilogue == Epilogue::gelu) {
      stage_and_store<false>(sums, staged, [](float y) { return gelu(y); });
    } else if (args.epilogue == Epilogue::plain) {
      stage_and_store<false>(sums, staged, same);
    } else if (args.scaled || args.ahead) {
#pragma unroll
      for (int piece = 0; piece < S::kPieces; ++piece) stage<true>(sums, piece, staged, same);
      meet_unit();
      write_norm_inputs<true>(staged);
    } else {
      stage_and_store<true>(sums, staged, same);
      if (args.squares_out) write_norm_inputs<false>(staged);
    }
    fence_proxy_async();
    if (S::kGates == 1 && threadIdx.x % kGroupThreads == 0) tma_wait_stores_read();
  }

 private:
  __device__ __forceinline__ void meet_unit() const {
    named_barrier_sync(1 + group / S::kUnitBlocks, kUnitThreads);
  }

  // Tokens of a piece leave while those of the next are made.
  template <bool kAdding, class Staged, class F>
  __device__ __forceinline__ void stage_and_store(float (&sums)[kBlocks][kTokens / 2],
                                                  const Staged& staged, const F& f) const {
#pragma unroll
    for (int piece = 0; piece < S::kPieces; ++piece) {
      stage<kAdding>(sums, piece, staged, f);
      fence_proxy_async();
      meet_unit();
      if (threadIdx.x % kGroupThreads == 0) {
        for (int block = 0; block < kBlocks; ++block) {
          const int all = group * kBlocks + block, from = piece * S::kPieceTokens;
          tma_store_tile(map, first_channel + all * kBlockRows, first_token + from,
                         staged(all) + from * kRowBytes);
        }
        tma_commit_stores();
      }
    }
  }

  template <bool kAdding, class Staged, class F>
  __device__ __forceinline__ void stage(float (&sums)[kBlocks][kTokens / 2], int piece,
                                        const Staged& staged, const F& f) const {
    const int row = warp_of_group() * 16 + lane() / 4, since = piece * S::kPieceTokens;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      const float bias[2] = {bias_of(block, row), bias_of(block, row + 8)};
      // Squares: both halves of the warp's rows, of eight tokens and of the next eight.
      std::uint32_t address =
          shared_address(staged(group * kBlocks + block) + since * kRowBytes) +
          offset_of(lane() / 16 * 8 + lane() % 8, warp_of_group() * 2 + lane() / 8 % 2);
#pragma unroll
      for (int j = since / 8; j < (since + S::kPieceTokens) / 8;
           j += 2, address += 16 * kRowBytes) {
        unsigned words[4];
        if (kAdding) load_transposed(address, words);
#pragma unroll
        for (int square = 0; square < 2; ++square) {
          const float2 factor =
              *reinterpret_cast<const float2*>(scale + 8 * (j + square) + lane() % 4 * 2);
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const float* two = &sums[block][4 * (j + square) + 2 * half];
            float low = two[0] * factor.x + bias[half];
            float high = two[1] * factor.y + bias[half];
            unsigned& word = words[square * 2 + half];
            if (kAdding) {
              low += number_of(&word, 0, bf16{});
              high += number_of(&word, 1, bf16{});
            }
            word = rounded(f(low), f(high), bf16{});
          }
        }
        store_transposed(address, words);
      }
    }
  }

  __device__ __forceinline__ void write_logits(float (&sums)[kBlocks][kTokens / 2]) const {
    const int row = warp_of_group() * 16 + lane() / 4;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      const int channel = first_channel + (group * kBlocks + block) * kBlockRows + row;
      const float bias[2] = {bias_of(block, row), bias_of(block, row + 8)};
      const bool inside[2] = {channel < args.channels, channel + 8 < args.channels};
      const int first = first_token + lane() % 4 * 2;
      float* out = static_cast<float*>(args.out) + first * args.channels + channel;
#pragma unroll
      for (int j = 0; j < kTokens / 8; ++j, out += 8 * args.channels) {
        const float2 factor = *reinterpret_cast<const float2*>(scale + 8 * j + lane() % 4 * 2);
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          if (first + 8 * j + odd >= args.tokens) continue;
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            if (!inside[half]) continue;
            out[odd * args.channels + 8 * half] =
                sums[block][4 * j + 2 * half + odd] * (odd ? factor.y : factor.x) + bias[half];
          }
        }
      }
    }
  }

  // Sums of squares, and unless they have left already what they are of; eight channels of a token.
  // Neighbouring eight threads have those whose squares are summed.
  template <bool kAll, class Staged>
  __device__ __forceinline__ void write_norm_inputs(const Staged& staged) const {
    constexpr int kOct = 8, kStride = kGroupThreads / 8;
    const int thread = threadIdx.x % kGroupThreads, chunk = thread % 8, offset = thread / 8;
#pragma unroll 1
    for (int block = 0; block < kBlocks; ++block) {
      const int own = (group * kBlocks + block) * kBlockRows + chunk * kOct;
      const int channel = first_channel + own;
      const bool inside = channel < args.channels;
      Channels<bf16, kOct> weight;
      if (kAll && args.scaled) weight.load(vectors.norm_weight + own);
      const unsigned char* from = staged(group * kBlocks + block) + offset_of(offset, chunk);
      std::int64_t at = (first_token + offset) * args.channels + channel;
#pragma unroll 4
      for (int n = 0; n < kTokens / kStride;
           ++n, from += kStride * kRowBytes, at += kStride * args.channels) {
        const int token = first_token + offset + n * kStride;
        const bool real = inside && token < args.tokens;
        Channels<bf16, kOct> x, scaled;
        x.load(reinterpret_cast<const bf16*>(from));
        if (kAll && real) store_with_ahead(args, vectors.ahead + own, at, x);
        if (!args.squares_out) continue;
        float sums[2] = {}, y[kOct];  // in the order of write_residual(): of quads
#pragma unroll
        for (int i = 0; i < kOct; ++i) {
          sums[i / kQuad] += x[i] * x[i];
          if (kAll) y[i] = x[i] * weight[i];
        }
        if (kAll && args.scaled) {
          scaled.set(y);
          if (real) scaled.store(static_cast<bf16*>(args.scaled) + at);
        }
#pragma unroll
        for (int distance = 4; distance > 0; distance /= 2) {
          for (float& sum : sums) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
        }
        if (real && chunk == 0) {
          args.squares_out[channel / kSquareRows * args.tokens + token] = sums[0] + sums[1];
        }
      }
    }
  }

  // Some of the quads that a thread finishes, and their states: four channels of a token each. With
  // two gates a unit's channels are half of a row, so neighbouring threads take tokens whose halves
  // lie in different banks.
  static constexpr int kQuads = S::kUnitChannels / kQuad, kStride = kUnitThreads / kQuads;
  static constexpr int kOfUnit = (kTokens + kStride - 1) / kStride;  // a thread's
  static constexpr int kAtOnce = kOfUnit > 4 ? (kOfUnit + 1) / 2 : kOfUnit;
  static constexpr int kRounds = (kOfUnit + kAtOnce - 1) / kAtOnce;
  static constexpr int kUnits = (kBlocks + S::kUnitBlocks - 1) / S::kUnitBlocks;
  using States = typename S::Step::Before[kAtOnce];

  __device__ __forceinline__ int block_of(int round) const {
    return S::kGates == 3 ? 0 : group * kBlocks + round / kRounds;
  }
  // Of the quad that this thread finishes as number i of a round.
  __device__ __forceinline__ QuadPosition quad_of(int round, int i) const {
    const int thread = threadIdx.x % kUnitThreads, quad = thread % kQuads;
    int offset = thread / kQuads;
    if (kQuads == 8) offset = offset / 8 * 8 + offset % 2 * 4 + offset / 2 % 2 + offset / 4 % 2 * 2;
    const int own = offset + (round % kRounds * kAtOnce + i) * kStride;
    const int channel = first_channel + block_of(round) * S::kUnitChannels + quad * kQuad;
    return {first_token + own, channel, own, quad * kQuad};
  }
  __device__ __forceinline__ void ask(States& states, int round) const {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const QuadPosition at = quad_of(round, i);
      const bool slotted = S::kStepping && at.own_token < kTokens;
      states[i].load(args, at, slotted ? slots[at.own_token] : -1);
    }
  }

  // `next`: those of the first round.
  template <class Staged>
  __device__ __forceinline__ void finish(const Staged& staged, States& next) const {
#pragma unroll 1
    for (int round = 0; round < kUnits * kRounds; ++round) {
      States states;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) states[i] = next[i];
      if (round + 1 < kUnits * kRounds) ask(next, round + 1);
      const unsigned char* gates[S::kGates];
#pragma unroll
      for (int gate = 0; gate < S::kGates; ++gate) {
        gates[gate] = staged(S::kGates == 3 ? gate : block_of(round));
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const QuadPosition at = quad_of(round, i);
        if (at.own_token >= kTokens || !at.inside(args)) continue;
        Quad<bf16> pre[S::kGates];
#pragma unroll
        for (int gate = 0; gate < S::kGates; ++gate) {
          const int quad = at.own_channel / kQuad;
          const int row = S::kGates == 3 ? quad : gate * kQuads + quad;
          pre[gate].load(reinterpret_cast<const bf16*>(
              gates[gate] + offset_of(at.own_token, row / 2) + row % 2 * 8));
        }
        finish_gates(typename S::Step{}, args, at, vectors, at.channel - first_channel, states[i],
                     pre);
      }
    }
  }
};

}  // namespace cuda
}  // namespace minserve
