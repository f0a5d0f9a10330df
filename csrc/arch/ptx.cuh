// PTX instructions that CUDA C++ has no name for, each with the reason for using it.
//
// Everything else in the kernels is plain C++ and CUDA. Where MINSERVE_EMULATOR is defined the
// kernels are compiled for the host, and the emulator's threads (tests/csrc) take the GPU's place.
#pragma once

#ifdef MINSERVE_EMULATOR
#include "emulator/device.h"
#else

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace minserve {
namespace cuda {

// --- the special-function unit's own forms: 2 ulp and 1 ulp, subnormals flushed

__device__ __forceinline__ float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float fast_reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// --- what tests count or need, of which nothing is left here

__device__ __forceinline__ void note_detour() {}
// In a loop that waits for what another block writes.
__device__ __forceinline__ void look_again() {}

// --- additions to shared memory, to the word that is so many bytes behind `shared`

__device__ __forceinline__ void add_shared(unsigned* shared, unsigned bytes, unsigned more) {
  const unsigned place = static_cast<unsigned>(__cvta_generic_to_shared(shared)) + bytes;
  asm volatile("red.shared.add.u32 [%0], %1;" ::"r"(place), "r"(more) : "memory");
}
// One more, of less than 2**31; what it was before. (For additions the compiler first counts the
// lanes that come together, which is for nothing where mostly one does.)
__device__ __forceinline__ unsigned take_shared(unsigned& shared) {
  unsigned before;
  asm volatile("atom.shared.inc.u32 %0, [%1], 0x7fffffff;"
               : "=r"(before)
               : "r"(static_cast<unsigned>(__cvta_generic_to_shared(&shared)))
               : "memory");
  return before;
}
__device__ __forceinline__ void add_shared_if(bool wanted, unsigned* shared, unsigned bytes,
                                              unsigned more) {
  const unsigned place = static_cast<unsigned>(__cvta_generic_to_shared(shared)) + bytes;
  asm volatile(
      "{\n.reg .pred wanted;\nsetp.ne.u32 wanted, %2, 0;\n"
      "@wanted red.shared.add.u32 [%0], %1;\n}" ::"r"(place),
      "r"(more), "r"(static_cast<unsigned>(wanted))
      : "memory");
}

// --- min and max that pass NaN on, in one instruction

__device__ __forceinline__ float min_or_nan(float x, float y) {
  float z;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}
__device__ __forceinline__ float max_or_nan(float x, float y) {
  float z;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}

// --- copies from global to shared memory that do not pass registers and are waited for later

// Sixteen bytes, past the L1, whose lines nobody reads again.
__device__ __forceinline__ void start_copy_of_16(void* shared, const void* global) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(
                   static_cast<unsigned>(__cvta_generic_to_shared(shared))),
               "l"(global)
               : "memory");
}
// kBytes: 4 or 8, the element sizes that there is such a copy for.
template <int kBytes>
__device__ __forceinline__ void start_copy(void* shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(
                   static_cast<unsigned>(__cvta_generic_to_shared(shared))),
               "l"(global), "n"(kBytes)
               : "memory");
}
// Waits for this thread's own copies.
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}
// What this thread has started since the last such call is a group, also if it is nothing.
__device__ __forceinline__ void end_group_of_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
// Waits for this thread's groups but the last kUnderWay.
template <int kUnderWay>
__device__ __forceinline__ void wait_for_groups_but() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kUnderWay) : "memory");
}

// --- whole words that other blocks read or write meanwhile: never torn, in no order with others

__device__ __forceinline__ unsigned long long load_relaxed(const void* at) {
  unsigned long long bits;
  asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];" : "=l"(bits) : "l"(at) : "memory");
  return bits;
}
__device__ __forceinline__ void store_relaxed(void* at, unsigned long long bits) {
  asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(at), "l"(bits) : "memory");
}
__device__ __forceinline__ void load_relaxed(const void* at, unsigned long long& low,
                                             unsigned long long& high) {
  asm volatile(
      "{ .reg .b128 word; ld.relaxed.gpu.global.b128 word, [%2]; mov.b128 {%0, %1}, word; }"
      : "=l"(low), "=l"(high)
      : "l"(at)
      : "memory");
}
__device__ __forceinline__ void store_relaxed(void* at, unsigned long long low,
                                              unsigned long long high) {
  asm volatile(
      "{ .reg .b128 word; mov.b128 word, {%1, %2}; st.relaxed.gpu.global.b128 [%0], word; }" ::"l"(
          at),
      "l"(low), "l"(high)
      : "memory");
}

