// Tile configs of the GEMM kernels. No CUDA in here, so that heuristics can be tested anywhere.
#pragma once

namespace minserve {

enum class TileConfig {
  tokens_8,  // 64 rows of weights (or of channels, with all gates) by so many tokens
  tokens_16,
  tokens_32,
  tokens_64,         // one block to a multiprocessor, with a longer ring
  persistent_64_32,  // persistent_kernel.cuh: rows of weights by tokens
  persistent_64_64,
  persistent_128_64,
  persistent_192_64,
  persistent_192_96,
  persistent_128_128,
  persistent_192_128,
  persistent_256_128,
};

struct GemmConfig {
  TileConfig tile;
  int split_k;             // blocks of a cluster, each of which has a part of the inputs
  int serial_split_k = 1;  // parts that each block takes one after the other
};

}  // namespace minserve
