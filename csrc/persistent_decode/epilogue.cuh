// The epilogue of a unit's sums. A warp has eight channels of eight tokens, a lane two neighbouring
// channels of one token. A block always has the same units of the residual stream, and keeps them.
#pragma once

#include "../cells/silu.cuh"
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

__device__ __forceinline__ unsigned load_packed(const void* p, int at) {
  return *reinterpret_cast<const unsigned*>(static_cast<const bf16*>(p) + at);
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
__device__ __forceinline__ float norm_scale_in_order(const PersistentDecodeArgs& args, int width,
                                                     const float (&squares)[kSums][kColumns]) {
  float sum = 0.0f;
#pragma unroll 8
  for (int i = 0; i < width / kSquareRows; ++i) sum += squares[i][threadIdx.x % 32 / 4];
  DeferredNorm norm;
  norm.width = static_cast<float>(width), norm.eps = args.eps;
  return norm_scale_of(norm, sum);
}
template <int kSums>
__device__ __forceinline__ float norm_scale_of_warps(const PersistentDecodeArgs& args, int width,
                                                     const float (&squares)[kSums][kColumns]) {
  float sum = 0.0f;
#pragma unroll
  for (int w = 0; w < kSums; ++w) sum += squares[w][threadIdx.x % 32 / 4];
  return rsqrtf(fmaf(sum, 1.0f / static_cast<float>(width), args.eps));
}

// What a lane's pair of a unit needs besides the sums.
template <class Cell>
struct Beside {
  static constexpr int kGates = Cell::kPreactivations;
  float2 shift[kGates] = {}, factor[kGates] = {}, before = {};
};
// With an output gate there is more than fits into registers but in bfloat16, as it was.
template <class Cell>
struct BesideOutputGate {
  static constexpr int kGates = Cell::kPreactivations;
  unsigned shift[kGates] = {}, output_norm = 0x3f803f80u;
  float2 factor[kGates] = {}, before = {}, bound = {};
};
__device__ __forceinline__ float2 floats_of(float2 pair) {
  return pair;
}
__device__ __forceinline__ float2 floats_of(unsigned pair) {
  return unpack_bf16x2(pair);
}

// A channel's step: `pre` are all of its pre-activations.
template <class Cell, class Options>
__device__ __forceinline__ float state_after(const Options& options,
                                             const float (&pre)[Cell::kPreactivations],
                                             float before,
                                             const Parameters<float, Cell::kParameters>& of) {
  static_assert(Cell::kStates == 1 && Cell::kOutputs == 1);
  float in[Cell::kInputs];
#pragma unroll
  for (int n = 0; n < Cell::kInputs; ++n) in[n] = pre[n];
  const Affine<float> step = Cell::coefficients(options, in, of);
  return fmadd(step.a, before, step.b);
}

// Tells the sums of squares of a unit's channels, of which this lane has a pair of a token: of all
// eight, or in batch-invariant mode of four at a time, one channel after the other as in
// finish_gates() (gemm/epilogue.cuh).
template <bool kBatchInvariant>
__device__ __forceinline__ void store_squares(unsigned char* of_unit, float2 x, bool real) {
  const int lane = threadIdx.x % 32;
  float sum = x.x * x.x;
  sum += x.y * x.y;
  if constexpr (kBatchInvariant) {
    const float third = __shfl_down_sync(0xffffffffu, x.x, 1);
    const float fourth = __shfl_down_sync(0xffffffffu, x.y, 1);
    sum += third * third;
    sum += fourth * fourth;
    if (real && lane % 2 == 0) store_word(of_unit + lane / 2 * 4, __float_as_uint(sum));
  } else {
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    if (real && lane % 4 == 0) store_word(of_unit + lane / 4 * 4, __float_as_uint(sum));
  }
}
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
    Shared<CellOf<float>, kSplit, kBatchInvariant, kColumnTiles>& shared, unsigned char* set) {
  using Cell = CellOf<float>;
  using OfBlock = Shared<Cell, kSplit, kBatchInvariant, kColumnTiles>;
  using Beside = std::conditional_t<kOutputGate<Cell>, BesideOutputGate<Cell>, Beside<Cell>>;
  constexpr int kGates = Cell::kPreactivations;
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
    const bool normed = phase.norm != nullptr || norms_outputs<Cell>(phase);
    const bool convolved = phase.taps != nullptr;
    const int norm_width = kOutputGate<Cell> ? phase.inputs : args.width;
    const int norm = OfBlock::kNorms > 1 && kind == PhaseKind::residual ? 1 : 0;
    // Whether a unit has rows of this gate.
    const auto has = [&](int gate) {
      return gate == 0 || kind == PhaseKind::gates ||
             (kOutputGate<Cell> && gate == 1 && kind == PhaseKind::swiglu);
    };
    unsigned char* to = set + phase.out;
    const Units own = units_of(phase);
    const int first = own.first * kColumnTiles, end = own.end * kColumnTiles;
    const auto beside = [&](int item) {
      Beside found;
      if (item >= end) return found;
      const int channel = item / kColumnTiles * kUnit + lane % 4 * 2;
#pragma unroll
      for (int gate = 0; gate < kGates; ++gate) {
        if (!has(gate)) continue;
        const int of_gate = gate * units * kUnit + channel;
        if (kScaled<kType> && kind != PhaseKind::embed) {
          found.factor[gate] = load_floats(phase.scale + of_gate);
        }
        if (bias) {
          if constexpr (kOutputGate<Cell>) {
            found.shift[gate] = load_packed(bias, of_gate);
          } else {
            found.shift[gate] = load_pair(bias, of_gate);
          }
        }
      }
      if (kind == PhaseKind::gates) {
        found.before = load_floats(state_of(one_of(slots, item % kColumnTiles)) + channel);
        if constexpr (kOutputGate<Cell>) {
          if (phase.bound) found.bound = load_floats(phase.bound + channel);
          if (phase.output_norm) found.output_norm = load_packed(phase.output_norm, channel);
        }
      }
      return found;
    };
    float scale = 1.0f;
    // What an item needs besides the sums is on its way before those of the one ahead are there.
    int item = first + warp;
    Beside next = beside(item);
    if (kBatchInvariant && normed && item < end) {
      while (count_at(shared_address(&shared.products_begun)) < p) {
      }
      __syncwarp();
      scale = norm_scale_in_order(args, norm_width, shared.squares[0][0]);
    }
#pragma unroll 1
    for (int kept = 0; item < end; item += kEpilogueWarps, ++kept) {
      const int unit = item / kColumnTiles, column_tile = item % kColumnTiles;
      const int channel = unit * kUnit + lane % 4 * 2;
      const int token = token_of(column_tile), slot = one_of(slots, column_tile);
      const bool real = token < args.batch;
      const Beside here = next;
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
                                       threads_of_unit(gates_of<Cell>(phase), phase.parts));
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
        } else if (kOutputGate<Cell> && kind == PhaseKind::swiglu) {
          y[1] = total_of(1);
        }
        if (!kBatchInvariant) {
          scale = normed ? norm_scale_of_warps(args, norm_width, shared.squares[norm][column_tile])
                         : 1.0f;
        }
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
          if (kScaled<kType> && has(gate)) {
            y[gate].x *= here.factor[gate].x, y[gate].y *= here.factor[gate].y;
          }
          const float2 shift = floats_of(here.shift[gate]);
          y[gate].x = y[gate].x * scale + shift.x;
          y[gate].y = y[gate].y * scale + shift.y;
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
        Parameters<float, Cell::kParameters> of_low, of_high;
        if constexpr (Cell::kParameters > 0) {
          of_low.at[0] = here.bound.x, of_high.at[0] = here.bound.y;
        }
        out = {state_after<Cell>(options, low, here.before.x, of_low),
               state_after<Cell>(options, high, here.before.y, of_high)};
        if (slot >= 0) *reinterpret_cast<float2*>(state_of(slot) + channel) = out;
        if (slot < 0) out = {};
        if constexpr (kOutputGate<Cell>) {
          store_squares<kBatchInvariant>(set + phase.squares +
                                             column_tile * args.column_tile_bytes +
                                             unit * bytes_of_squares(kBatchInvariant),
                                         out, real);
          const float2 weight = unpack_bf16x2(here.output_norm);
          out.x = out.x * silu(low[Cell::kInputs]) * weight.x;
          out.y = out.y * silu(high[Cell::kInputs]) * weight.y;
        }
      } else if (kOutputGate<Cell> && kind == PhaseKind::swiglu) {
        const float2 gate = unpack_bf16x2(rounded(y[0].x, y[0].y, bf16{}));
        const float2 up = unpack_bf16x2(rounded(y[1].x, y[1].y, bf16{}));
        out = {silu(gate.x) * up.x, silu(gate.y) * up.y};
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
