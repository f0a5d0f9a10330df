// The exchange of activations between blocks, without a barrier or a fence: each word tells by its
// value whether it has been written.
//
// A word with all bits set is not written yet: as two bfloat16 it is NaNs that no arithmetic makes
// (a GPU's own have a sign of zero). Readers poll until every word that they need has been written.
// A step uses one of two sets of words and clears the other, which nobody reads before the next
// kernel.
//
// A unit's values are a line of their own, or half of one, written at once: a line into which many
// blocks write while all look at it goes back and forth for each of them.
#pragma once

#include "../arch/ptx.cuh"
#include "smem_layout.cuh"

namespace minserve {
namespace cuda {
namespace persistent {

constexpr unsigned kNotWritten = 0xffffffffu;

__device__ __forceinline__ uint4 load_words(const void* at) {
  uint4 words;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "l"(at)
               : "memory");
  return words;
}
__device__ __forceinline__ void store_word(void* at, unsigned word) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(at), "r"(word) : "memory");
}
__device__ __forceinline__ bool written(const uint4& words) {
  return words.x != kNotWritten && words.y != kNotWritten && words.z != kNotWritten &&
         words.w != kNotWritten;
}

// Numbers, which arithmetic has made: none has all bits set.
__device__ __forceinline__ bool written(float number) {
  return __float_as_uint(number) != kNotWritten;
}
__device__ __forceinline__ bool written(float2 numbers) {
  return written(numbers.x) && written(numbers.y);
}
template <class Number>
__device__ __forceinline__ Number missing_number();
template <>
__device__ __forceinline__ float missing_number<float>() {
  return __uint_as_float(kNotWritten);
}
template <>
__device__ __forceinline__ float2 missing_number<float2>() {
  return {__uint_as_float(kNotWritten), __uint_as_float(kNotWritten)};
}
__device__ __forceinline__ void load_number(float& number, const void* at) {
  asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(number) : "l"(at) : "memory");
}
__device__ __forceinline__ void load_number(float2& numbers, const void* at) {
  asm volatile("ld.relaxed.gpu.global.v2.f32 {%0, %1}, [%2];"
               : "=f"(numbers.x), "=f"(numbers.y)
               : "l"(at)
               : "memory");
}

__device__ __forceinline__ void clear(const PersistentDecodeArgs& args, unsigned char* set) {
  for (std::int64_t at = (blockIdx.x * kMmaWarps * 32 + threadIdx.x) * 16ll; at < args.set_bytes;
       at += gridDim.x * kMmaWarps * 32 * 16ll) {
    *reinterpret_cast<uint4*>(set + at) =
        make_uint4(kNotWritten, kNotWritten, kNotWritten, kNotWritten);
  }
}

}  // namespace persistent
}  // namespace cuda
}  // namespace minserve
