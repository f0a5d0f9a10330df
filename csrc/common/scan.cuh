// The affine scan on CUDA in one pass over device memory.
//
// Blocks stay and take tile after tile (tiles.cuh). While a tile is worked on, the next one streams
// into shared memory, each thread copying what it will itself read. Within a tile each thread folds
// a short run of time, the runs' aggregates are folded through shared memory in a fixed order, and
// the carry into the tile comes from the words of earlier tiles (words.cuh). Forward cells keep
// (a, b) in registers between the fold and the output; backward cells, which need their inputs a
// second time, leave them in shared memory and compute again.
//
// Lengths, slots and padding are found on the device, so a launch depends on tensor shapes alone
// and can be captured. Source of the recurrences: the cells.
#pragma once

#include "copies.cuh"
#include "gates.h"
#include "launch.cuh"
#include "step.cuh"
#include "tiles.cuh"
#include "words.cuh"

namespace minserve {
namespace cuda {

template <template <class> class CellOf, class O, class T>
struct TileScan {
  using V = typename ComputeType<T>::type;
  using Cell = CellOf<V>;
  static constexpr bool kHeld = Cell::kPrevious < 0;
  using G = Geometry<T, Cell::kInputs, kHeld>;
  static constexpr int kVec = G::kVec, kRun = G::kRun;
  // With two stages the next tile streams in while the current one is still being read.
  static constexpr int kStages = kHeld || G::kStageBytes > 49152 ? 1 : 2;
  static constexpr int kMinBlocks = MS_MINB;
  static constexpr bool kAnyOptions = sizeof(O) > 1;

  struct Shared {
    uint4 stage[kStages][Cell::kInputs][kRun][kBlock];
    V a[G::kSegments][G::kChannels];  // aggregates of the segments
    V b[G::kSegments][G::kChannels];  // then the carries into them
    V group_a[G::kGroups][G::kChannels];
    V group_b[G::kGroups][G::kChannels];
    V carry[G::kChannels];  // into the tile
    Tile tiles[3];
  };

  // What a thread is in every tile.
  struct Lane {
    int segment, position, channel;
    __device__ __forceinline__ Lane()
        : segment(static_cast<int>(threadIdx.x) / 32 * G::kSegmentsPerWarp +
                  static_cast<int>(threadIdx.x) % 32 / G::kLanes),
          position(segment * kRun),
          channel(static_cast<int>(threadIdx.x) % G::kLanes * kVec) {}
  };

  static __device__ __forceinline__ O options(const ScanArgs& args) {
    if constexpr (kAnyOptions) {
      return {args.linear_candidate, args.normalize_gates};
    } else {
      return {};
    }
  }
  static __device__ __forceinline__ std::int64_t direction(const ScanArgs& args) {
    return args.layout.reverse ? -1 : 1;
  }
  static __device__ __forceinline__ int channels_left(const ScanArgs& args, const Tile& tile,
                                                      int channel) {
    const std::int64_t left = args.layout.channels - tile.channel - channel;
    return left < 0 ? 0 : (left < kVec ? static_cast<int>(left) : kVec);
  }
  static __device__ __forceinline__ void fetch(const ScanArgs& args, const Tile& tile,
                                               const Lane& lane, Shared& shared, int stage) {
    const int real = channels_left(args, tile, lane.channel);
    if (tile.sequence < 0 || tile.slot < 0 || real == 0) return;
    if (!args.aligned) return fetch_elements(args, tile, lane, shared, stage, real);
    const std::int64_t row = tile.row + direction(args) * lane.position;
    const int left = tile.count - lane.position;
#pragma unroll
    for (int n = 0; n < Cell::kInputs; ++n) {
      const std::int64_t step = direction(args) * args.inputs[n].stride;
      const T* from = static_cast<const T*>(args.inputs[n].data) + row * args.inputs[n].stride +
                      tile.channel + lane.channel;
      // The previous state is one row further on, except for the forward scan's first row, whose
      // value is replaced when it is read.
      if (n == Cell::kPrevious) from += step;
#pragma unroll
      for (int k = 0; k < kRun; ++k) {
        if (k >= left) break;
        const bool none = n == Cell::kPrevious && row + direction(args) * k == tile.first_row;
        copy_async(&shared.stage[stage][n][k][threadIdx.x], none ? from - step : from);
        from += step;
      }
    }
  }

