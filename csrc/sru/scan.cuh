// The scans of the simple recurrent unit on CUDA: a thread reads a channel of a sequence, token
// after token, or of a chunk.
//
// What takes time is the chain from c to c: a product, an exponential, a reciprocal, a product.
// Tokens ahead are on their way to registers meanwhile, and what a token has beside the chain (its
// reset gate, its output) fills the gaps. Gates that do not see c leave a chain of one
// multiply-add: then a few long sequences are read by chunks side by side.
#pragma once

#include "../core/row_grid.cuh"
#include "../core/vector_access.cuh"
#include "args.h"
#include "token.h"

namespace minserve {
namespace cuda {

// Of a multiprocessor: with 1,024 channels of 64 sequences all blocks of an H100 run at once.
constexpr int kSruBlocks = 4;

// Tokens on their way: with 55 clocks for each, as long as a load from memory takes.
constexpr int kSruAhead = 16;
static_assert(kScanChunk % kSruAhead == 0, "chunks end between turns");

__device__ __forceinline__ SruChannel<float> channel_of(const SruArgs& args, std::int64_t channel) {
  constexpr float kScale = static_cast<float>(-kLog2e);
  const std::int64_t reset = args.layout.channels + channel;
  SruChannel<float> of = {0.0f, 0.0f, args.bias[channel] * kScale, args.bias[reset] * kScale};
  if (args.weight_c) {
    of.forget_c = args.weight_c[channel] * kScale;
    of.reset_c = args.weight_c[reset] * kScale;
  }
  return of;
}

template <class T>
__device__ __forceinline__ T* place(const Stream& stream, std::int64_t row, std::int64_t channel) {
  return static_cast<T*>(stream.data) + row * stream.stride + channel;
}

// What is read of a token, as it lies in memory: a conversion would wait for it.
template <class T, bool kHighway>
struct SruInputs {
  Channels<T, 1> u0, u1, u2, x;
  __device__ __forceinline__ void load(const T* u, const T* highway, std::int64_t channels) {
    u0.load(u), u1.load(u + channels), u2.load(u + 2 * channels);
    if constexpr (kHighway) x.load(highway);
  }
};

// The recurrence c_t = f c_{t-1} + b of gates that do not see c, and its sums from a chunk's start:
// the chunk takes a carry to a carry + b.
struct AffineCarry {
  float a = 1.0f, b = 0.0f;
  __device__ __forceinline__ void add(float forget, float write) {
    a *= forget;
    b = fmadd(forget, b, write);
  }
  __device__ __forceinline__ float of(float carry) const { return fmadd(a, carry, b); }
};

// A token whose gates do not see c; returns h.
template <bool kHighway, bool kTanh>
__device__ __forceinline__ float affine_token(const SruChannel<float>& channel, float u0, float u1,
                                              float u2, float x, float& c, AffineCarry& chunk) {
  const float e = sru_exponential(u1, channel.forget, 0.0f, 0.0f), f = reciprocal(e + 1.0f);
  const float write = e * f * u0;
  c = fmadd(f, c, write);
  chunk.add(f, write);
  const float e_reset = sru_exponential(u2, channel.reset, 0.0f, 0.0f);
  return sru_output<kHighway>(e_reset, reciprocal(e_reset + 1.0f), sru_activation<kTanh>(c), x);
}

// Calls at(token's row, what was loaded of it) for the rows [begin, end), and ended(rows so far)
// after every kSruAhead of them and after the last, with kSruAhead tokens on their way.
template <class In, class Load, class At, class Ended>
__device__ __forceinline__ void for_tokens(std::int64_t begin, std::int64_t end, const Load& load,
                                           const At& at, const Ended& ended) {
  In ring[kSruAhead];
#pragma unroll
  for (int i = 0; i < kSruAhead; ++i) {
    if (begin + i < end) load(begin + i, ring[i]);
  }
  std::int64_t row = begin;
#pragma unroll 1
  for (; row + 2 * kSruAhead <= end; row += kSruAhead) {
#pragma unroll
    for (int i = 0; i < kSruAhead; ++i) {
      const In in = ring[i];
      load(row + i + kSruAhead, ring[i]);
      at(row + i, in);
    }
    ended(row + kSruAhead);
  }
#pragma unroll 1
  for (; row < end; row += kSruAhead) {
#pragma unroll
    for (int i = 0; i < kSruAhead; ++i) {
      if (row + i >= end) break;
      const In in = ring[i];
      if (row + i + kSruAhead < end) load(row + i + kSruAhead, ring[i]);
      at(row + i, in);
    }
    ended(row + kSruAhead < end ? row + kSruAhead : end);
  }
}

template <class T, bool kHighway>
struct SruLoad {
  const T *u, *x;
  std::int64_t u_stride, x_stride, channels;
  __device__ __forceinline__ SruLoad(const SruArgs& args, std::int64_t channel)
      : u(place<const T>(args.u, 0, channel)),
        x(kHighway ? place<const T>(args.highway, 0, channel) : nullptr),
        u_stride(args.u.stride),
        x_stride(args.highway.stride),
        channels(args.layout.channels) {}
  __device__ __forceinline__ void operator()(std::int64_t row, SruInputs<T, kHighway>& in) const {
    in.load(u + row * u_stride, kHighway ? x + row * x_stride : nullptr, channels);
  }
};

template <class T>
__device__ __forceinline__ void zero_rows(const Stream& stream, std::int64_t begin,
                                          std::int64_t end, std::int64_t channel) {
  for (std::int64_t row = begin; row < end; ++row) {
    from_lane(place<T>(stream, row, channel), 0.0f);
  }
}

// Reads the rows [begin, end) of a channel from c. kAffine: gates do not see c, and each chunk from
// `begin` on hands on its sums; otherwise nothing depends on where a call begins. kKeeps: c of each
// token is written, too.
template <class T, bool kHighway, bool kTanh, bool kAffine, bool kKeeps>
__device__ __forceinline__ float read_channel(const SruArgs& args, std::int64_t channel,
                                              std::int64_t begin, std::int64_t end, float c) {
  const SruChannel<float> of = channel_of(args, channel);
  const SruLoad<T, kHighway> load(args, channel);
  T* const h = place<T>(args.h, 0, channel);
  float* const kept = kKeeps ? args.c + channel : nullptr;
  AffineCarry chunk;
  float carry = c;
  for_tokens<SruInputs<T, kHighway>>(
      begin, end, load,
      [&](std::int64_t row, const SruInputs<T, kHighway>& in) {
        const float x = kHighway ? in.x[0] * args.scale : 0.0f;
        float out;
        if constexpr (kAffine) {
          out = affine_token<kHighway, kTanh>(of, in.u0[0], in.u1[0], in.u2[0], x, c, chunk);
        } else {
          out = sru_token<kHighway, kTanh>(of, in.u0[0], in.u1[0], in.u2[0], x, c);
          if constexpr (kKeeps) kept[row * args.layout.channels] = c;
        }
        from_lane(h + row * args.h.stride, out);
      },
      [&](std::int64_t row) {
        if (!kAffine || ((row - begin) % kScanChunk != 0 && row < end)) return;
        c = carry = chunk.of(carry);
        chunk = AffineCarry{};
      });
  return c;
}

// Whole sequences: groups of rows are sequences, of which the last is the padding tail.
template <class T, bool kHighway, bool kTanh, bool kAffine, bool kKeeps = false>
__global__ void __launch_bounds__(kThreads, kSruBlocks)
    sru_scan_kernel(const __grid_constant__ SruArgs args) {
  const Layout& lay = args.layout;
  const std::int64_t s = row_group(), channel = thread_of_group();
  pdl_launch_dependents();
  wait_for_previous_kernel();
  if (s > lay.sequences || channel >= lay.channels) return;
  const std::int64_t begin = lay.begin(s), end = lay.end(s), slot = lay.slot(s);
  if (begin >= end) return;
  if (slot < 0) {
    if (kKeeps) zero_rows<float>({args.c, lay.channels}, begin, end, channel);
    return zero_rows<T>(args.h, begin, end, channel);
  }
  float* const state = args.state + slot * args.slot_stride + channel;
  *state = read_channel<T, kHighway, kTanh, kAffine, kKeeps>(args, channel, begin, end, *state);
}

// The rows of a chunk, none of a number that no chunk has; and its sequence.
struct ChunkRows {
  std::int64_t sequence, begin, end;
};
__device__ __forceinline__ ChunkRows rows_of_chunk(const Layout& lay, std::int64_t chunk) {
  const std::int64_t s = lay.sequence_of_chunk(chunk);
  const std::int64_t end = lay.end(s);
  const std::int64_t begin = lay.begin(s) + (chunk - lay.first_chunk(s)) * kScanChunk;
  return {s, begin, begin + kScanChunk < end ? begin + kScanChunk : end};
}

// Chunks side by side, in three kernels. First what each makes of its carry.
template <class T>
__global__ void __launch_bounds__(kThreads) sru_sums_kernel(const __grid_constant__ SruArgs args) {
  const Layout& lay = args.layout;
  const std::int64_t number = row_group(), channel = thread_of_group();
  pdl_launch_dependents();
  wait_for_previous_kernel();
  if (number >= lay.chunk_bound() || channel >= lay.channels) return;
  const ChunkRows rows = rows_of_chunk(lay, number);
  if (rows.begin >= rows.end || lay.slot(rows.sequence) < 0) return;
  const SruChannel<float> of = channel_of(args, channel);
  const T* const u = place<const T>(args.u, 0, channel);
  struct In {
    Channels<T, 1> u0, u1;
  };
  AffineCarry chunk;
  for_tokens<In>(
      rows.begin, rows.end,
      [&](std::int64_t row, In& in) {
        const T* const at = u + row * args.u.stride;
        in.u0.load(at), in.u1.load(at + lay.channels);
      },
      [&](std::int64_t, const In& in) {
        const float e = sru_exponential(in.u1[0], of.forget, 0.0f, 0.0f);
        const float f = reciprocal(e + 1.0f);
        chunk.add(f, e * f * in.u0[0]);
      },
      [](std::int64_t) {});
  float* const at = args.carries + number * lay.channels + channel;
  at[0] = chunk.a;
  at[lay.chunk_bound() * lay.channels] = chunk.b;
}

// Then the carries of a sequence's chunks, one after another, in place of a; and its last c.
__global__ void __launch_bounds__(kThreads)
    sru_carries_kernel(const __grid_constant__ SruArgs args) {
  const Layout& lay = args.layout;
  const std::int64_t s = row_group(), channel = thread_of_group();
  pdl_launch_dependents();
  wait_for_previous_kernel();
  if (s >= lay.sequences || channel >= lay.channels) return;
  const std::int64_t begin = lay.begin(s), end = lay.end(s), slot = lay.slot(s);
  if (begin >= end || slot < 0) return;
  float* const state = args.state + slot * args.slot_stride + channel;
  const std::int64_t chunks = divided_up(end - begin, kScanChunk), channels = lay.channels;
  const std::int64_t further = lay.chunk_bound() * channels;
  float* const a = args.carries + lay.first_chunk(s) * channels + channel;
  float carry = *state;
  constexpr int kAhead = 8;
#pragma unroll 1
  for (std::int64_t first = 0; first < chunks; first += kAhead) {
    AffineCarry of[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (first + i >= chunks) continue;
      const float* const at = a + (first + i) * channels;
      of[i].a = at[0], of[i].b = at[further];
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (first + i >= chunks) continue;
      a[(first + i) * channels] = carry;
      carry = of[i].of(carry);
    }
  }
  *state = carry;
}

// Then the outputs.
template <class T, bool kHighway, bool kTanh>
__global__ void __launch_bounds__(kThreads, kSruBlocks)
    sru_chunks_kernel(const __grid_constant__ SruArgs args) {
  const Layout& lay = args.layout;
  const std::int64_t number = row_group(), channel = thread_of_group();
  pdl_launch_dependents();
  wait_for_previous_kernel();
  if (number >= lay.chunk_bound() || channel >= lay.channels) return;
  const ChunkRows rows = rows_of_chunk(lay, number);
  if (rows.begin >= rows.end) return;
  if (lay.slot(rows.sequence) < 0) return zero_rows<T>(args.h, rows.begin, rows.end, channel);
  read_channel<T, kHighway, kTanh, true, false>(args, channel, rows.begin, rows.end,
                                                args.carries[number * lay.channels + channel]);
}

// One token of every row of a batch.
template <class T, bool kHighway, bool kTanh, bool kAffine>
__global__ void __launch_bounds__(kThreads) sru_step_kernel(const __grid_constant__ SruArgs args) {
  const Layout& lay = args.layout;
  const std::int64_t row = row_group(), channel = thread_of_group();
  pdl_launch_dependents();
  wait_for_previous_kernel();
  if (row >= lay.tokens || channel >= lay.channels) return;
  // Layout::slot() in two halves, so that only the second waits.
  const std::int64_t slot = lay.slots[row];
  SruInputs<T, kHighway> in;
  SruLoad<T, kHighway>(args, channel)(row, in);
  const SruChannel<float> of = channel_of(args, channel);
  const bool real = slot >= 0 && slot < lay.num_slots;
  float* const state = args.state + (real ? slot * args.slot_stride : 0) + channel;
  float c = real ? *state : 0.0f;
  const float x = kHighway ? in.x[0] * args.scale : 0.0f;
  float h;
  if constexpr (kAffine) {
    AffineCarry chunk;
    h = affine_token<kHighway, kTanh>(of, in.u0[0], in.u1[0], in.u2[0], x, c, chunk);
  } else {
    h = sru_token<kHighway, kTanh>(of, in.u0[0], in.u1[0], in.u2[0], x, c);
  }
  if (real) *state = c;
  from_lane(place<T>(args.h, row, channel), real ? h : 0.0f);
}

// Up to so many chains leave a large GPU idle, so that reading the gates' inputs twice is worth it.
constexpr std::int64_t kSruFewChains = 1 << 15;

// Whether chunks are read side by side; both forms give the same bits.
inline bool sru_reads_chunks(const SruArgs& args) {
  const Layout& lay = args.layout;
  return args.carries && lay.sequences > 0 && lay.sequences * lay.channels <= kSruFewChains &&
         lay.tokens > 2 * kScanChunk * lay.sequences;
}

}  // namespace cuda
}  // namespace minserve
