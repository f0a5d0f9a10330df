// What Hopper (sm_90a) has for matrix products: TMA, mbarriers, thread-block clusters, wgmma.
// Functions that are one instruction are called after it.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "prefetch.cuh"
#include "ptx.cuh"

namespace minserve {
namespace cuda {

__device__ __forceinline__ std::uint32_t shared_address(const void* p) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}

// Keeps an address in a register. The compiler would find it again at every use, from the block's
// number in its cluster, and in a loop over stages that is a third of what is between products.
__device__ __forceinline__ std::uint32_t keep_in_register(std::uint32_t address) {
  asm volatile("" : "+r"(address));
  return address;
}

// --- mbarriers: barriers in shared memory that count arrivals and bytes

__device__ __forceinline__ void mbarrier_init(std::uint64_t& barrier, unsigned arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(&barrier)), "r"(arrivals)
               : "memory");
}
// Makes initialised mbarriers known to TMA and to the cluster.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void mbarrier_arrive(std::uint32_t address) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(address) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive(std::uint64_t& barrier) {
  mbarrier_arrive(shared_address(&barrier));
}
__device__ __forceinline__ void mbarrier_arrive_expect_tx(std::uint32_t address, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(address), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void mbarrier_arrive_expect_tx(std::uint64_t& barrier, unsigned bytes) {
  mbarrier_arrive_expect_tx(shared_address(&barrier), bytes);
}
__device__ __forceinline__ void mbarrier_wait(std::uint32_t address, unsigned parity) {
  asm volatile(
      "{ .reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again; }" ::"r"(address),
      "r"(parity)
      : "memory");
}
__device__ __forceinline__ void mbarrier_wait(std::uint64_t& barrier, unsigned parity) {
  mbarrier_wait(shared_address(&barrier), parity);
}

__device__ __forceinline__ bool mbarrier_test_wait(std::uint32_t address, unsigned parity) {
  unsigned passed;
  asm volatile(
      "{ .reg .pred done;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done; }"
      : "=r"(passed)
      : "r"(address), "r"(parity)
      : "memory");
  return passed != 0;
}
__device__ __forceinline__ bool mbarrier_test_wait(std::uint64_t& barrier, unsigned parity) {
  return mbarrier_test_wait(shared_address(&barrier), parity);
}

// --- TMA: bulk copies between global and shared memory (cp.async.bulk)

// A tile of `map` whose first element is at (column, row), to shared memory; `barrier` counts
// bytes.
__device__ __forceinline__ void tma_load_tile(std::uint32_t to, const CUtensorMap& map, int column,
                                              int row, std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
      "l"(&map), "r"(column), "r"(row), "r"(barrier)
      : "memory");
}
// Neighbouring bytes, a multiple of 16 from addresses that are, to shared memory.
__device__ __forceinline__ void tma_load_bytes(void* to, const void* from, unsigned bytes,
                                               std::uint64_t& barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(&barrier))
      : "memory");
}
// From shared memory to a tile of `map`; what lies outside the matrix is left out.
__device__ __forceinline__ void tma_store_tile(const CUtensorMap& map, int column, int row,
                                               const void* from) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];" ::"l"(
          &map),
      "r"(column), "r"(row), "r"(shared_address(from))
      : "memory");
}
__device__ __forceinline__ void tma_commit_stores() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Until the stores of this thread have read their shared memory.
__device__ __forceinline__ void tma_wait_stores_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
__device__ __forceinline__ void prefetch_tensor_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}
// Makes this block's TMA look at a map that the host has copied to global memory. TMA keeps the
// maps that it has read by their addresses, so it would go on with one that lay there before. To be
// asked in each block of each kernel, by a thread ahead of those that use the map (PTX ISA,
// "membar, fence": fence.proxy.tensormap; CUDA programming guide, "TMA", maps in global memory).
__device__ __forceinline__ void acquire_tensor_map(const void* map) {
  asm volatile("fence.proxy.tensormap::generic.acquire.sys [%0], 128;" ::"l"(map) : "memory");
}

// --- rings of stages in shared memory, from whoever copies to whoever multiplies

// Where its stages and their barriers are, in registers: `full` counts what comes, `empty` who has
// done with it.
template <int kStageBytes>
class RingAddresses {
 public:
  __device__ __forceinline__ RingAddresses(const std::uint64_t* full, const std::uint64_t* empty,
                                           const unsigned char* stages)
      : full_(keep_in_register(shared_address(full))),
        empty_(keep_in_register(shared_address(empty))),
        stages_(keep_in_register(shared_address(stages))) {}

