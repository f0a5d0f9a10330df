// Scans of short sequences, of one chunk or none: a thread takes a sequence from its beginning to
// its end. The longer ones among them are left to the tiles, whose words this kernel empties.
//
// In a short sequence there is nothing to cut in time, and what tiles need (their order, carries,
// words) takes longer than they do. The values are formed as scan.cuh forms them:
// runs of kRun positions from the carries that the folds of segments and groups give, so that no
// bit tells which way a sequence went.
#pragma once

#include "../core/vector_access.cuh"
#include "../cells/gates.h"
#include "parameters.cuh"
#include "tiles.cuh"
#include "lookback.cuh"

namespace minserve {
namespace cuda {

template <template <class> class CellOf, class O, class T>
struct ShortScan {
  using V = typename ComputeType<T>::type;
  using Cell = CellOf<V>;
  using G = Geometry<T, Cell::kInputs, true>;
  static constexpr int kEach = 4 / static_cast<int>(sizeof(T)), kRun = G::kRun;
  static constexpr int kBlock = 128;  // threads, or as many as there are channels for
  static_assert(Cell::kPrevious < 0 && Cell::kOutputs == 1, "forward cells");
  using Parameters = ChannelParameters<Cell, V, kEach>;
  using Values = V[kEach];
  using Folded = Affine<V>[kEach];
  using Inputs = Channels<T, kEach>[kRun][Cell::kInputs];

  static unsigned threads(const Layout& lay) {
    const std::int64_t all = (lay.channels + kEach - 1) / kEach;
    return all < kBlock ? static_cast<unsigned>((all + 31) / 32 * 32) : kBlock;
  }
  static unsigned blocks(const Layout& lay) {
    return static_cast<unsigned>((lay.sequences + 1) * columns(lay, threads(lay)));
  }

  static __device__ __forceinline__ void run(const ScanArgs& args, const O& options,
                                             Tickets::Shared* tickets) {
    const Layout& lay = args.layout;
    const int across = static_cast<int>(columns(lay, blockDim.x));
    const std::int64_t s = blockIdx.x / across;
    const std::int64_t channel = (blockIdx.x % across * blockDim.x + threadIdx.x) * kEach;
    // In this order: the tiles look at the sequences before they wait for this kernel.
    wait_for_previous_kernel();
    pdl_launch_dependents();
    if (blockIdx.x == 0 && threadIdx.x == 0) *tickets = {~0u, ~0u};
    if (channel >= lay.channels) return;
    const std::int64_t begin = lay.begin(s), slot = lay.slot(s);
    if (!args.is_short(s)) return empty_lookback(args, s, channel);
    const int length = static_cast<int>(lay.end(s) - begin);
    T* const out = static_cast<T*>(args.outputs[0].data) + begin * args.outputs[0].stride + channel;
    if (slot < 0) return zero(out, args.outputs[0].stride, length);
    const T* in[Cell::kInputs];
#pragma unroll
    for (int n = 0; n < Cell::kInputs; ++n) {
      in[n] = static_cast<const T*>(args.inputs[n].data) + begin * args.inputs[n].stride + channel;
    }
    Parameters parameters;
    parameters.template load<true>(args, channel, kEach);
    Channels<V, kEach> state;
    Inputs coming;
    load(args, in, 0, length, coming);
    if (args.initial) {
      state.load(static_cast<const V*>(args.initial) + slot * args.initial_stride + channel);
    }
    Values carry;
#pragma unroll
    for (int v = 0; v < kEach; ++v) carry[v] = state[v];
    // Also of no positions, which makes -0 what tiles make it.
    scan_chunk(args, options, parameters, in, out, length, coming, carry);
    if (args.last) {
      state.set(carry);
      state.store(static_cast<V*>(args.last) + slot * args.last_stride + channel);
    }
  }

 private:
  static MS_HD std::int64_t columns(const Layout& lay, unsigned threads) {
    const std::int64_t all = (lay.channels + kEach - 1) / kEach;
    return (all + threads - 1) / threads;
  }

  static __device__ __forceinline__ void empty_lookback(const ScanArgs& args, std::int64_t s,
                                                        std::int64_t channel) {
    const Layout& lay = args.layout;
    const std::int64_t first = lay.first_chunk(s);
    const std::int64_t chunks = (lay.end(s) - lay.begin(s) + kScanChunk - 1) / kScanChunk;
    struct alignas(kEach * sizeof(LookbackWord<V>)) LookbackWords {
      unsigned long long each[kEach];
    };
    static_assert(sizeof(LookbackWords) == kEach * sizeof(LookbackWord<V>), "words of eight bytes");
    LookbackWords empty;
    for (unsigned long long& one : empty.each) one = ~0ull;
    LookbackWord<V>* words =
        static_cast<LookbackWord<V>*>(args.workspace) + first * lay.channels + channel;
    for (std::int64_t chunk = 0; chunk < chunks; ++chunk, words += lay.channels) {
      *reinterpret_cast<LookbackWords*>(words) = empty;
    }
  }

