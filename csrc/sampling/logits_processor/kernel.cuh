// Logits processors on a GPU. Blocks take pieces of rows; most rows have nothing to process.
#pragma once

#include "../../arch/ptx.cuh"
#include "logits_processor.h"

namespace minserve {
namespace cuda {

constexpr int kLogitsProcessorThreads = 256;
constexpr std::int64_t kPiece = 4096;  // tokens

MS_HD std::int64_t pieces_of(std::int64_t vocab) {
  return (vocab + kPiece - 1) / kPiece;
}

__global__ void __launch_bounds__(kLogitsProcessorThreads)
    logits_processor_kernel(const __grid_constant__ LogitsProcessorArgs args) {
  const std::int64_t pieces = pieces_of(args.vocab), begin = blockIdx.x % pieces * kPiece;
  const std::int64_t end = begin + kPiece < args.vocab ? begin + kPiece : args.vocab;
  pdl_launch_dependents();
  wait_for_previous_kernel();
  process_piece(args, blockIdx.x / pieces, begin, end, threadIdx.x, kLogitsProcessorThreads,
                [] { __syncthreads(); });
}

}  // namespace cuda
}  // namespace minserve
