// The scan of GRU and LSTM: one kernel over time, whose blocks run all at once.
//
// A block has some octets of units, with all their gates, and keeps their rows of the weight in
// shared memory where they fit. A step: each warp waits for the blocks whose units it reads, and
// multiplies with its inputs; then threads add up what the warps have, and a thread computes the
// cell of a unit of a sequence. h goes to the output and, rounded, to the exchange; the block's
// flag publishes it.
//
// Sequences go by groups, one after the other in a step, of which those that have ended are left
// out. Whose pre-activations a thread needs next it reads before it waits.
#pragma once

#include <stdexcept>
#include <string>

#include "product.cuh"
#include "unit.cuh"

namespace minserve {
namespace cuda {

struct GatedScanPlan {
  GatedExchange exchange;
  int octets = 1;      // of a block
  int groups = 0;      // of sequences
  bool whole = false;  // see weight_piece()
};

// A block's shared memory: weights, what the warps give, biases, and each group's longest length.
template <class T, int kGates, int kTiles, bool kShared>
struct GatedScanMemory {
  using Weights = BlockWeights<T, kGates, kShared>;
  static constexpr int kSums = kScanWarps * kWarpSums<kGates, kTiles>;

  MS_HD static std::int64_t bytes(std::int64_t octets, std::int64_t inputs, std::int64_t groups) {
    return Weights::bytes(octets, inputs) + (kSums + octets * kGates * kOctet + groups) * 4;
  }
  __device__ __forceinline__ GatedScanMemory(unsigned char* at, std::int64_t octets,
                                             std::int64_t inputs)
      : weights(at),
        sums(reinterpret_cast<float*>(at + Weights::bytes(octets, inputs))),
        bias(sums + kSums),
        longest(reinterpret_cast<int*>(bias + octets * kGates * kOctet)) {}

  unsigned char* const weights;
  float* const sums;
  float* const bias;
  int* const longest;
};

// Of what sequences no token is read.
template <class T>
__device__ __forceinline__ void zero_skipped_rows(const GatedRnnArgs& args, std::int64_t first_unit,
                                                  int count) {
  const Layout& lay = args.layout;
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
  for (std::int64_t s = warp; s <= lay.sequences; s += kScanWarps) {
    if (lay.slot(s) >= 0) continue;
    const std::int64_t begin = lay.begin(s), end = lay.end(s);
    for (std::int64_t i = lane; i < (end - begin) * count; i += 32) {
      from_lane(static_cast<T*>(args.h.data) + (begin + i / count) * args.h.stride + first_unit +
                    i % count,
                0.0f);
    }
  }
}

// Steps of each group: the length of its longest sequence that has a state.
__device__ __forceinline__ void find_longest(const Layout& lay, int groups, int of_group,
                                             int* longest) {
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
  for (int group = warp; group < groups; group += kScanWarps) {
    int most = 0;
    for (int i = lane; i < of_group; i += 32) {
      const std::int64_t s = static_cast<std::int64_t>(group) * of_group + i;
      if (s >= lay.sequences || lay.slot(s) < 0) continue;
      const int length = static_cast<int>(lay.end(s) - lay.begin(s));
      most = length > most ? length : most;
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      const int other = __shfl_xor_sync(0xffffffffu, most, distance);
      most = other > most ? other : most;
    }
    if (lane == 0) longest[group] = most;
  }
}

// The states of a block's units, as the first step reads them.
template <class T>
__device__ __forceinline__ void publish_states(const GatedRnnArgs& args,
                                               const GatedExchange& exchange,
                                               std::int64_t first_unit, int units) {
  const Layout& lay = args.layout;
  // By whole warps: rows of 8 units, of which four fill one.
  for (std::int64_t i = threadIdx.x; i < up_to(lay.sequences * units, 32); i += kScanThreads) {
    const std::int64_t s = i / units, c = first_unit + i % units;
    const std::int64_t slot = s < lay.sequences ? lay.slot(s) : -1;
    float h = 0.0f;
    if (slot >= 0 && c < lay.channels) h = args.hidden.data[slot * args.hidden.stride + c];
    store_units(exchange.row<T>(0, s < lay.sequences ? s : 0) + c, h, slot >= 0, T{});
  }
}

// A unit of a sequence at one step, as a thread has it.
template <class T, class Unit>
struct ScanItem {
  std::int64_t row, slot, unit;
  bool running;  // its sequence has this token
  bool inside;   // and there is such a unit
  Unit state;
  float in[Unit::kGates];

