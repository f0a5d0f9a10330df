// Launching draws: how many threads take a row, and where they keep it.
#include "../common/kernels.h"
#include "../common/launch.cuh"
#include "kernel.cuh"
#include "small.cuh"

namespace minserve {
namespace cuda {
namespace {

// What the current device gives.
struct Room {
  int device = -1;
  int shared_bytes = 0;
  int processors = 0;
};

template <auto kKernel>
const Room& room() {
  static thread_local Room found;
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  if (device != found.device) {
    check(cudaDeviceGetAttribute(&found.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin,
                                 device),
          "shared memory of a block");
    check(cudaDeviceGetAttribute(&found.processors, cudaDevAttrMultiProcessorCount, device),
          "number of multiprocessors");
    check(cudaFuncSetAttribute(reinterpret_cast<const void*>(kKernel),
                               cudaFuncAttributeMaxDynamicSharedMemorySize, found.shared_bytes),
          "shared memory of a draw");
    found.device = device;
  }
  return found;
}

template <int kMostThreads, int kBlocks>
void launch(const DrawArgs& args, bool copy, cudaStream_t stream) {
  constexpr auto kKernel = &draw_kernel<kMostThreads, kBlocks>;
  const unsigned threads = row_threads(args.vocab, kMostThreads);
  std::int64_t bytes = draw_shared_bytes(threads);
  const std::int64_t with_copy = bytes + draw_copy_bytes(args.vocab);
  const Room& here = room<kKernel>();
  // Every row has a multiprocessor to itself.
  copy = copy && args.rows <= here.processors && with_copy <= here.shared_bytes;
  const Grid grid = {dim3(static_cast<unsigned>(args.rows)), threads,
                     static_cast<int>(copy ? with_copy : bytes)};
  launch_early<kKernel>(grid, stream, "draw", args, copy);
}

template <unsigned kFours>
void launch_small(const DrawArgs& args, cudaStream_t stream) {
  constexpr std::int64_t kRows = kSmallThreads / kWarp;
  const Grid grid = {dim3(static_cast<unsigned>((args.rows + kRows - 1) / kRows)), kSmallThreads};
  launch_early<&small_draw_kernel<kFours>>(grid, stream, "draw", args);
}

// Up to here every row may take all threads of a multiprocessor.
constexpr std::int64_t kFewRows = 128;

}  // namespace

void draw(const DrawArgs& args, int device, void* stream_handle) {
  const DeviceGuard guard(device);
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_handle);
  if (args.rows > 2147483647LL) throw std::runtime_error("minserve: too many rows for one launch");
  if (args.vocab <= small_vocab<1>()) return launch_small<1>(args, stream);
  if (args.vocab <= small_vocab<2>()) return launch_small<2>(args, stream);
  if (args.vocab <= small_vocab<4>()) return launch_small<4>(args, stream);
  if (args.vocab <= small_vocab<8>()) return launch_small<8>(args, stream);
  if (args.rows <= kFewRows) return launch<1024, 1>(args, true, stream);
  // Others read memory while one computes.
  launch<512, 2>(args, false, stream);
}

}  // namespace cuda
}  // namespace minserve
