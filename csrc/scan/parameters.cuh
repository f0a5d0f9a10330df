// What a thread holds of a cell's parameters: those of its channels.
#pragma once

#include <type_traits>

#include "../core/vector_access.cuh"
#include "../cells/gates.h"
#include "args.h"

namespace minserve {
namespace cuda {

template <class Cell, class V, int kVec>
class ChannelParameters {
 public:
  using One = Parameters<V, Cell::kParameters>;

  // From `channel` on, of which `real` exist; with kAligned all do, or none.
  template <bool kAligned>
  __device__ __forceinline__ void load(const ScanArgs& args, std::int64_t channel, int real) {
    if constexpr (Cell::kParameters > 0) {
#pragma unroll
      for (int n = 0; n < Cell::kParameters; ++n) {
        const float* const from = args.parameters[n];
        Channels<float, kVec> all;
        if (kAligned && from && real > 0) all.load(from + channel);
#pragma unroll
        for (int v = 0; v < kVec; ++v) {
          if (!kAligned && from && v < real) {
            of_[v].at[n] = static_cast<V>(from[channel + v]);
          } else {
            of_[v].at[n] = static_cast<V>(all[v]);
          }
        }
      }
    }
  }
  __device__ __forceinline__ const One& operator[](int v) const { return of_[v]; }

 private:
  One of_[kVec];
};

// Whether they lie as load<true> takes them.
template <class Cell, int kVec>
inline bool parameters_aligned(const ScanArgs& args) {
  bool aligned = true;
  for (int n = 0; n < Cell::kParameters; ++n) {
    aligned = aligned && lie_aligned<float, kVec>(args.parameters[n]);
  }
  return aligned;
}

}  // namespace cuda
}  // namespace minserve
