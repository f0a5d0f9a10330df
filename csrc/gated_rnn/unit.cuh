// A unit's state and pre-activations in memory, for threads that have one unit each.
#pragma once

#include "cell.h"

namespace minserve {
namespace cuda {

__device__ __forceinline__ void load_state(GruUnit<float>& unit, const GatedRnnArgs& args,
                                           std::int64_t slot, std::int64_t c) {
  unit.h = args.hidden.data[slot * args.hidden.stride + c];
}
__device__ __forceinline__ void load_state(LstmUnit<float>& unit, const GatedRnnArgs& args,
                                           std::int64_t slot, std::int64_t c) {
  unit.h = args.hidden.data[slot * args.hidden.stride + c];
  unit.c = args.cell.data[slot * args.cell.stride + c];
}
__device__ __forceinline__ void store_state(const GruUnit<float>& unit, const GatedRnnArgs& args,
                                            std::int64_t slot, std::int64_t c) {
  args.hidden.data[slot * args.hidden.stride + c] = unit.h;
}
__device__ __forceinline__ void store_state(const LstmUnit<float>& unit, const GatedRnnArgs& args,
                                            std::int64_t slot, std::int64_t c) {
  args.hidden.data[slot * args.hidden.stride + c] = unit.h;
  args.cell.data[slot * args.cell.stride + c] = unit.c;
}

// A unit's gates in a row of pre-activations.
template <class T, int kGates>
__device__ __forceinline__ void load_gates(const Stream& stream, std::int64_t row,
                                           std::int64_t units, std::int64_t c,
                                           float (&gates)[kGates]) {
  const T* const at = static_cast<const T*>(stream.data) + row * stream.stride + c;
#pragma unroll
  for (int gate = 0; gate < kGates; ++gate) gates[gate] = to_lane(at[gate * units]);
}

__device__ __forceinline__ float gate_bias(const GatedRnnArgs& args, std::int64_t at, float) {
  return args.bias.data ? static_cast<const float*>(args.bias.data)[at] : 0.0f;
}
template <class T>
__device__ __forceinline__ float gate_bias(const GatedRnnArgs& args, std::int64_t at, T) {
  if (!args.bias.data || args.bias.is_float) return gate_bias(args, at, 0.0f);
  return to_lane(static_cast<const T*>(args.bias.data)[at]);
}

}  // namespace cuda
}  // namespace minserve