  // The same for tensors that are not aligned to 16 bytes, or whose rows are not.
  static __device__ __forceinline__ void fetch_elements(const ScanArgs& args, const Tile& tile,
                                                        const Lane& lane, Shared& shared, int stage,
                                                        int real) {
#pragma unroll 1
    for (int n = 0; n < Cell::kInputs; ++n) {
      const T* p = static_cast<const T*>(args.inputs[n].data) + tile.channel + lane.channel;
#pragma unroll 1
      for (int k = 0; k < kRun && lane.position + k < tile.count; ++k) {
        std::int64_t row = tile.row + direction(args) * (lane.position + k);
        if (n == Cell::kPrevious && row != tile.first_row) row += direction(args);
        T* to = reinterpret_cast<T*>(&shared.stage[stage][n][k][threadIdx.x]);
        for (int v = 0; v < kVec; ++v) to[v] = v < real ? p[row * args.inputs[n].stride + v] : T{};
      }
    }
  }

  // The inputs of the thread's k-th position.
  static __device__ __forceinline__ void read(const ScanArgs& args, const Tile& tile,
                                              const Lane& lane, const Shared& shared, int stage,
                                              int k, V (&in)[Cell::kInputs][kVec]) {
#pragma unroll
    for (int n = 0; n < Cell::kInputs; ++n) {
      unpack(shared.stage[stage][n][k][threadIdx.x], in[n], T{});
    }
    if constexpr (!kHeld) {
      if (tile.row + direction(args) * (lane.position + k) != tile.first_row) return;
      const int real = channels_left(args, tile, lane.channel);
      const V* h0 = static_cast<const V*>(args.h0);
      if (h0) h0 += tile.sequence * args.layout.channels + tile.channel + lane.channel;
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
        in[Cell::kPrevious][v] = h0 && v < real ? h0[v] : V(0);
      }
    }
  }

  template <bool kFull>
  static __device__ __forceinline__ void fold_run(const ScanArgs& args, const Tile& tile,
                                                  const Lane& lane, const Shared& shared, int stage,
                                                  Affine<V> (&held)[kHeld ? kRun : 1][kVec],
                                                  Affine<V> (&sum)[kVec]) {
#pragma unroll
    for (int v = 0; v < kVec; ++v) sum[v] = {V(1), V(0)};
#pragma unroll
    for (int k = 0; k < kRun; ++k) {
      V in[Cell::kInputs][kVec];
      read(args, tile, lane, shared, stage, k, in);
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
        V element[Cell::kInputs];
#pragma unroll
        for (int n = 0; n < Cell::kInputs; ++n) element[n] = in[n][v];
        Affine<V> step = Cell::affine(options(args), element);
        // Positions past the end change nothing, not even bits.
        if (!kFull && lane.position + k >= tile.count) step = {V(1), V(0)};
        sum[v].b = fmadd(step.a, sum[v].b, step.b);
        sum[v].a = step.a * sum[v].a;
        if (kHeld) held[k][v] = step;
      }
    }
  }