  __device__ __forceinline__ void load(const GatedRnnArgs& args, std::int64_t s, std::int64_t c,
                                       int t) {
    const Layout& lay = args.layout;
    running = inside = false;
    state = {};
#pragma unroll
    for (int gate = 0; gate < Unit::kGates; ++gate) in[gate] = 0.0f;
    if (s >= lay.sequences) return;
    unit = c;
    slot = lay.slot(s);
    row = lay.begin(s) + t;
    running = slot >= 0 && row < lay.end(s);
    inside = running && c < lay.channels;
    if (!inside) return;
    load_gates<T>(args.pre, row, lay.channels, c, in);
    load_state(state, args, slot, c);
  }
};

template <class T, class Unit, int kTiles, bool kShared>
__global__ void __launch_bounds__(kScanThreads, 1)
    gated_scan_kernel(const __grid_constant__ GatedRnnArgs args,
                      const __grid_constant__ GatedScanPlan plan) {
  constexpr int kGates = Unit::kGates, kOfGroup = kOctet * kTiles;
  constexpr int kItems = (kOfGroup * kOctet + kScanThreads - 1) / kScanThreads;
  const GatedExchange& exchange = plan.exchange;
  const int inputs = static_cast<int>(exchange.inputs);
  const int units = plan.octets * kOctet, first_unit = static_cast<int>(blockIdx.x) * units;
  const int octets_left = (inputs - first_unit) / kOctet;  // the last block may have fewer
  const int octets = octets_left < plan.octets ? octets_left : plan.octets;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32;
  extern __shared__ uint4 memory[];
  const GatedScanMemory<T, kGates, kTiles, kShared> shared(reinterpret_cast<unsigned char*>(memory),
                                                           plan.octets, inputs);

  // --- once
  const BlockWeights<T, kGates, kShared> weights(args, plan.whole, first_unit, octets, inputs,
                                                 shared.weights);
  for (int i = thread; i < octets * kGates * kOctet; i += kScanThreads) {
    const int gate = i / kOctet % kGates,
              unit = first_unit + i / (kOctet * kGates) * kOctet + i % 8;
    shared.bias[i] = unit < args.layout.channels
                         ? gate_bias(args, gate * args.layout.channels + unit, T{})
                         : 0.0f;
  }
  find_longest(args.layout, plan.groups, kOfGroup, shared.longest);
  publish_states<T>(args, exchange, first_unit, octets * kOctet);
  const std::int64_t own = args.layout.channels - first_unit;
  if (own > 0) zero_skipped_rows<T>(args, first_unit, static_cast<int>(own < units ? own : units));
  __syncthreads();
  if (thread == 0) store_release(exchange.flag(static_cast<int>(blockIdx.x)), 1);
  int steps = 0;
  for (int group = 0; group < plan.groups; ++group) {
    steps = shared.longest[group] > steps ? shared.longest[group] : steps;
  }
  // The warp's chunks, and the blocks whose units these are.
  const int chunks = inputs / kChunk;
  const int first_chunk = chunks * warp / kScanWarps, last_chunk = chunks * (warp + 1) / kScanWarps;
  const int first_block = first_chunk * kChunk / units;
  const int last_block = (last_chunk * kChunk - 1) / units;
  float* const own_sums = shared.sums + warp * kWarpSums<kGates, kTiles>;

  // --- step by step
  for (int t = 0; t < steps; ++t) {
    bool waits = true;
    for (int group = 0; group < plan.groups; ++group) {
      if (shared.longest[group] <= t) continue;
      const std::int64_t first_sequence = static_cast<std::int64_t>(group) * kOfGroup;
      for (int octet = 0; octet < octets; ++octet) {
        // Neighbouring threads have the units of an octet.
        ScanItem<T, Unit> items[kItems];
#pragma unroll
        for (int n = 0; n < kItems; ++n) {
          const int i = thread + n * kScanThreads;
          if (i >= kOfGroup * kOctet) continue;
          items[n].load(args, first_sequence + i / kOctet, first_unit + octet * kOctet + i % kOctet,
                        t);
        }
        if (waits && first_chunk < last_chunk) {
          wait_for_flags(exchange, first_block, last_block, static_cast<unsigned>(t) + 1u);
        }
        waits = false;
        GatedProduct<T, kGates, kTiles>::run(weights, octet, exchange.row<T>(t, first_sequence),
                                             inputs, first_chunk, last_chunk, own_sums);
        __syncthreads();
#pragma unroll
        for (int n = 0; n < kItems; ++n) {
          const int i = thread + n * kScanThreads;
          if (i >= kOfGroup * kOctet) continue;
          ScanItem<T, Unit>& item = items[n];
          float of_h[kGates];
#pragma unroll
          for (int gate = 0; gate < kGates; ++gate) {
            const int row = gate * kOctet + i % kOctet;
            float sum = 0.0f;
#pragma unroll
            for (int w = 0; w < kScanWarps; ++w) {
              sum +=
                  shared
                      .sums[w * kWarpSums<kGates, kTiles> + row * kSumsStride<kTiles> + i / kOctet];
            }
            of_h[gate] = sum + shared.bias[octet * kGates * kOctet + row];
          }
          item.state.advance(item.in, of_h);
          const float h = item.inside ? item.state.h : 0.0f;
          if (item.inside) {
            from_lane(static_cast<T*>(args.h.data) + item.row * args.h.stride + item.unit, h);
            store_state(item.state, args, item.slot, item.unit);
          }
          store_units(exchange.row<T>(t + 1, first_sequence + i / kOctet) + first_unit +
                          octet * kOctet + i % kOctet,
                      h, item.running, T{});
        }
        __syncthreads();  // the next product overwrites the sums, or a flag publishes h
      }
    }
    if (thread == 0 && t + 1 < steps) {
      store_release(exchange.flag(static_cast<int>(blockIdx.x)), static_cast<unsigned>(t) + 2u);
    }
  }
}

// --- which kernel, and how many blocks

// A GPU as far as a scan has to know it.
struct GatedScanDevice {
  int multiprocessors;
  std::int64_t shared_bytes;  // most of a block
};

template <class T, int kGates, int kTilesOf, bool kInShared>
struct GatedScanKind {
  static constexpr int kTiles = kTilesOf;
  static constexpr bool kShared = kInShared;
  using Memory = GatedScanMemory<T, kGates, kTilesOf, kInShared>;
};

struct GatedScanGrid {
  int blocks = 0;
  std::int64_t shared_bytes = 0;
  GatedScanPlan plan;
};

// f(kind, grid): of the kernel for this scan, which depends on shapes alone. Sequences go by groups
// of 8, 32 or 64, fewer where the sums of more would leave the weight no room.
template <class T, int kGates, class F>
void with_gated_scan(const GatedRnnArgs& args, const GatedScanDevice& device, void* exchange, F f) {
  const std::int64_t units = args.layout.channels, sequences = args.layout.sequences;
  GatedScanGrid grid;
  GatedScanPlan& plan = grid.plan;
  plan.exchange.data = static_cast<unsigned char*>(exchange);
  plan.exchange.inputs = up_to(units, kChunk);
  const std::int64_t octets = plan.exchange.inputs / kOctet;
  const std::int64_t most =
      device.multiprocessors < kMostScanBlocks ? device.multiprocessors : kMostScanBlocks;
  plan.octets = static_cast<int>(divided_up(octets, most));
  grid.blocks = static_cast<int>(divided_up(octets, plan.octets));
  plan.whole = units % (16 / static_cast<std::int64_t>(sizeof(T))) == 0 &&
               lie_aligned<T, 16 / sizeof(T)>(args.weight.data, args.weight.stride);
  const auto fits = [&](auto kind) {
    using Kind = decltype(kind);
    plan.groups = static_cast<int>(divided_up(sequences, kOctet * Kind::kTiles));
    plan.exchange.rows = plan.groups * kOctet * Kind::kTiles;
    grid.shared_bytes = Kind::Memory::bytes(plan.octets, plan.exchange.inputs, plan.groups);
    return grid.shared_bytes <= device.shared_bytes;
  };
  const GatedScanKind<T, kGates, 8, true> many;
  const GatedScanKind<T, kGates, 4, true> some;
  const GatedScanKind<T, kGates, 1, true> few;
  const GatedScanKind<T, kGates, 8, false> many_of_l2;
  const GatedScanKind<T, kGates, 1, false> few_of_l2;
  if (sequences <= 8) {
    if (fits(few)) return f(few, grid);
    if (fits(few_of_l2)) return f(few_of_l2, grid);
  } else {
    if (sequences > 32 && fits(many)) return f(many, grid);
    if (fits(some)) return f(some, grid);
    if (fits(many_of_l2)) return f(many_of_l2, grid);
  }
  throw std::runtime_error("minserve: too many sequences for one scan: " +
                           std::to_string(sequences));
}

inline std::int64_t gated_exchange_bytes(const GatedRnnArgs& args, std::int64_t element) {
  return kMostScanBlocks * kFlagBytes + 2 * up_to(args.layout.sequences, 8 * kOctet) *
                                            up_to(args.layout.channels, kChunk) * element;
}

}  // namespace cuda
}  // namespace minserve