  __device__ __forceinline__ std::uint32_t full(int slot) const { return full_ + slot * 8; }
  __device__ __forceinline__ std::uint32_t empty(int slot) const { return empty_ + slot * 8; }
  __device__ __forceinline__ std::uint32_t stage(int slot) const {
    return stages_ + slot * kStageBytes;
  }

 private:
  std::uint32_t full_, empty_, stages_;
};

// A stage of a ring, and how often the ring has been gone round: the parity of `round` is that of
// the stage's mbarriers (CUTLASS: PipelineState).
template <int kStages>
struct PipelineState {
  int slot = 0, round = 0;
  __device__ __forceinline__ void operator++() {
    if (++slot == kStages) slot = 0, ++round;
  }
};

// --- clusters (the rest is in ptx.cuh)

// Shared memory of this block to that of another, whose barrier counts the bytes.
__device__ __forceinline__ void tma_copy_to_block(unsigned rank, void* to, const void* from,
                                                  unsigned bytes, std::uint64_t& barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, "
      "[%3];" ::"r"(address_in_block(shared_address(to), rank)),
      "r"(shared_address(from)), "r"(bytes), "r"(address_in_block(shared_address(&barrier), rank))
      : "memory");
}
// One arrival at another block's barrier. It says that this thread is done with what others may now
// write to, and publishes nothing: a release to the cluster would be a fence of the whole device.
__device__ __forceinline__ void mbarrier_arrive_in_block(unsigned rank, std::uint64_t& barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(
                   address_in_block(shared_address(&barrier), rank))
               : "memory");
}
// Makes what this thread wrote to shared memory visible to TMA.
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// --- named barriers and registers

// Of `threads`, whole warps, at one of the barriers 1 to 15.
__device__ __forceinline__ void named_barrier_sync(int number, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// All warps of a warpgroup change the number of registers that each of its threads has: producers
// give some away (dec) that consumers take (inc).
template <int kCount>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

// Four squares of 8 x 8 two-byte numbers, transposed: thread t gives the address of row t % 8 of
// square t / 8 in shared memory, and has in each word two neighbours of a column: row 2 (t % 4) in
// its low half, of column t / 4.
__device__ __forceinline__ void store_transposed(std::uint32_t address,
                                                 const unsigned (&words)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
      "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
      : "memory");
}
__device__ __forceinline__ void load_transposed(std::uint32_t address, unsigned (&words)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(address)
               : "memory");
}

// --- wgmma: products of warpgroups

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Keeps the compiler from reading sums before the wait for them: to it they were there already.
template <int kSums>
__device__ __forceinline__ void fence_operands(float (&sums)[kSums]) {
#pragma unroll
  for (int i = 0; i < kSums; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}

// A number that a warp agrees about, which the compiler learns by this: what is made of it is then
// found by the unit that has one register for a warp, where products look for their descriptions.
__device__ __forceinline__ std::uint32_t warp_uniform(std::uint32_t x) {
  return __shfl_sync(0xffffffffu, x, 0);
}

// The matrix descriptor of a tile in shared memory whose rows are 128 bytes of inputs (K-major) as
// tma_load_tile() leaves them with CU_TENSOR_MAP_SWIZZLE_128B; the tile begins at a multiple of
// 1,024 bytes. Fields, by the PTX ISA's table "Matrix descriptor layout" of wgmma; addresses
// and offsets are in units of 16 bytes:
//   bits  0-13  start address
//   bits 16-29  leading dimension byte offset: not used by swizzled K-major layouts; 1
//   bits 32-45  stride dimension byte offset: from eight rows to the next eight, 1,024 bytes; 64
//   bits 49-51  base offset: 0, for tiles begin where the swizzle's pattern does
//   bits 62-63  swizzle mode: 1 is that of 128 bytes
// The next 16 inputs, 32 bytes on, are described by the descriptor plus 2.
__device__ __forceinline__ std::uint64_t smem_descriptor(std::uint32_t address) {
  const std::uint64_t start = (address & 0x3ffffu) >> 4;
  return start | (1ull << 16) | (64ull << 32) | (1ull << 62);
}

}  // namespace cuda
}  // namespace minserve