  static __device__ __forceinline__ void write_run(const ScanArgs& args, const Tile& tile,
                                                   const Lane& lane, const Shared& shared,
                                                   int stage,
                                                   const Affine<V> (&held)[kHeld ? kRun : 1][kVec],
                                                   V (&h)[kVec]) {
    const int real = channels_left(args, tile, lane.channel);
    if (real == 0) return;
    const int left = tile.count - lane.position;
    std::int64_t row = tile.row + direction(args) * lane.position;
#pragma unroll
    for (int k = 0; k < kRun; ++k) {
      if (k >= left) return;
      V in[Cell::kInputs][kVec], out[Cell::kOutputs][kVec];
      if (!kHeld) read(args, tile, lane, shared, stage, k, in);
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
        V element[Cell::kInputs], result[Cell::kOutputs];
        if (!kHeld) {
#pragma unroll
          for (int n = 0; n < Cell::kInputs; ++n) element[n] = in[n][v];
        }
        const Affine<V> step =
            kHeld ? held[kHeld ? k : 0][v] : Cell::affine(options(args), element);
        const V after = fmadd(step.a, h[v], step.b);
        Cell::outputs(options(args), element, h[v], after, result);
        h[v] = after;
#pragma unroll
        for (int n = 0; n < Cell::kOutputs; ++n) out[n][v] = result[n];
      }
      write(args, row, tile.channel + lane.channel, real, out);
      row += direction(args);
    }
  }

  static __device__ __forceinline__ void write(const ScanArgs& args, std::int64_t row,
                                               std::int64_t channel, int real,
                                               const V (&out)[Cell::kOutputs][kVec]) {
#pragma unroll
    for (int n = 0; n < Cell::kOutputs; ++n) {
      T* p = static_cast<T*>(args.outputs[n].data) + row * args.outputs[n].stride + channel;
      store_pack(p, pack(out[n], T{}), args.aligned, real);
    }
  }

  static __device__ __forceinline__ void zero(const ScanArgs& args, const Tile& tile,
                                              const Lane& lane) {
    const int real = channels_left(args, tile, lane.channel);
    const V none[Cell::kOutputs][kVec] = {};
    for (int k = 0; k < kRun && lane.position + k < tile.count && real > 0; ++k) {
      write(args, tile.row + direction(args) * (lane.position + k), tile.channel + lane.channel,
            real, none);
    }
  }

  // One channel's carry into the tile, by one thread; the carry out of it is passed on.
  static __device__ __forceinline__ V exchange_carry(const ScanArgs& args, const Tile& tile,
                                                     int channel, V a, V b) {
    const std::int64_t c = tile.channel + channel, channels = args.layout.channels;
    char* own = static_cast<char*>(args.workspace) +
                (tile.word + channel) * static_cast<std::int64_t>(sizeof(Word<V>));
    V h;
    if (tile.chunk == 0) {
      const V* initial = static_cast<const V*>(args.initial);
      h = initial ? initial[tile.slot * args.initial_stride + c] : V(0);
    } else {
      if (!tile.last) Word<V>::aggregate(a, b).store(own);
      h = look_back<V>(own, channels * static_cast<std::int64_t>(sizeof(Word<V>)), tile.chunk);
    }
    const V next = fmadd(a, h, b);
    if (!tile.last) {
      Word<V>::carry(next).store(own);
    } else if (args.last) {
      static_cast<V*>(args.last)[tile.slot * args.last_stride + c] = next;
    }
    return h;
  }

  // Aggregates of the groups of segments.
  static __device__ __forceinline__ void fold_groups(Shared& shared) {
    const int channel = static_cast<int>(threadIdx.x) % G::kChannels;
    const int group = static_cast<int>(threadIdx.x) / G::kChannels;
    const int first = group * G::kGroupSegments;
    V a = shared.a[first][channel], b = shared.b[first][channel];
#pragma unroll
    for (int i = 1; i < G::kGroupSegments; ++i) {
      const V next = shared.a[first + i][channel];
      b = fmadd(next, b, shared.b[first + i][channel]);
      a = next * a;
    }
    shared.group_a[group][channel] = a;
    shared.group_b[group][channel] = b;
    __syncthreads();
  }

  // From the groups' aggregates to the carries into the segments (shared.b).
  static __device__ __forceinline__ void spread_carries(const ScanArgs& args, const Tile& tile,
                                                        Shared& shared) {
    const int channel = static_cast<int>(threadIdx.x) % G::kChannels;
    const int group = static_cast<int>(threadIdx.x) / G::kChannels;
    const int first = group * G::kGroupSegments;
    if (group == 0) {
      V a = shared.group_a[0][channel], b = shared.group_b[0][channel];
#pragma unroll
      for (int g = 1; g < G::kGroups; ++g) {
        const V next = shared.group_a[g][channel];
        b = fmadd(next, b, shared.group_b[g][channel]);
        a = next * a;
      }
      if (tile.channel + channel < args.layout.channels) {
        shared.carry[channel] = exchange_carry(args, tile, channel, a, b);
      }
    }
    __syncthreads();
    V h = shared.carry[channel];
#pragma unroll
    for (int g = 0; g < G::kGroups - 1; ++g) {
      if (g < group) h = fmadd(shared.group_a[g][channel], h, shared.group_b[g][channel]);
    }
#pragma unroll
    for (int i = 0; i < G::kGroupSegments; ++i) {
      const V a = shared.a[first + i][channel], b = shared.b[first + i][channel];
      shared.b[first + i][channel] = h;
      h = fmadd(a, h, b);
    }
    __syncthreads();
  }

  static __device__ __forceinline__ void run(const ScanArgs& args, unsigned* counter,
                                             Shared& shared) {
    const Lane lane;
    const bool finds_tiles = threadIdx.x / 32 == kWarps - 1;
    if (finds_tiles) {
      for (int n = 0; n < 2; ++n) {
        const Tile tile = next_tile(args.layout, counter, G::kChannels);
        if (threadIdx.x % 32 == 0) shared.tiles[n] = tile;
      }
    }
    __syncthreads();
    fetch(args, shared.tiles[0], lane, shared, 0);
    for (int n = 0;; ++n) {
      const Tile& tile = shared.tiles[n % 3];
      if (tile.sequence < 0) return;
      const int stage = n % kStages;
      Affine<V> held[kHeld ? kRun : 1][kVec];
      copies_done();
      if (kStages == 2) fetch(args, shared.tiles[(n + 1) % 3], lane, shared, (n + 1) % 2);
      if (tile.slot < 0) {
        zero(args, tile, lane);
      } else {
        Affine<V> sum[kVec];
        if (tile.count == kScanChunk) {
          fold_run<true>(args, tile, lane, shared, stage, held, sum);
        } else {
          fold_run<false>(args, tile, lane, shared, stage, held, sum);
        }
#pragma unroll
        for (int v = 0; v < kVec; ++v) {
          shared.a[lane.segment][lane.channel + v] = sum[v].a;
          shared.b[lane.segment][lane.channel + v] = sum[v].b;
        }
      }
      __syncthreads();
      if (kHeld) fetch(args, shared.tiles[(n + 1) % 3], lane, shared, 0);
      if (tile.slot >= 0) fold_groups(shared);
      // While one warp finds the tile after the next, others wait for this tile's carry.
      if (finds_tiles) {
        const Tile coming = next_tile(args.layout, counter, G::kChannels);
        if (threadIdx.x % 32 == 0) shared.tiles[(n + 2) % 3] = coming;
      }
      if (tile.slot >= 0) {
        spread_carries(args, tile, shared);
        V h[kVec];
#pragma unroll
        for (int v = 0; v < kVec; ++v) h[v] = shared.b[lane.segment][lane.channel + v];
        write_run(args, tile, lane, shared, stage, held, h);
      }
      if (!kHeld && kStages == 1) fetch(args, shared.tiles[(n + 1) % 3], lane, shared, 0);
      __syncthreads();
    }
  }
};

