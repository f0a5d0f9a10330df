// What a thread finds out about its share of a row: the best token, and the sum of
// exp(logit - best), brought to a new best where one comes up.
//
// It takes several fours at a time, so that their exponentials are under way together. What it has
// not found is -infinity, 0 and no token; a NaN becomes the best and stays it.
#pragma once

#include "../../core/reduce/argmax_key.cuh"
#include "../../core/reduce/row_reader.cuh"

namespace minserve {
namespace cuda {

struct ExpSum {
  float best = kImpossible;
  float sum = 0.0f;

  __device__ __forceinline__ void raise(float to) {
    const float before = best;
    best = max_or_nan(best, to);
    if (best != before) sum *= expf(before - best);
  }

  // In one register pair, which is what threads exchange.
  __device__ std::uint64_t packed() const {
    return static_cast<std::uint64_t>(__float_as_uint(best)) << 32 | __float_as_uint(sum);
  }
  __device__ static ExpSum unpacked(std::uint64_t bits) {
    ExpSum sum;
    sum.best = __uint_as_float(static_cast<unsigned>(bits >> 32));
    sum.sum = __uint_as_float(static_cast<unsigned>(bits));
    return sum;
  }
};
struct CombineExpSums {
  __device__ std::uint64_t operator()(std::uint64_t x_bits, std::uint64_t y_bits) const {
    ExpSum x = ExpSum::unpacked(x_bits), y = ExpSum::unpacked(y_bits);
    x.raise(y.best);
    y.raise(x.best);
    x.sum += y.sum;
    return x.packed();
  }
};

class LogSumExpReader {
 public:
  // All of the thread's.
  __device__ __forceinline__ void read(const Row& row) {
    const unsigned warp = threadIdx.x / kWarp, end = row.last(warp);
    for (unsigned id = row.first(warp) + threadIdx.x % kWarp * kTogether; id < end;
         id += kFours * kStride) {
      float4 x[kFours];
#pragma unroll
      for (unsigned a = 0; a < kFours; ++a) {
        const unsigned at = id + a * kStride;
        x[a] = at < end ? row.four(at) : float4{kImpossible, kImpossible, kImpossible, kImpossible};
      }
      add(x, id);
    }
  }

  __device__ ExpSum sum() const { return sum_; }
  // 0, which is below all others, where there is no token. 0 is added since -0 is no less than 0.
  __device__ std::uint64_t key() const {
    return id_ == kNone ? 0 : ArgmaxKey::of(sum_.best + 0.0f, id_).key;
  }

 private:
  static constexpr unsigned kFours = 4;
  static constexpr unsigned kNone = 0xffffffffu;

  // Fours that lie kStride apart, the first of which begins with token `id`, which there is.
  __device__ __forceinline__ void add(const float4 (&x)[kFours], unsigned id) {
    float most = kImpossible;
#pragma unroll
    for (unsigned a = 0; a < kFours; ++a) {
      most = max_or_nan(most, max_or_nan(max_or_nan(x[a].x, x[a].y), max_or_nan(x[a].z, x[a].w)));
    }
    if (most > sum_.best || id_ == kNone) {
      id_ = id;
#pragma unroll
      for (unsigned a = kFours; a-- > 0;) {
        const unsigned at = id + a * kStride;
        id_ = x[a].w == most ? at + 3 : id_;
        id_ = x[a].z == most ? at + 2 : id_;
        id_ = x[a].y == most ? at + 1 : id_;
        id_ = x[a].x == most ? at : id_;
      }
    }
    sum_.raise(most);
    if (sum_.best == kImpossible) return;
    float sums[kFours];
#pragma unroll
    for (unsigned a = 0; a < kFours; ++a) {
      sums[a] = (exp_of(x[a].x) + exp_of(x[a].y)) + (exp_of(x[a].z) + exp_of(x[a].w));
    }
    sum_.sum += (sums[0] + sums[1]) + (sums[2] + sums[3]);
  }
  __device__ __forceinline__ float exp_of(float x) const { return expf(x - sum_.best); }

  ExpSum sum_;
  unsigned id_ = kNone;
};

}  // namespace cuda
}  // namespace minserve