  static __device__ __forceinline__ void zero(T* out, std::int64_t stride, int length) {
    const Channels<T, kEach> none;
    for (int position = 0; position < length; ++position) none.store(out + position * stride);
  }

  static __device__ __forceinline__ void load(const ScanArgs& args,
                                              const T* const (&in)[Cell::kInputs], int position,
                                              int length, Inputs& to) {
#pragma unroll
    for (int k = 0; k < kRun; ++k) {
#pragma unroll
      for (int n = 0; n < Cell::kInputs; ++n) {
        if (position + k < length) to[k][n].load(in[n] + (position + k) * args.inputs[n].stride);
      }
    }
  }

  // sum = next after sum.
  static __device__ __forceinline__ void fold(Folded& sum, const Folded& next) {
#pragma unroll
    for (int v = 0; v < kEach; ++v) {
      sum[v].b = fmadd(next[v].a, sum[v].b, next[v].b);
      sum[v].a = next[v].a * sum[v].a;
    }
  }
  static __device__ __forceinline__ void pass(const Folded& over, Values& carry) {
#pragma unroll
    for (int v = 0; v < kEach; ++v) carry[v] = fmadd(over[v].a, carry[v], over[v].b);
  }

  // From the carry into a chunk to the one out of it.
  static __device__ __forceinline__ void scan_chunk(const ScanArgs& args, const O& options,
                                                    const Parameters& parameters,
                                                    const T* const (&in)[Cell::kInputs], T* out,
                                                    int length, Inputs& coming, Values& carry) {
    Values into_group, into_segment;
    Folded of_chunk, of_group, of_segment;
    set(into_group, carry);
#pragma unroll 1
    for (int segment = 0; segment < G::kSegments; ++segment) {
      const int in_group = segment % G::kGroupSegments, position = segment * kRun;
      if (in_group == 0) set(into_segment, into_group);
#pragma unroll
      for (int v = 0; v < kEach; ++v) of_segment[v] = {V(1), V(0)};
      if (position < length) {
        write_run(args, options, parameters, in, out, position, length, coming, into_segment,
                  of_segment);
      }
      pass(of_segment, into_segment);
      if (in_group == 0) {
        set(of_group, of_segment);
      } else {
        fold(of_group, of_segment);
      }
      if (in_group < G::kGroupSegments - 1) continue;
      pass(of_group, into_group);
      if (segment < G::kGroupSegments) {
        set(of_chunk, of_group);
      } else {
        fold(of_chunk, of_group);
      }
    }
    pass(of_chunk, carry);
  }

  template <class X>
  static __device__ __forceinline__ void set(X (&to)[kEach], const X (&from)[kEach]) {
#pragma unroll
    for (int v = 0; v < kEach; ++v) to[v] = from[v];
  }

  // A run, whose inputs are there; those of the next one are asked for.
  static __device__ __forceinline__ void write_run(const ScanArgs& args, const O& options,
                                                   const Parameters& parameters,
                                                   const T* const (&in)[Cell::kInputs], T* out,
                                                   int position, int length, Inputs& coming,
                                                   const Values& carry, Folded& sum) {
    Inputs now;
#pragma unroll
    for (int k = 0; k < kRun; ++k) {
#pragma unroll
      for (int n = 0; n < Cell::kInputs; ++n) now[k][n] = coming[k][n];
    }
    load(args, in, position + kRun, length, coming);
    Values h;
    set(h, carry);
#pragma unroll
    for (int k = 0; k < kRun; ++k) {
      Values result;
#pragma unroll
      for (int v = 0; v < kEach; ++v) {
        V element[Cell::kInputs], of_element[1];
#pragma unroll
        for (int n = 0; n < Cell::kInputs; ++n) element[n] = now[k][n][v];
        Affine<V> step = Cell::coefficients(options, element, parameters[v]);
        // Positions past the end change nothing, not even bits.
        if (position + k >= length) step = {V(1), V(-0.0)};
        sum[v].b = fmadd(step.a, sum[v].b, step.b);
        sum[v].a = step.a * sum[v].a;
        const V after = fmadd(step.a, h[v], step.b);
        Cell::outputs(options, element, h[v], after, of_element);
        result[v] = of_element[0];
        h[v] = after;
      }
      if (position + k < length) {
        Channels<T, kEach> written;
        written.set(result);
        written.store(out + (position + k) * args.outputs[0].stride);
      }
    }
  }
};

template <template <class> class CellOf, class O, class T>
__global__ void __launch_bounds__((ShortScan<CellOf, O, T>::kBlock), 6)
    short_kernel(const __grid_constant__ ScanArgs args, const O options, Tickets::Shared* tickets) {
  ShortScan<CellOf, O, T>::run(args, options, tickets);
}

}  // namespace cuda
}  // namespace minserve
