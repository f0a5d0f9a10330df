// The epilogue of a unit's sums. A warp has eight channels of eight tokens, a lane two neighbouring
// channels of one token. A block always has the same units of the residual stream, and keeps them.
#pragma once

#include "../core/vector_access.cuh"
#include "../gemm/epilogue.cuh"
#include "global_exchange.cuh"
#include "deterministic.cuh"
#include "../core/channel_pair.cuh"
#include "weight_tiles.cuh"

namespace minserve {
namespace cuda {
namespace persistent {

// Whether results of products, and rows of an 8-bit table, have a scale.
template <WeightType kType>
constexpr bool kScaled = kType != WeightType::bf16;

__device__ __forceinline__ float2 load_floats(const float* p) {
  return *reinterpret_cast<const float2*>(p);
}

// Two neighbouring numbers of a table's row; an 8-bit table's are scaled and rounded.
template <WeightType kType>
__device__ __forceinline__ float2 look_up(const DecodePhase& phase, int row, std::int64_t at) {
  if (!kScaled<kType> || !phase.scale) return load_pair(phase.weight, at);
  const unsigned two = *reinterpret_cast<const unsigned short*>(
      static_cast<const unsigned char*>(phase.weight) + at);
  const float2 x = unpack_bf16x2(widened<kType, false>(two));
  const float scale = phase.scale[row];
  return unpack_bf16x2(rounded(x.x * scale, x.y * scale, bf16{}));
}

// Sums of a lane's pair, of all parts of the inputs in their order.
template <int kSums>
__device__ __forceinline__ float2 total_in_order(const float (&sums)[kMostSplitK][kSums],
                                                 int parts) {
  const int lane = threadIdx.x % 32, at = place_of_sum(lane / 4, lane % 4 * 2);
  float2 of_part[kMostSplitK], all = {};
#pragma unroll
  for (int part = 0; part < kMostSplitK; ++part) {
    of_part[part] = {};
    if (part < parts) of_part[part] = *reinterpret_cast<const float2*>(&sums[part][at]);
  }
#pragma unroll
  for (int part = 0; part < kMostSplitK; ++part) {  // a zero more changes no sum that began with +0
    all.x += of_part[part].x, all.y += of_part[part].y;
  }
  return all;
}
// Of all warps, of the column tile whose sums begin at `first`.
template <int kTokens, int kSums>
__device__ __forceinline__ float2 total(const float (&sums)[kMmaWarps][kSums], int first) {
  const int lane = threadIdx.x % 32, at = first + place_of_sum(lane / 4 % kTokens, lane % 4 * 2);
  float2 even = {}, odd = {};
#pragma unroll
  for (int w = 0; w < kMmaWarps; w += 2) {
    const float2 a = *reinterpret_cast<const float2*>(&sums[w][at]);
    const float2 b = *reinterpret_cast<const float2*>(&sums[w + 1][at]);
    even.x += a.x, even.y += a.y, odd.x += b.x, odd.y += b.y;
  }
  return {even.x + odd.x, even.y + odd.y};
}

// What a norm multiplies the sums of this lane's token with; bits are those of gemm/ in
// batch-invariant mode.
template <int kSums>
__device__ __forceinline__ float norm_scale_in_order(const PersistentDecodeArgs& args,
                                                     const float (&squares)[kSums][kColumns]) {
  float sum = 0.0f;
#pragma unroll 8
  for (int i = 0; i < args.width / kSquareRows; ++i) sum += squares[i][threadIdx.x % 32 / 4];
  DeferredNorm norm;
  norm.width = static_cast<float>(args.width), norm.eps = args.eps;
  return norm_scale_of(norm, sum);
}
template <int kSums>
__device__ __forceinline__ float norm_scale_of_warps(const PersistentDecodeArgs& args,
                                                     const float (&squares)[kSums][kColumns]) {
  float sum = 0.0f;
#pragma unroll
  for (int w = 0; w < kSums; ++w) sum += squares[w][threadIdx.x % 32 / 4];
  return rsqrtf(fmaf(sum, 1.0f / static_cast<float>(args.width), args.eps));
}

// What a lane's pair of a unit needs besides the sums.
template <int kGates>
struct Beside {
  float2 shift[kGates] = {}, factor[kGates] = {}, before = {};
};
// All of one, or of each column tile, which the compiler does not know.
template <class T>
__device__ __forceinline__ T one_of(const T (&all)[1], int) {
  return all[0];
}
template <class T>
__device__ __forceinline__ T one_of(const T (&all)[2], int which) {
  return which == 0 ? all[0] : all[1];
}

// Warps take turns at the items of a block's epilogue: units, of each column tile after the other.
// So two warps finish a unit of two column tiles.
template <template <class> class CellOf, WeightType kType, bool kSplit, bool kBatchInvariant,
          int kColumnTiles, class Options>
__device__ __forceinline__ void epilogue(
    const PersistentDecodeArgs& args, const Options& options,
    Shared<CellOf<float>::kInputs, kSplit, kBatchInvariant, kColumnTiles>& shared,
    unsigned char* set) {
  constexpr int kGates = CellOf<float>::kInputs;
  using OfBlock = Shared<kGates, kSplit, kBatchInvariant, kColumnTiles>;
  const int warp = threadIdx.x / 32 - kMmaWarps, lane = threadIdx.x % 32;
  const auto token_of = [&](int column_tile) { return column_tile * kColumns + lane / 4; };
  int slots[kColumnTiles];  // -1: none
#pragma unroll
  for (int column_tile = 0; column_tile < kColumnTiles; ++column_tile) {
    const int token = token_of(column_tile);
    slots[column_tile] = token < args.batch ? args.slots[token] : -1;
    if (slots[column_tile] >= args.num_slots) slots[column_tile] = -1;
  }
  constexpr int kLine = bytes_of_unit(kSplit);
  float2 stream[kColumnTiles] = {};  // the residual one, of each of this warp's turns
  unsigned turn = 0;  // in batch-invariant mode: how many units this warp has taken sums of
#pragma unroll 1
  for (int p = 0; p < args.phases; ++p) {
    const DecodePhase& phase = args.phase[p];
    const auto kind = static_cast<PhaseKind>(phase.kind);
    const int units = phase.units;
    const void* bias = phase.bias;
    const auto state_of = [&](int slot) {
      return args.cell + phase.layer * args.cell_layer_stride +
             max(slot, 0) * args.cell_slot_stride;
    };
    const bool normed = phase.norm != nullptr, convolved = phase.taps != nullptr;
    unsigned char* to = set + phase.out;
    const Units own = units_of(phase);
    const int first = own.first * kColumnTiles, end = own.end * kColumnTiles;
    const auto beside = [&](int item) {
      Beside<kGates> found;
      if (item >= end) return found;
      const int channel = item / kColumnTiles * kUnit + lane % 4 * 2;
      const int last = kind == PhaseKind::gates ? kGates : 1;
#pragma unroll
      for (int gate = 0; gate < kGates; ++gate) {
        if (gate >= last) continue;
        const int of_gate = gate * units * kUnit + channel;
        if (kScaled<kType> && kind != PhaseKind::embed) {
          found.factor[gate] = load_floats(phase.scale + of_gate);
        }
        if (bias) found.shift[gate] = load_pair(bias, of_gate);
      }
      if (kind == PhaseKind::gates) {
        found.before = load_floats(state_of(one_of(slots, item % kColumnTiles)) + channel);
      }
      return found;
    };
    float scale = 1.0f;
    // What an item needs besides the sums is on its way before those of the one ahead are there.
    int item = first + warp;
    Beside<kGates> next = beside(item);
    if (kBatchInvariant && normed && item < end) {
      while (count_at(shared_address(&shared.products_begun)) < p) {
      }
      __syncwarp();
      scale = norm_scale_in_order(args, shared.squares[0]);
    }
#pragma unroll 1
    for (int kept = 0; item < end; item += kEpilogueWarps, ++kept) {
      const int unit = item / kColumnTiles, column_tile = item % kColumnTiles;
      const int channel = unit * kUnit + lane % 4 * 2;
      const int token = token_of(column_tile), slot = one_of(slots, column_tile);
      const bool real = token < args.batch;
      const Beside<kGates> here = next;
      next = beside(item + kEpilogueWarps);
      float2 x = one_of(stream, kept), y[kGates] = {};
      if (kind == PhaseKind::embed) {
        const int id = real ? args.tokens[token] : -1;
        if (id >= 0 && id < args.ids) {
          x = look_up<kType>(phase, id, static_cast<std::int64_t>(id) * args.width + channel);
        }
      } else {
        const int room = kBatchInvariant     ? warp + turn % kRoomsEach * kEpilogueWarps
                         : kColumnTiles == 1 ? warp
                                             : (unit - own.first) % kEpilogueWarps;
        if constexpr (kBatchInvariant) {
          named_barrier_sync_unaligned(kSummed + room,
                                       threads_of_unit(gates_of<kGates>(phase), phase.parts));
        } else {
          barrier_sync<kBarrierThreads<kColumnTiles>>(kSummed + room);
        }
        const auto total_of = [&](int gate) {
          if constexpr (kBatchInvariant) {
            return total_in_order(shared.sums[room][gate], phase.parts);
          } else {
            return total<OfBlock::kTokens>(shared.sums[room][gate],
                                           column_tile * OfBlock::kSumsOfColumnTile);
          }
        };
        y[0] = total_of(0);
        if (kind == PhaseKind::gates) {
#pragma unroll
          for (int gate = 1; gate < kGates; ++gate) y[gate] = total_of(gate);
        }
        if (!kBatchInvariant)
          scale = normed ? norm_scale_of_warps(args, shared.squares[column_tile]) : 1.0f;
        ++turn;
        delay(8, 3000);
        __syncwarp();
        if (lane == 0) {
          if constexpr (kBatchInvariant) {
            set_count(shared.units_taken[warp], turn);
          } else {
            mbarrier_arrive(shared.taken[room]);
          }
        }
#pragma unroll
        for (int gate = 0; gate < kGates; ++gate) {
          if (kScaled<kType> && (gate == 0 || kind == PhaseKind::gates)) {
            y[gate].x *= here.factor[gate].x, y[gate].y *= here.factor[gate].y;
          }
          y[gate].x = y[gate].x * scale + here.shift[gate].x;
          y[gate].y = y[gate].y * scale + here.shift[gate].y;
        }
      }

      float2 out;
      if (kind == PhaseKind::gates) {
        float low[kGates], high[kGates];
#pragma unroll
        for (int gate = 0; gate < kGates; ++gate) {
          const float2 pre = unpack_bf16x2(rounded(y[gate].x, y[gate].y, bf16{}));
          low[gate] = pre.x, high[gate] = pre.y;
        }
        out = {step_cell<CellOf>(options, low, here.before.x),
               step_cell<CellOf>(options, high, here.before.y)};
        if (slot >= 0) *reinterpret_cast<float2*>(state_of(slot) + channel) = out;
        if (slot < 0) out = {};
      } else if (kind == PhaseKind::gelu) {
        out = {gelu(y[0].x), gelu(y[0].y)};
      } else if (kind == PhaseKind::logits) {
        if (real) {
          *reinterpret_cast<float2*>(
              args.logits + static_cast<std::int64_t>(token) * units * kUnit + channel) = y[0];
        }
        continue;
      } else {
        if (kind == PhaseKind::residual)
          x = unpack_bf16x2(rounded(y[0].x + x.x, y[0].y + x.y, bf16{}));
        out = x;
        if (kept == 0) stream[0] = x;
        if (kColumnTiles > 1 && kept > 0) stream[kColumnTiles - 1] = x;
        if (convolved) {
          float* inputs = args.conv + phase.layer * args.conv_layer_stride +
                          max(slot, 0) * args.conv_slot_stride + channel;
          Convolution<kMostTaps> convolution;
          convolution.load(phase.taps, phase.taps_bias, args.taps, channel, inputs,
                           args.conv_tap_stride);
          out = convolution.step(x, slot >= 0);
        }
      }
      if (real) {
        store_word(to + column_tile * args.column_tile_bytes + unit * kLine + lane * 4,
                   rounded(out.x, out.y, bf16{}));
      }
      // Other units of this block are stored by now or by other warps just now: this only keeps
      // readers from asking too early.
      if (lane == 0 && unit + 1 == own.end) mbarrier_arrive(shared.stored);
    }
  }
}

}  // namespace persistent
}  // namespace cuda
}  // namespace minserve