// Sixteen bytes, of which each word of eight is whole.
__device__ __forceinline__ uint4 load_relaxed_16(const void* at) {
  uint4 words;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "l"(at)
               : "memory");
  return words;
}
// A word that publishes: who loads it with load_acquire() sees all that this thread, and those
// whom it has met at a barrier, stored before.
__device__ __forceinline__ void store_release(void* at, unsigned long long bits) {
  asm volatile("st.release.gpu.global.b64 [%0], %1;" ::"l"(at), "l"(bits) : "memory");
}
__device__ __forceinline__ unsigned long long load_acquire(const void* at) {
  unsigned long long bits;
  asm volatile("ld.acquire.gpu.global.b64 %0, [%1];" : "=l"(bits) : "l"(at) : "memory");
  return bits;
}

// --- named barriers, at which kThreads of a block meet, in whole warps; 0 is that of __syncthreads

template <int kThreads>
__device__ __forceinline__ void barrier_sync(int number) {
  asm volatile("barrier.cta.sync %0, %1;" ::"r"(number), "n"(kThreads) : "memory");
}

// --- kernels that overlap with the one before them on the stream, where the GPU can

__device__ __forceinline__ void pdl_launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// --- clusters of blocks, which reach each other's shared memory; before Hopper a block is alone

__device__ __forceinline__ unsigned blocks_of_cluster() {
  unsigned blocks = 1;
#if __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(blocks));
#endif
  return blocks;
}
__device__ __forceinline__ unsigned rank_in_cluster() {
  unsigned rank = 0;
#if __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  return rank;
}
// All threads of the cluster meet. What they wrote before is seen by those who waited if they have
// published it, which is a fence of the whole device: nobody goes on before all of its writes are
// seen everywhere. Blocks that hand each other bytes which barriers count need none.
__device__ __forceinline__ void arrive_at_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void publish_to_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_for_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
// The address of another block's shared variable that lies where `address` is in this one.
__device__ __forceinline__ unsigned address_in_block(unsigned address, unsigned rank) {
  unsigned other = address;
#if __CUDA_ARCH__ >= 900
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(other) : "r"(address), "r"(rank));
#endif
  return other;
}
// Sixteen or eight bytes to another block, to where `shared` lies in this one; a word from there.
__device__ __forceinline__ unsigned place_in_block(unsigned rank, const void* shared) {
  return address_in_block(static_cast<unsigned>(__cvta_generic_to_shared(shared)), rank);
}
__device__ __forceinline__ void store_in_block(unsigned rank, void* shared, const uint4& x) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "st.shared::cluster.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(place_in_block(rank, shared)),
      "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
      : "memory");
#endif
}
__device__ __forceinline__ void store_in_block(unsigned rank, void* shared, unsigned long long x) {
#if __CUDA_ARCH__ >= 900
  asm volatile("st.shared::cluster.b64 [%0], %1;" ::"r"(place_in_block(rank, shared)), "l"(x)
               : "memory");
#endif
}
__device__ __forceinline__ unsigned load_from_block(unsigned rank, const unsigned* shared) {
  unsigned x = 0;
#if __CUDA_ARCH__ >= 900
  asm volatile("ld.shared::cluster.b32 %0, [%1];"
               : "=r"(x)
               : "r"(place_in_block(rank, shared))
               : "memory");
#endif
  return x;
}

// --- the compiler

// What has been made of x so far is not kept in registers: it is cheaper made again.
__device__ __forceinline__ void forget_derived(uint4& x) {
  asm volatile("" : "+r"(x.x), "+r"(x.y), "+r"(x.z), "+r"(x.w));
}

}  // namespace cuda
}  // namespace minserve

#endif