template <template <class> class CellOf, class O, class T>
__global__ void __launch_bounds__(kBlock, (TileScan<CellOf, O, T>::kMinBlocks))
    tile_kernel(const __grid_constant__ ScanArgs args, unsigned* counter) {
  using Scan = TileScan<CellOf, O, T>;
  extern __shared__ uint4 memory[];
  Scan::run(args, counter, *reinterpret_cast<typename Scan::Shared*>(memory));
}

template <template <class> class CellOf, class O, class T>
void launch_tiles(const ScanArgs& args, cudaStream_t stream) {
  using Scan = TileScan<CellOf, O, T>;
  const auto kernel = &tile_kernel<CellOf, O, T>;
  const int shared = static_cast<int>(sizeof(typename Scan::Shared));
  const Layout& lay = args.layout;
  const std::int64_t tiles =
      lay.chunk_bound() * ((lay.channels + Scan::G::kChannels - 1) / Scan::G::kChannels);
  if (tiles > 4294967295LL - 1000000) {  // the counter has 32 bits and is passed once by each block
    throw std::runtime_error("minserve: too large for one scan: " + std::to_string(tiles) +
                             " tiles");
  }
  const std::int64_t bytes = workspace_bytes(lay, sizeof(Word<typename Scan::V>));
  char* counter = static_cast<char*>(args.workspace) + bytes - 16;
  check(cudaMemsetAsync(args.workspace, 0xff, static_cast<std::size_t>(bytes), stream),
        "clearing the scan's words");
  const std::int64_t blocks =
      resident_blocks(reinterpret_cast<const void*>(kernel), kBlock, shared);
  kernel<<<static_cast<unsigned>(tiles < blocks ? tiles : blocks), kBlock, shared, stream>>>(
      args, reinterpret_cast<unsigned*>(counter));
  check(cudaGetLastError(), "scan");
}

