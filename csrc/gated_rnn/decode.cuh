// One step of GRU or LSTM for up to eight rows with both of its products, W x + b and U h + c.
//
// A block has the gates of eight units, and each of its warps some of the inputs of both products.
// What a warp reads first of the weights it asks for before the kernel ahead on the stream has
// ended. New h is kept apart until all blocks have read the last one; a second kernel moves it.
#pragma once

#include "../core/row_grid.cuh"
#include "product.cuh"
#include "unit.cuh"

namespace minserve {
namespace cuda {

constexpr int kDecodeChunks = 4;  // that a warp has in registers at once

// Bytes from one row of a product's inputs to the next in shared memory, in different banks.
MS_HD std::int64_t decode_row_bytes(std::int64_t inputs) {
  return up_to(inputs * 2, 128) + 64;
}
template <int kGates>
constexpr int kDecodeSums = 2 * kScanWarps * kWarpSums<kGates, 1>;
template <int kGates>
inline std::int64_t decode_shared_bytes(std::int64_t width, std::int64_t units) {
  return kDecodeSums<kGates> * 4 + kDecodeRows * (decode_row_bytes(up_to(width, kChunk)) +
                                                  decode_row_bytes(up_to(units, kChunk)));
}

// A matrix' rows of a block's units, as a warp multiplies with them.
template <class T, int kGates>
class DecodeProduct {
 public:
  __device__ __forceinline__ DecodeProduct(const Stream& weight, std::int64_t units,
                                           std::int64_t inputs, std::int64_t first_unit)
      : inputs_(inputs), stride_(weight.stride) {
    const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
    const int chunks = static_cast<int>(divided_up(inputs, kChunk));
    first_ = chunks * warp / kScanWarps, last_ = chunks * (warp + 1) / kScanWarps;
    part_ = lane % 4 * 8, row_ = lane / 4;
    rows_ = static_cast<const T*>(weight.data) + (first_unit + row_) * stride_;
    gate_ = units * stride_;
    fetch(first_);
  }
  // rows: of kDecodeRows inputs in shared memory.
  __device__ __forceinline__ void run(const unsigned char* rows, std::int64_t row_bytes,
                                      float* sums) {
    float of[2][4] = {};
    for (int chunk = first_; chunk < last_; chunk += kDecodeChunks) {
      if (chunk > first_) fetch(chunk);
#pragma unroll
      for (int n = 0; n < kDecodeChunks; ++n) {
        if (chunk + n >= last_) continue;
        const uint4 x = *reinterpret_cast<const uint4*>(rows + row_ * row_bytes +
                                                        ((chunk + n) * kChunk + part_) * 2);
#pragma unroll
        for (int two = 0; two < 2; ++two) {
          const uint4 low = w_[n][2 * two];
          const uint4 high =
              2 * two + 1 < kGates ? w_[n][(2 * two + 1) % kGates] : uint4{0, 0, 0, 0};
          mma_16_bit(of[two], {low.x, high.x, low.y, high.y}, x.x, x.y, T{});
          mma_16_bit(of[two], {low.z, high.z, low.w, high.w}, x.z, x.w, T{});
        }
      }
    }
#pragma unroll
    for (int gate = 0; gate < kGates; ++gate) {
      float* const to = sums + (gate * kOctet + row_) * kSumsStride<1> + part_ / 4;
      *reinterpret_cast<float2*>(to) = {of[gate / 2][gate % 2 * 2], of[gate / 2][gate % 2 * 2 + 1]};
    }
  }

 private:
  __device__ __forceinline__ void fetch(int chunk) {
#pragma unroll
    for (int n = 0; n < kDecodeChunks; ++n) {
      const std::int64_t k = (chunk + n) * kChunk + part_;
      const bool there = chunk + n < last_ && k < inputs_;
#pragma unroll
      for (int gate = 0; gate < kGates; ++gate) {
        w_[n][gate] =
            there ? *reinterpret_cast<const uint4*>(rows_ + gate * gate_ + k) : uint4{0, 0, 0, 0};
      }
    }
  }

