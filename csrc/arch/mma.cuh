// ldmatrix and mma.sync: what a warp loads from shared memory at once and what its tensor cores
// multiply at once, 16 rows of weights by eight columns of inputs.
#pragma once

#include <cstdint>

#ifdef MINSERVE_EMULATOR
#include "emulator/mma.h"
#else

namespace minserve {
namespace cuda {

// x stays in a register: what it was made of is forgotten, and it cannot be made again.
__device__ __forceinline__ void made_once(std::uint32_t& x) {
  asm volatile("" : "+r"(x));
}

// Four matrices of 8 rows by 16 bytes; lanes 8 i to 8 i + 7 have the addresses of matrix i's rows.
__device__ __forceinline__ uint4 ldmatrix_x4(std::uint32_t address) {
  uint4 all;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(all.x), "=r"(all.y), "=r"(all.z), "=r"(all.w)
               : "r"(address)
               : "memory");
  return all;
}
// The same, by pointers into shared memory.
__device__ __forceinline__ uint4 load_matrices(const void* shared) {
  return ldmatrix_x4(static_cast<std::uint32_t>(__cvta_generic_to_shared(shared)));
}
// A lane's numbers of each matrix are two neighbours of a column, not of a row.
__device__ __forceinline__ uint4 load_transposed_matrices(const void* shared) {
  uint4 all;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(all.x), "=r"(all.y), "=r"(all.z), "=r"(all.w)
               : "r"(static_cast<std::uint32_t>(__cvta_generic_to_shared(shared)))
               : "memory");
  return all;
}
__device__ __forceinline__ uint4 load_shared(std::uint32_t address) {
  uint4 all;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(all.x), "=r"(all.y), "=r"(all.z), "=r"(all.w)
               : "r"(address)
               : "memory");
  return all;
}
__device__ __forceinline__ float load_shared_float(std::uint32_t address) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
  return x;
}

__device__ __forceinline__ void store_shared_float(std::uint32_t address, float x) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(x) : "memory");
}

// 16 rows of weights times eight columns of 16 inputs in bfloat16: rows 0 to 7 and 8 to 15 of the
// first eight inputs, then of the others.
__device__ __forceinline__ void mma_bf16(float (&sums)[4], const uint4& w, unsigned x0,
                                         unsigned x1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(w.x), "r"(w.y), "r"(w.z), "r"(w.w), "r"(x0), "r"(x1));
}

// The same in float16.
__device__ __forceinline__ void mma_f16(float (&sums)[4], const uint4& w, unsigned x0,
                                        unsigned x1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(w.x), "r"(w.y), "r"(w.z), "r"(w.w), "r"(x0), "r"(x1));
}

// 16 rows of 32 8-bit weights times eight columns of inputs.
__device__ __forceinline__ void mma_8_bit(int (&sums)[4], const uint4& w, unsigned x0,
                                          unsigned x1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+r"(sums[0]), "+r"(sums[1]), "+r"(sums[2]), "+r"(sums[3])
      : "r"(w.x), "r"(w.y), "r"(w.z), "r"(w.w), "r"(x0), "r"(x1));
}
__device__ __forceinline__ void mma_8_bit(float (&sums)[4], const uint4& w, unsigned x0,
                                          unsigned x1) {
  asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(w.x), "r"(w.y), "r"(w.z), "r"(w.w), "r"(x0), "r"(x1));
}

}  // namespace cuda
}  // namespace minserve

#endif
