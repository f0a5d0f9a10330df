// The functions of csrc/arch/ptx.cuh, for the emulator's threads.
#pragma once

#include "cuda.h"

namespace minserve {
namespace cuda {

inline float fast_exp2(float x) {
  return x < -126.0f ? 0.0f : std::exp2(x);
}
inline float fast_reciprocal(float x) {
  return 1.0f / x;
}
inline void add_shared(unsigned* shared, unsigned bytes, unsigned more) {
  if (bytes % sizeof more) std::abort();
  atomicAdd(shared + bytes / sizeof more, more);
}
inline unsigned take_shared(unsigned& shared) {
  return atomicAdd(&shared, 1u);
}
inline void add_shared_if(bool wanted, unsigned* shared, unsigned bytes, unsigned more) {
  if (wanted) add_shared(shared, bytes, more);
}
inline void note_detour() {
  emulator::note_detour();
}
inline void look_again() {
  emulator::yield();
}
inline float min_or_nan(float x, float y) {
  return x != x || y != y ? NAN : x < y ? x : y;
}
inline float max_or_nan(float x, float y) {
  return x != x || y != y ? NAN : x > y ? x : y;
}

inline void start_copy_of_16(void* shared, const void* global) {
  emulator::start_copy(shared, global, 16);
}
template <int kBytes>
inline void start_copy(void* shared, const void* global) {
  static_assert(kBytes == 4 || kBytes == 8, "there is no other");
  emulator::start_copy(shared, global, kBytes);
}
inline void wait_for_copies() {
  emulator::wait_for_copies();
}
inline void end_group_of_copies() {
  emulator::end_group_of_copies();
}
template <int kUnderWay>
inline void wait_for_groups_but() {
  emulator::wait_for_groups_but(kUnderWay);
}

inline unsigned long long load_relaxed(const void* at) {
  unsigned long long bits;
  emulator::load_word(at, &bits, sizeof bits);
  return bits;
}
inline void store_relaxed(void* at, unsigned long long bits) {
  emulator::store_word(at, &bits, sizeof bits);
}
inline void load_relaxed(const void* at, unsigned long long& low, unsigned long long& high) {
  unsigned long long bits[2];
  emulator::load_word(at, bits, sizeof bits);
  low = bits[0], high = bits[1];
}
inline void store_relaxed(void* at, unsigned long long low, unsigned long long high) {
  const unsigned long long bits[2] = {low, high};
  emulator::store_word(at, bits, sizeof bits);
}

inline uint4 load_relaxed_16(const void* at) {
  uint4 words;
  emulator::load_word(at, &words, sizeof words);
  return words;
}
inline void store_release(void* at, unsigned long long bits) {
  emulator::store_word(at, &bits, sizeof bits, true);
}
inline unsigned long long load_acquire(const void* at) {
  return load_relaxed(at);
}

template <int kThreads>
inline void barrier_sync(int number) {
  emulator::named_barrier(number, kThreads);
}

inline void pdl_launch_dependents() {
  emulator::pdl_launch_dependents();
}
inline void wait_for_previous_kernel() {
  emulator::wait_for_previous_kernel();
}

// Blocks are alone here.
inline unsigned blocks_of_cluster() {
  return 1;
}
inline unsigned rank_in_cluster() {
  return 0;
}
inline void arrive_at_cluster() {
  std::abort();
}
inline void publish_to_cluster() {
  std::abort();
}
inline void wait_for_cluster() {
  std::abort();
}
inline void store_in_block(unsigned, void*, const uint4&) {
  std::abort();
}
inline void store_in_block(unsigned, void*, unsigned long long) {
  std::abort();
}
inline unsigned load_from_block(unsigned, const unsigned*) {
  std::abort();
}

inline void forget_derived(uint4&) {}

}  // namespace cuda
}  // namespace minserve