  const std::int64_t inputs_, stride_;
  std::int64_t gate_;
  const T* rows_;
  int first_, last_, part_, row_;
  uint4 w_[kDecodeChunks][kGates];
};

template <class T, class Unit>
__global__ void __launch_bounds__(kScanThreads, 1)
    gated_decode_kernel(const __grid_constant__ GatedDecodeArgs args) {
  constexpr int kGates = Unit::kGates, kSums = kWarpSums<kGates, 1>;
  extern __shared__ uint4 memory[];
  const GatedRnnArgs& step = args.step;
  const std::int64_t units = step.layout.channels, batch = step.layout.tokens;
  const std::int64_t x_bytes = decode_row_bytes(up_to(args.width, kChunk));
  const std::int64_t h_bytes = decode_row_bytes(up_to(units, kChunk));
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32;
  const std::int64_t first_unit = static_cast<std::int64_t>(blockIdx.x) * kOctet;
  float* const sums = reinterpret_cast<float*>(memory);
  unsigned char* const rows_x = reinterpret_cast<unsigned char*>(sums + kDecodeSums<kGates>);
  unsigned char* const rows_h = rows_x + kDecodeRows * x_bytes;
  DecodeProduct<T, kGates> of_x(args.input_weight, units, args.width, first_unit);
  DecodeProduct<T, kGates> of_h(step.weight, units, units, first_unit);
  wait_for_previous_kernel();

  // Inputs in whole words: two numbers. What is no row's or beyond a row's end is zero.
  const int x_words = static_cast<int>(up_to(args.width, kChunk)) / 2;
  for (int i = thread; i < kDecodeRows * x_words; i += kScanThreads) {
    const std::int64_t row = i / x_words, k = i % x_words * 2;
    unsigned word = 0;
    if (row < batch && k < args.width) {
      word = *reinterpret_cast<const unsigned*>(static_cast<const T*>(args.x.data) +
                                                row * args.x.stride + k);
    }
    *reinterpret_cast<unsigned*>(rows_x + row * x_bytes + k * 2) = word;
  }
  const int h_words = static_cast<int>(up_to(units, kChunk)) / 2;
  for (int i = thread; i < kDecodeRows * h_words; i += kScanThreads) {
    const std::int64_t row = i / h_words, k = i % h_words * 2;
    const std::int64_t slot = row < batch ? step.layout.slot(row) : -1;
    unsigned word = 0;
    if (slot >= 0 && k < units) {
      const float* const h = step.hidden.data + slot * step.hidden.stride + k;
      word = rounded(h[0], h[1], T{});
    }
    *reinterpret_cast<unsigned*>(rows_h + row * h_bytes + k * 2) = word;
  }
  __syncthreads();
  of_x.run(rows_x, x_bytes, sums + 2 * warp * kSums);
  of_h.run(rows_h, h_bytes, sums + (2 * warp + 1) * kSums);
  __syncthreads();

  if (thread >= kDecodeRows * kOctet) return;
  const std::int64_t row = thread / kOctet, unit = first_unit + thread % kOctet;
  if (row >= batch) return;
  const std::int64_t slot = step.layout.slot(row);
  float h = 0.0f;
  if (slot >= 0) {
    float in[kGates], recurrent[kGates];
    GatedRnnArgs of_input = step;
    of_input.bias = args.input_bias;
#pragma unroll
    for (int gate = 0; gate < kGates; ++gate) {
      const int place = (gate * kOctet + thread % kOctet) * kSumsStride<1> + thread / kOctet;
      float x = 0.0f, y = 0.0f;
#pragma unroll
      for (int w = 0; w < kScanWarps; ++w) {
        x += sums[2 * w * kSums + place];
        y += sums[(2 * w + 1) * kSums + place];
      }
      in[gate] = x + gate_bias(of_input, gate * units + unit, T{});
      recurrent[gate] = y + gate_bias(step, gate * units + unit, T{});
    }
    Unit state;
    load_state(state, step, slot, unit);
    state.advance(in, recurrent);
    h = state.h;
    if constexpr (kGates == kLstmGates) {
      step.cell.data[slot * step.cell.stride + unit] = state.c;
    }
    args.next[row * units + unit] = h;
  }
  from_lane(static_cast<T*>(step.h.data) + row * step.h.stride + unit, h);
}

// The new h of all rows, to where it belongs.
__global__ void __launch_bounds__(kThreads)
    move_hidden_kernel(const __grid_constant__ GatedDecodeArgs args) {
  const std::int64_t row = row_group(), c = thread_of_group(), units = args.step.layout.channels;
  wait_for_previous_kernel();
  if (row >= args.step.layout.tokens || c >= units) return;
  const std::int64_t slot = args.step.layout.slot(row);
  if (slot >= 0) {
    args.step.hidden.data[slot * args.step.hidden.stride + c] = args.next[row * units + c];
  }
}

}  // namespace cuda
}  // namespace minserve