// Whether rows that begin at data and follow each other by stride elements are aligned to 16 bytes.
inline bool aligned_rows(const void* data, std::int64_t stride, std::int64_t size) {
  return reinterpret_cast<std::uintptr_t>(data) % 16 == 0 && stride * size % 16 == 0;
}

template <template <class> class CellOf, class T>
void launch_scan(ScanArgs args, cudaStream_t stream) {
  using Cell = CellOf<float>;
  const Layout& lay = args.layout;
  args.aligned = lay.channels * sizeof(T) % 16 == 0;
  for (int n = 0; n < Cell::kInputs; ++n) {
    args.aligned =
        args.aligned && aligned_rows(args.inputs[n].data, args.inputs[n].stride, sizeof(T));
  }
  for (int n = 0; n < Cell::kOutputs; ++n) {
    args.aligned =
        args.aligned && aligned_rows(args.outputs[n].data, args.outputs[n].stride, sizeof(T));
  }
  const std::int64_t size = sizeof(typename ComputeType<T>::type);
  args.aligned_state = args.aligned && aligned_rows(args.initial, args.initial_stride, size) &&
                       aligned_rows(args.last, args.last_stride, size);
  const bool step = Cell::kPrevious < 0 && !lay.cu_seqlens && lay.time == 1;
  with_options<Cell::kHasOptions>(args, [&](auto options) {
    if constexpr (Cell::kPrevious < 0) {
      if (step) return launch_step<CellOf, decltype(options), T>(args, options, stream);
    }
    launch_tiles<CellOf, decltype(options), T>(args, stream);
  });
}

// One entry point over dtypes and direction for a pair of cells.
template <template <class> class Forward, template <class> class Backward>
void launch_by_dtype(const ScanArgs& args, Dtype dtype, bool backward, int device,
                     void* stream_handle) {
  const DeviceGuard guard(device);
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_handle);
  switch (dtype) {
    case Dtype::f32:
      return backward ? launch_scan<Backward, float>(args, stream)
                      : launch_scan<Forward, float>(args, stream);
    case Dtype::f64:
      return backward ? launch_scan<Backward, double>(args, stream)
                      : launch_scan<Forward, double>(args, stream);
    case Dtype::bf16:
      return backward ? launch_scan<Backward, bf16>(args, stream)
                      : launch_scan<Forward, bf16>(args, stream);
    case Dtype::f16:
      return backward ? launch_scan<Backward, f16>(args, stream)
                      : launch_scan<Forward, f16>(args, stream);
  }
}

}  // namespace cuda
}  // namespace minserve
