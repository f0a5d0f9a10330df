// The state of a row that a warp samples for. All of it is read before the token is known.
#pragma once

#include "../core/reduce/block_reduce.cuh"
#include "sample.h"

namespace minserve {
namespace cuda {

class WarpRow {
 public:
  __device__ __forceinline__ WarpRow(const SampleArgs& args, std::int64_t r)
      : args_(args),
        r_(r),
        state_(args, r),
        stop_ids_(args.stop_ids + r * args.stops),
        stop_id_(lane() < args.stops ? stop_ids_[lane()] : -1) {}

  __device__ std::int64_t position() const { return state_.position; }

  // All lanes have the token.
  __device__ __forceinline__ void move_on(std::int32_t token) const {
    bool stops = stop_id_ == token;
#pragma unroll 1
    for (std::int64_t s = lane() + kWarp; s < args_.stops; s += kWarp) {
      stops |= stop_ids_[s] == token;
    }
    stops = __any_sync(kAll, stops);
    if (lane() == 0) minserve::move_on(args_, r_, state_, token, stops);
  }

 private:
  __device__ static unsigned lane() { return threadIdx.x % kWarp; }

  const SampleArgs& args_;
  const std::int64_t r_;
  const RowState state_;
  const std::int32_t* const stop_ids_;
  const std::int32_t stop_id_;
};

}  // namespace cuda
}  // namespace minserve
