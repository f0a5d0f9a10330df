// The convolution over packed sequences: every output from its own window of inputs, then the
// carried inputs.
//
// A thread walks a run of rows with the window of kVec channels in registers. Runs are cut at
// multiples of their length, and begin by reading the window before them, so that no output depends
// on where the cuts are.
#pragma once

#include "../core/row_grid.cuh"
#include "window.cuh"

namespace minserve {
namespace cuda {

// The last sequence that begins at or before row; all threads of the block together.
__device__ __forceinline__ int sequence_at(const Layout& lay, int row) {
  // It is one of low ... low + count - 1.
  unsigned low = 0, count = static_cast<unsigned>(lay.sequences) + 1;
  while (count > 1) {
    const unsigned step = (count + blockDim.x - 1) / blockDim.x;
    const unsigned ahead = threadIdx.x * step;
    const bool begun = ahead == 0 || (ahead < count && lay.cu_seqlens[low + ahead] <= row);
    const unsigned passed = static_cast<unsigned>(__syncthreads_count(begun)) - 1;
    low += passed * step;
    count = count - passed * step < step ? count - passed * step : step;
  }
  return static_cast<int>(low);
}

// Layout's begin, end and slot of a sequence or of the padding tail, looked up side by side. Rows
// and slots are fewer than 2^31 here.
struct Span {
  int begin, end, slot;
};
__device__ __forceinline__ Span span_of(const Layout& lay, int s) {
  const int tokens = static_cast<int>(lay.tokens), sequences = static_cast<int>(lay.sequences);
  int begin = lay.cu_seqlens[s], end = tokens, slot = -1;
  if (s < sequences) {
    end = lay.cu_seqlens[s + 1];
    slot = lay.slots[s];
  }
  begin = min(max(begin, 0), tokens);
  return {begin, max(begin, min(end, tokens)), slot < static_cast<int>(lay.num_slots) ? slot : -1};
}

// Rows [first, last) of one sequence.
template <class T, int kTaps, bool kSilu>
__device__ __forceinline__ void convolve_rows(const ConvArgs& args,
                                              const Filter<T, kTaps, kSilu>& filter,
                                              const Span& span, int first, int last,
                                              std::int64_t c) {
  constexpr int kAhead = 16 / static_cast<int>(sizeof(T));  // rows on their way at once
  const std::int64_t channels = args.layout.channels;
  const int stride = static_cast<int>(args.x.stride);
  const T* x = static_cast<const T*>(args.x.data) + first * args.x.stride + c;
  T* out = static_cast<T*>(args.out) + first * channels + c;
  // Rows of the sequence before `first`; fewer than the window's are filled up by carried inputs,
  // of which the newest has index kTaps - 2. Only bad indices put span.begin beyond `first`.
  const int done = first > span.begin ? first - span.begin : 0;
  Channels<T, kVec> old_rows[kTaps - 1];
  Channels<float, kVec> carried[kTaps - 1];
#pragma unroll
  for (int k = 0; k < kTaps - 1; ++k) {
    if (done >= kTaps - 1 - k) {
      old_rows[k].load(x - (kTaps - 1 - k) * stride);
    } else {
      carried[k].load(args.state + span.slot * args.slot_stride + (done + k) * args.tap_stride + c);
    }
  }
  float window[kTaps - 1][kVec];
  for (int left = last - first; left > 0; left -= kAhead) {
    Channels<T, kVec> in[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (i < left) in[i].load(x + i * stride);
    }
    if (left == last - first) {  // only now, with these rows on their way too
#pragma unroll
      for (int k = 0; k < kTaps - 1; ++k) {
#pragma unroll
        for (int v = 0; v < kVec; ++v) {
          window[k][v] = done >= kTaps - 1 - k ? old_rows[k][v] : carried[k][v];
        }
      }
    }
    // What lies beyond `last` is computed too; it is not written, and nothing comes after it.
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      float y[kVec];
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
        const float current = in[i][v];
        y[v] = filter.output(v, window, current);
#pragma unroll
        for (int k = 0; k < kTaps - 2; ++k) window[k][v] = window[k + 1][v];
        window[kTaps - 2][v] = current;
      }
      Channels<T, kVec> result;
      result.set(y);
      if (i < left) result.store(out + i * channels);
    }
    x += kAhead * stride;
    out += kAhead * channels;
  }
}

