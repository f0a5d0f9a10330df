// Small kernels with one defect each, to see that the emulator tells of it; and some with none.
#include "emulator/cuda.h"

#include <map>

#include "arch/ptx.cuh"

namespace minserve {
namespace cuda {
namespace {

constexpr unsigned kBlock = 64, kBlocks = 2;

struct Arrays {
  const float* input;  // [kBlocks * kBlock * 4]
  float* output;       // the same
  char* words;         // two words of 16 bytes
  float* word(int n) const { return reinterpret_cast<float*>(words + 16 * n); }
};
struct Shared {
  float values[kBlock];
  uint4 stage[kBlock];
};
using Kernel = void (*)(const Arrays&);

Shared& shared() {
  return *reinterpret_cast<Shared*>(memory);
}
unsigned neighbour() {  // in the other warp
  return (threadIdx.x + 32) % kBlock;
}
unsigned index_in_grid() {
  return blockIdx.x * kBlock + threadIdx.x;
}
bool first_warp() {
  return threadIdx.x < 32;
}
void start_own_copy(const Arrays& arrays) {
  start_copy_of_16(&shared().stage[threadIdx.x], arrays.input + 4 * index_in_grid());
}

// Every thread writes what its neighbour has staged for it; the barriers are those asked for.
template <bool kWaits, bool kMeets>
void exchange_staged(const Arrays& arrays) {
  start_own_copy(arrays);
  if (kWaits) wait_for_copies();
  if (kMeets) barrier_sync<kBlock>(1);
  arrays.output[index_in_grid()] = __uint_as_float(shared().stage[neighbour()].x);
}

void values_without_barrier(const Arrays& arrays) {
  shared().values[threadIdx.x] = 1.0f;
  arrays.output[index_in_grid()] = shared().values[neighbour()];
}
// A shuffle does not order memory, also not within its warp.
void values_after_shuffle(const Arrays& arrays) {
  shared().values[threadIdx.x] = 1.0f;
  __shfl_sync(0xffffffffu, 0, 0);
  arrays.output[index_in_grid()] = shared().values[threadIdx.x ^ 1];
}
void copy_over_what_is_read(const Arrays& arrays) {
  shared().stage[threadIdx.x] = {1, 2, 3, 4};
  __syncthreads();
  arrays.output[index_in_grid()] = __uint_as_float(shared().stage[neighbour()].x);
  start_own_copy(arrays);
}
void barrier_with_a_thread_gone(const Arrays&) {
  if (threadIdx.x != 5) barrier_sync<kBlock>(3);
}
void barrier_of_two_sizes(const Arrays&) {
  if (first_warp()) {
    barrier_sync<kBlock>(4);
  } else {
    barrier_sync<32>(4);
  }
}
void lanes_at_other_calls(const Arrays&) {
  if (threadIdx.x % 2) {
    __syncwarp();
  } else {
    __ballot_sync(0xffffffffu, true);
  }
}
void word_that_nobody_stores(const Arrays& arrays) {
  while (load_relaxed(arrays.word(1)) == ~0ull) __nanosleep(20);
}

void shared_memory_not_asked_for(const Arrays&) {
  shared().stage[kBlock + threadIdx.x] = {1, 2, 3, 4};
}
void output_past_its_end(const Arrays& arrays) {
  arrays.output[4 * index_in_grid() + 4] = 1.0f;
}
void input_written(const Arrays& arrays) {
  const_cast<float*>(arrays.input)[0] = 1.0f;
}
void copy_not_aligned(const Arrays& arrays) {
  start_copy_of_16(&shared().stage[threadIdx.x], arrays.input + 1);
}

// Block 0 hands a value on to block 1: as one word, which is right, or with a flag beside it.
void value_as_its_own_flag(const Arrays& arrays) {
  if (threadIdx.x != 0) return;
  if (blockIdx.x == 0) {
    store_relaxed(arrays.word(0), 7);
  } else {
    while (load_relaxed(arrays.word(0)) != 7) __nanosleep(20);
  }
}
void value_and_flag_in_two_words(const Arrays& arrays) {
  if (threadIdx.x != 0) return;
  if (blockIdx.x == 0) {
    store_relaxed(arrays.word(0), 7);
    store_relaxed(arrays.word(1), 1);
  } else {
    while (load_relaxed(arrays.word(1)) != 1) __nanosleep(20);
    if (load_relaxed(arrays.word(0)) != 7) emulator::fail("the value came after its flag");
  }
}
void plain_value_and_flag(const Arrays& arrays) {
  if (threadIdx.x != 0) return;
  if (blockIdx.x == 0) {
    arrays.output[0] = 7.0f;
    store_relaxed(arrays.word(1), 1);
  } else {
    while (load_relaxed(arrays.word(1)) != 1) __nanosleep(20);
    arrays.output[kBlock] = arrays.output[0];
  }
}

// As the second of two kernels that overlap.
template <bool kWaits>
void words_of_the_kernel_before(const Arrays& arrays) {
  if (kWaits) wait_for_previous_kernel();
  load_relaxed(arrays.word(0));
}
void clear(const Arrays& arrays) {
  pdl_launch_dependents();
  if (blockIdx.x == 0 && threadIdx.x < 4) arrays.word(0)[threadIdx.x] = 0.0f;
}

#define NAMED(kernel) {#kernel, &kernel}
const std::map<std::string, Kernel> kernels = {
    {"staged_and_met", &exchange_staged<true, true>},
    {"staged_not_waited_for", &exchange_staged<false, true>},
    {"staged_not_met", &exchange_staged<true, false>},
    NAMED(values_without_barrier),
    NAMED(values_after_shuffle),
    NAMED(copy_over_what_is_read),
    NAMED(barrier_with_a_thread_gone),
    NAMED(barrier_of_two_sizes),
    NAMED(lanes_at_other_calls),
    NAMED(word_that_nobody_stores),
    NAMED(shared_memory_not_asked_for),
    NAMED(output_past_its_end),
    NAMED(input_written),
    NAMED(copy_not_aligned),
    NAMED(value_as_its_own_flag),
    NAMED(value_and_flag_in_two_words),
    NAMED(plain_value_and_flag),
    {"kernel_before_waited_for", &words_of_the_kernel_before<true>},
    {"kernel_before_not_waited_for", &words_of_the_kernel_before<false>},
};
#undef NAMED

void run(Kernel kernel, unsigned seed) {
  emulator::free_all();
  constexpr std::size_t kBytes = kBlocks * kBlock * 16;
  const Arrays arrays = {
      static_cast<const float*>(emulator::allocate("input", kBytes, emulator::Use::read)),
      static_cast<float*>(emulator::allocate("output", kBytes, emulator::Use::write)),
      static_cast<char*>(emulator::allocate("words", 32, emulator::Use::write))};
  emulator::launch({"clear", kBlocks, 32, 0, false, [=] { clear(arrays); }});
  emulator::launch(
      {"kernel", kBlocks, kBlock, sizeof(Shared),
       kernel == &words_of_the_kernel_before<true> || kernel == &words_of_the_kernel_before<false>,
       [=] { kernel(arrays); }});
  emulator::run(seed);
}

}  // namespace
}  // namespace cuda
}  // namespace minserve

int main(int count, char** arguments) {
  using namespace minserve::cuda;
  const auto found = count == 2 ? kernels.find(arguments[1]) : kernels.end();
  if (found == kernels.end()) return 2;
  for (unsigned seed = 0; seed < 30; ++seed) run(found->second, seed);
  std::puts("ok");
  return 0;
}
