// The functions of csrc/arch/mma.cuh that kernels here use, for the emulator's threads.
#pragma once

#include "cuda.h"

namespace minserve {
namespace cuda {

// Of lane `lane`'s four rows, which lanes 8 i + row have the addresses of.
template <class Pair>
inline uint4 gather_matrices(const void* shared, const Pair& pair) {
  const std::uint64_t* given = emulator::gather(reinterpret_cast<std::uintptr_t>(shared));
  std::uint64_t rows[32];
  std::copy(given, given + 32, rows);
  unsigned words[4];
  for (unsigned i = 0; i < 4; ++i) words[i] = pair(rows + 8 * i, threadIdx.x % 32);
  return {words[0], words[1], words[2], words[3]};
}
inline unsigned half_at(std::uint64_t row, unsigned column) {
  return reinterpret_cast<const unsigned short*>(row)[column];
}
inline uint4 load_matrices(const void* shared) {
  return gather_matrices(shared, [](const std::uint64_t* rows, unsigned lane) {
    const std::uint64_t row = rows[lane / 4];
    return half_at(row, lane % 4 * 2) | half_at(row, lane % 4 * 2 + 1) << 16;
  });
}
inline uint4 load_transposed_matrices(const void* shared) {
  return gather_matrices(shared, [](const std::uint64_t* rows, unsigned lane) {
    return half_at(rows[lane % 4 * 2], lane / 4) | half_at(rows[lane % 4 * 2 + 1], lane / 4) << 16;
  });
}

inline unsigned short bits_of_half(std::uint64_t words, unsigned half) {
  return static_cast<unsigned short>(words >> 16 * half);
}
inline float bf16_of(std::uint64_t words, unsigned half) {
  return __uint_as_float(static_cast<unsigned>(bits_of_half(words, half)) << 16);
}
inline float f16_of(std::uint64_t words, unsigned half) {
  return __half2float({bits_of_half(words, half)});
}
// Products are summed in doubles, in order of the inputs, and rounded once.
template <class Number>
inline void mma_of(float (&sums)[4], const uint4& w, unsigned x0, unsigned x1,
                   const Number& number) {
  const auto joined = [](unsigned low, unsigned high) {
    return static_cast<std::uint64_t>(high) << 32 | low;
  };
  std::uint64_t first[32], second[32], columns[32];
  const auto take = [](std::uint64_t mine, std::uint64_t (&all)[32]) {
    const std::uint64_t* given = emulator::gather(mine);
    std::copy(given, given + 32, all);
  };
  take(joined(w.x, w.z), first);  // rows 0 to 7: inputs 0 to 7, then 8 to 15
  take(joined(w.y, w.w), second);
  take(joined(x0, x1), columns);
  const unsigned lane = threadIdx.x % 32;
  for (unsigned i = 0; i < 4; ++i) {
    const std::uint64_t* const rows = (i < 2 ? first : second) + lane / 4 * 4;
    const std::uint64_t* const column = columns + (lane % 4 * 2 + i % 2) * 4;
    double sum = static_cast<double>(sums[i]);
    for (unsigned k = 0; k < 16; ++k) {
      const unsigned owner = k % 8 / 2, half = k / 8 * 2 + k % 2;
      sum += static_cast<double>(number(rows[owner], half)) *
             static_cast<double>(number(column[owner], half));
    }
    sums[i] = static_cast<float>(sum);
  }
}
inline void mma_bf16(float (&sums)[4], const uint4& w, unsigned x0, unsigned x1) {
  mma_of(sums, w, x0, x1, bf16_of);
}
inline void mma_f16(float (&sums)[4], const uint4& w, unsigned x0, unsigned x1) {
  mma_of(sums, w, x0, x1, f16_of);
}

}  // namespace cuda
}  // namespace minserve
