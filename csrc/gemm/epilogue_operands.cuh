// A tile's part of the GEMM's vectors (biases, norm weights, a cell's parameters) in shared memory.
//
// Like the first weights it is requested before the previous kernel has ended. The last step was
// the last to read it, so a tile would otherwise wait for memory when its products are done. A
// layer of four GEMMs takes about a microsecond less.
#pragma once

#include "../arch/ptx.cuh"
#include "args.h"

namespace minserve {
namespace cuda {

template <int kParameters, int kChannels>
struct CellParameters {
  float parameter[kChannels];
  static_assert(kParameters == 1, "GemmArgs has one");
};
template <int kChannels>
struct CellParameters<0, kChannels> {};

template <int kGates, int kChannels, int kParameters = 0>
struct alignas(16) EpilogueOperands : CellParameters<kParameters, kChannels> {
  bf16 bias[kGates][kChannels];
  bf16 norm_weight[kChannels], ahead[kChannels];  // of residual GEMMs

  // By so many threads. They are there when each has waited for its copies; what the GEMM has none
  // of, and channels past its last, are not written.
  __device__ __forceinline__ void ask(const GemmArgs& args, int first_channel, int thread,
                                      int threads) {
    constexpr int kEight = 8;  // bfloat16 numbers of a copy
    static_assert(kChannels % kEight == 0, "whole copies");
    for (int own = thread * kEight; own < kChannels; own += threads * kEight) {
      const std::int64_t channel = first_channel + own;
      if (channel >= args.channels) return;
      const auto copy = [](bf16* to, const void* from, std::int64_t at) {
        if (from) start_copy_of_16(to, static_cast<const bf16*>(from) + at);
      };
#pragma unroll
      for (int gate = 0; gate < kGates; ++gate) {
        copy(bias[gate] + own, args.bias, gate * args.channels + channel);
      }
      if constexpr (kParameters > 0) {
        for (int part = 0; args.parameter && part < kEight; part += 4) {
          start_copy_of_16(this->parameter + own + part, args.parameter + channel + part);
        }
      }
      if constexpr (kGates == 1) {
        copy(norm_weight + own, args.norm_weight, channel);
        copy(ahead + own, args.ahead, channel);
      }
    }
  }
};

}  // namespace cuda
}  // namespace minserve
