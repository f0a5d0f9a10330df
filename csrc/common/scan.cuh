// The affine scan on CUDA: one thread per channel, coalesced over channels.
//
// Two regimes with the same bits. Serial: a block walks one sequence's chunks. Split: chunk
// aggregates side by side, a pass that turns them into carries in order, then outputs side by side.
// Grids come from tensor shapes only; lengths, slots and padding are found on the device, so every
// launch can be captured.
#pragma once

#include "launch.cuh"
#include "scan_at.h"

namespace minserve {
namespace cuda {

// Independent loads in flight before the first of them is used; fewer where an item is large.
constexpr int kUnroll = 8;
template <class Cell>
constexpr int unroll_of() {
  return sizeof(typename Cell::Item) <= 2 * sizeof(typename Cell::V) ? kUnroll : kUnroll / 2;
}

template <bool kOutput, bool kAggregate, class Cell>
__device__ __forceinline__ void chunk(const Cell& cell, const Layout& lay, At at, std::int64_t from,
                                      std::int64_t to, typename Cell::V h, typename Cell::V& a,
                                      typename Cell::V& b) {
  using V = typename Cell::V;
  using Item = typename Cell::Item;
  const std::int64_t first = lay.reverse ? at.end - 1 : at.begin;
  const std::int64_t direction = lay.reverse ? -1 : 1;
  a = splat<V>(1.0f);
  b = splat<V>(0.0f);
  const auto advance = [&](std::int64_t p, const Item& item) {
    if (kAggregate) {
      b = fmadd(item.a, b, item.b);
      a = item.a * a;
    }
    if (kOutput) {
      at.row = first + direction * p;
      const V after = fmadd(item.a, h, item.b);
      cell.emit(at, item, h, after, Full{});
      h = after;
    }
  };
  constexpr int kAhead = unroll_of<Cell>();
  std::int64_t p = from;
  for (; p + kAhead <= to; p += kAhead) {
    Item items[kAhead];
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      at.row = first + direction * (p + u);
      items[u] = cell.load(at, Full{});
    }
#pragma unroll
    for (int u = 0; u < kAhead; ++u) advance(p + u, items[u]);
  }
  for (; p < to; ++p) {
    at.row = first + direction * p;
    advance(p, cell.load(at, Full{}));
  }
}

template <class Cell>
__device__ __forceinline__ void zero_rows(const Cell& cell, At at, std::int64_t from,
                                          std::int64_t to) {
  for (at.row = from; at.row < to; ++at.row) cell.zero(at, Full{});
}

template <class V>
__device__ __forceinline__ V initial_carry(const ScanArgs& args, std::int64_t slot,
                                           std::int64_t channel) {
  const V* p = static_cast<const V*>(args.initial);
  return p ? p[slot * args.initial_stride + channel] : splat<V>(0.0f);
}

template <class V>
__device__ __forceinline__ void finish_carry(const ScanArgs& args, std::int64_t slot,
                                             std::int64_t channel, V h) {
  V* p = static_cast<V*>(args.last);
  if (p) p[slot * args.last_stride + channel] = h;
}

template <class Cell>
__global__ void __launch_bounds__(kThreads) serial_kernel(const ScanArgs args) {
  using V = typename Cell::V;
  const Cell cell(args);
  const Layout& lay = args.layout;
  const std::int64_t s = blockIdx.x,
                     channel = static_cast<std::int64_t>(blockIdx.y) * kThreads + threadIdx.x;
  if (channel >= lay.channels) return;
  const At at{s, lay.begin(s), lay.end(s), 0, channel};
  const std::int64_t slot = lay.slot(s);
  if (slot < 0) return zero_rows(cell, at, at.begin, at.end);
  V h = initial_carry<V>(args, slot, channel), a, b;
  const std::int64_t length = at.end - at.begin;
  for (std::int64_t from = 0; from < length; from += kScanChunk) {
    const std::int64_t to = from + kScanChunk < length ? from + kScanChunk : length;
    chunk<true, true>(cell, lay, at, from, to, h, a, b);
    h = fmadd(a, h, b);
  }
  finish_carry<V>(args, slot, channel, h);
}

template <class Cell, bool kOutput>
__global__ void __launch_bounds__(kThreads) chunk_kernel(const ScanArgs args) {
  using V = typename Cell::V;
  const Cell cell(args);
  const Layout& lay = args.layout;
  const std::int64_t index = blockIdx.x,
                     channel = static_cast<std::int64_t>(blockIdx.y) * kThreads + threadIdx.x;
  if (channel >= lay.channels) return;
  const std::int64_t s = lay.sequence_of_chunk(index);
  const At at{s, lay.begin(s), lay.end(s), 0, channel};
  const std::int64_t length = at.end - at.begin;
  const std::int64_t from = (index - lay.first_chunk(s)) * kScanChunk;
  if (from < 0 || from >= length) return;  // a number that no chunk has
  const std::int64_t to = from + kScanChunk < length ? from + kScanChunk : length;
  if (lay.slot(s) < 0) {
    if (kOutput) zero_rows(cell, at, at.begin + from, at.begin + to);
    return;
  }
  V* a_row = static_cast<V*>(args.chunk_a) + index * lay.channels + channel;
  V* b_row = static_cast<V*>(args.chunk_b) + index * lay.channels + channel;
  V a, b;
  if (kOutput) {
    chunk<true, false>(cell, lay, at, from, to, *a_row, a, b);
  } else {
    chunk<false, true>(cell, lay, at, from, to, splat<V>(0.0f), a, b);
    *a_row = a;
    *b_row = b;
  }
}

// Each chunk's A is replaced by the chunk's carry-in.
template <class V>
__global__ void __launch_bounds__(kThreads) carry_kernel(const ScanArgs args) {
  const Layout& lay = args.layout;
  const std::int64_t s = blockIdx.x,
                     channel = static_cast<std::int64_t>(blockIdx.y) * kThreads + threadIdx.x;
  const std::int64_t slot = lay.slot(s);
  if (channel >= lay.channels || slot < 0) return;
  V* a_rows = static_cast<V*>(args.chunk_a) + lay.first_chunk(s) * lay.channels + channel;
  const V* b_rows =
      static_cast<const V*>(args.chunk_b) + lay.first_chunk(s) * lay.channels + channel;
  const std::int64_t chunks = (lay.end(s) - lay.begin(s) + kScanChunk - 1) / kScanChunk;
  V h = initial_carry<V>(args, slot, channel);
  std::int64_t i = 0;
  for (; i + kUnroll <= chunks; i += kUnroll) {
    V a[kUnroll], b[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      a[u] = a_rows[(i + u) * lay.channels];
      b[u] = b_rows[(i + u) * lay.channels];
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      a_rows[(i + u) * lay.channels] = h;
      h = fmadd(a[u], h, b[u]);
    }
  }
  for (; i < chunks; ++i) {
    const V a = a_rows[i * lay.channels], b = b_rows[i * lay.channels];
    a_rows[i * lay.channels] = h;
    h = fmadd(a, h, b);
  }
  finish_carry<V>(args, slot, channel, h);
}

template <class Cell>
void launch_scan(const ScanArgs& args, bool split, int device, void* stream_handle) {
  using V = typename Cell::V;
  const DeviceGuard guard(device);
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_handle);
  const Layout& lay = args.layout;
  const dim3 by_sequence = grid_of(lay.sequences + 1, lay.channels);
  if (!split) {
    serial_kernel<Cell><<<by_sequence, kThreads, 0, stream>>>(args);
    return check(cudaGetLastError(), "serial scan");
  }
  const dim3 by_chunk = grid_of(lay.chunk_bound(), lay.channels);
  chunk_kernel<Cell, false><<<by_chunk, kThreads, 0, stream>>>(args);
  check(cudaGetLastError(), "scan aggregates");
  carry_kernel<V><<<by_sequence, kThreads, 0, stream>>>(args);
  check(cudaGetLastError(), "scan carries");
  chunk_kernel<Cell, true><<<by_chunk, kThreads, 0, stream>>>(args);
  check(cudaGetLastError(), "scan outputs");
}

// One entry point over dtypes and direction for a pair of cells.
template <template <class> class Forward, template <class> class Backward>
void launch_by_dtype(const ScanArgs& args, Dtype dtype, bool backward, bool split, int device,
                     void* stream) {
  switch (dtype) {
    case Dtype::f32:
      return backward ? launch_scan<Backward<float>>(args, split, device, stream)
                      : launch_scan<Forward<float>>(args, split, device, stream);
    case Dtype::f64:
      return backward ? launch_scan<Backward<double>>(args, split, device, stream)
                      : launch_scan<Forward<double>>(args, split, device, stream);
    case Dtype::bf16:
      return backward ? launch_scan<Backward<bf16>>(args, split, device, stream)
                      : launch_scan<Forward<bf16>>(args, split, device, stream);
    case Dtype::f16:
      return backward ? launch_scan<Backward<f16>>(args, split, device, stream)
                      : launch_scan<Forward<f16>>(args, split, device, stream);
  }
}

}  // namespace cuda
}  // namespace minserve