// Five blocks are the most on a multiprocessor whose registers hold the rows on their way, the
// window and the weights (of four taps of two-byte types all but a few words). With SiLU four.
template <class T, int kTaps, bool kSilu>
__global__ void __launch_bounds__(kThreads, kSilu ? 4 : 5)
    conv_scan_kernel(const __grid_constant__ ConvArgs args, const int run) {
  const Layout& lay = args.layout;
  const std::int64_t c = thread_of_group() * kVec, begin = row_group() * run;
  pdl_launch_dependents();
  wait_for_previous_kernel();
  if (begin >= lay.tokens) return;
  const int first = static_cast<int>(begin), tokens = static_cast<int>(lay.tokens);
  const int last = tokens - first < run ? tokens : first + run;
  const int sequences = static_cast<int>(lay.sequences);
  int s = sequence_at(lay, first);
  if (c >= lay.channels) return;
  Filter<T, kTaps, kSilu> filter;
  filter.load(args, c);
  // The next sequence is looked up while this one is worked on.
  Span span = span_of(lay, s), next = span_of(lay, s < sequences ? s + 1 : s);
  for (int row = first; row < last;) {
    while (s < sequences && row >= span.end) {
      ++s;
      span = next;
      next = span_of(lay, s < sequences ? s + 1 : s);
    }
    const int stop = span.end < last ? span.end : last;
    if (span.slot >= 0) {
      convolve_rows(args, filter, span, row, stop, c);
    } else {
      const Channels<T, kVec> zeros;
#pragma unroll 4
      for (std::int64_t r = row; r < stop; ++r) {
        zeros.store(static_cast<T*>(args.out) + r * lay.channels + c);
      }
    }
    row = stop;
  }
}

// The last inputs of every sequence, once the old ones have been read: after conv_scan_kernel. A
// short sequence moves some of the old ones down. Eight blocks for the same reason as a step's.
template <class T, int kTaps>
__global__ void __launch_bounds__(kThreads, 8)
    conv_keep_kernel(const __grid_constant__ ConvArgs args) {
  const Layout& lay = args.layout;
  const std::int64_t c = thread_of_group() * kVec, s = row_group();
  pdl_launch_dependents();
  wait_for_previous_kernel();
  if (s >= lay.sequences) return;
  const Span span = span_of(lay, static_cast<int>(s));
  const int rows = span.end - span.begin;
  if (c >= lay.channels || span.slot < 0 || rows == 0) return;
  float* state = args.state + span.slot * args.slot_stride + c;
  Channels<T, kVec> in[kTaps - 1];
  Channels<float, kVec> kept[kTaps - 1];
#pragma unroll
  for (int k = 0; k < kTaps - 1; ++k) {
    if (rows >= kTaps - 1 - k) {
      in[k].load(static_cast<const T*>(args.x.data) + (span.end - (kTaps - 1) + k) * args.x.stride +
                 c);
    } else {
      kept[k].load(state + (rows + k) * args.tap_stride);
    }
  }
#pragma unroll
  for (int k = 0; k < kTaps - 1; ++k) {
    if (rows >= kTaps - 1 - k) {
      float last[kVec];
#pragma unroll
      for (int v = 0; v < kVec; ++v) last[v] = in[k][v];
      kept[k].set(last);
    }
    kept[k].store(state + k * args.tap_stride);
  }
}

// Rows per thread: as long as the sequences are on average, and short enough that threads are many.
inline int run_of(const Layout& lay) {
  constexpr long long kEnoughThreads = 1 << 17;
  constexpr int kLongest = 64, kShortest = 8;
  int run = kLongest;
  while (run > kShortest && (run * (lay.sequences + 1) > lay.tokens ||
                             lay.tokens / run * (lay.channels / kVec) < kEnoughThreads)) {
    run /= 2;
  }
  return run;
}

}  // namespace cuda
}  // namespace minserve
