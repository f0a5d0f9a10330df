// Launching the kernels: how many threads take a row, and where they keep it.
#include "../core/launch.cuh"
#include "argmax.cuh"
#include "kernel.cuh"
#include "warp_kernel.cuh"
#include "streaming_kernel.cuh"

namespace minserve {
namespace cuda {
namespace {

// What the current device gives to a kernel.
struct Room {
  int device = -1;
  int shared_bytes = 0;  // that a block may have
  int processors = 0;
  bool clusters = false;
};

template <auto kKernel>
const Room& room() {
  static thread_local Room found;
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  if (device != found.device) {
    const auto ask = [&](int& value, cudaDeviceAttr attribute) {
      check(cudaDeviceGetAttribute(&value, attribute, device), "an attribute of the device");
    };
    int clusters = 0;
    ask(found.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin);
    ask(found.processors, cudaDevAttrMultiProcessorCount);
    ask(clusters, cudaDevAttrClusterLaunch);
    found.clusters = clusters && waits_for_previous<kKernel>();  // code for Hopper and later
    check(cudaFuncSetAttribute(reinterpret_cast<const void*>(kKernel),
                               cudaFuncAttributeMaxDynamicSharedMemorySize, found.shared_bytes),
          "shared memory of a sampling kernel");
    found.device = device;
  }
  return found;
}

// `blocks` of so many threads take a row. False, and nothing is launched, where they cannot.
template <bool kStored, int kMostThreads, int kBlocks>
bool launch(const SampleArgs& args, unsigned blocks, cudaStream_t stream) {
  constexpr auto kKernel = &sample_kernel<kStored, kMostThreads, kBlocks>;
  const std::int64_t piece = piece_of_row(args.vocab, blocks);
  const unsigned threads = row_threads(piece, kMostThreads);
  const std::int64_t bytes =
      sample_shared_bytes(threads) + (kStored ? stored_row_bytes(args.vocab, blocks) : 0);
  const Room& here = room<kKernel>();
  if (bytes > here.shared_bytes || (blocks > 1 && !here.clusters)) return false;
  const Grid grid = {dim3(static_cast<unsigned>(args.rows) * blocks), threads,
                     static_cast<int>(bytes), blocks};
  launch_early<kKernel>(grid, stream, "sampling", args);
  return true;
}

// Rows in shared memory: of as many blocks as there are multiprocessors for all of them, or of more
// where fewer have no room. False where there is none.
bool launch_stored(const SampleArgs& args, cudaStream_t stream) {
  const int processors = room<&sample_kernel<true, 1024, 1>>().processors;
  unsigned blocks = Cluster::kMostBlocks;
  while (blocks > 1 && args.rows * blocks > processors) blocks /= 2;
  for (; blocks <= Cluster::kMostBlocks; blocks *= 2) {
    if (blocks <= 2 ? launch<true, 1024, 1>(args, blocks, stream)
                    : launch<true, 512, 2>(args, blocks, stream)) {
      return true;
    }
  }
  return false;
}

// One small block a row, kBlocks of a multiprocessor where its shared memory has room for them.
template <int kThreads, int kBlocks>
void launch_streaming(const SampleArgs& args, cudaStream_t stream) {
  constexpr auto kBytes = static_cast<int>(streaming_shared_bytes<kThreads>());
  static_assert(kBytes <= 48 * 1024, "what every GPU gives to a block that does not ask for more");
  const Grid grid = {dim3(static_cast<unsigned>(args.rows)), kThreads, kBytes};
  launch_early<&streaming_kernel<kThreads, kBlocks>>(grid, stream, "sampling", args);
}
// Its rows without top_k are all sampled by rejection.
static_assert(streaming_most_vocab(512) == kMostRejectionVocab && kMostSections == 512,
              "and have room for it");
// False where rows are too few or too long for it.
bool launch_streaming(const SampleArgs& args, cudaStream_t stream) {
  if (args.rows <= room<&sample_kernel<true, 1024, 1>>().processors) return false;
  if (args.vocab > streaming_most_vocab(512)) return false;
  // Larger blocks read fewer rows at a time, which stay in the L2 cache; smaller ones have less to
  // do that does not depend on the row's length.
  if (args.vocab > 8192) {
    launch_streaming<512, 2>(args, stream);
  } else {
    launch_streaming<256, 4>(args, stream);
  }
  return true;
}

// A warp a row, so many tokens a lane. False where a row has more.
template <unsigned kTokens>
bool launch_warps(const SampleArgs& args, cudaStream_t stream) {
  if (args.vocab > kWarp * kTokens) return false;
  constexpr std::int64_t kRows = kWarpKernelThreads / kWarp;
  const Grid grid = {dim3(static_cast<unsigned>((args.rows + kRows - 1) / kRows)),
                     kWarpKernelThreads};
  launch_early<&warp_kernel<kTokens>>(grid, stream, "sampling", args);
  return true;
}
static_assert(kWarp * 32 + 1 == kLeastRejectionVocab,
              "the warp kernel has no row that is sampled by rejection");
bool launch_warps(const SampleArgs& args, cudaStream_t stream) {
  return launch_warps<4>(args, stream) || launch_warps<8>(args, stream) ||
         launch_warps<9>(args, stream) ||  // bytes and some special tokens
         launch_warps<16>(args, stream) || launch_warps<32>(args, stream);
}

}  // namespace

void sample(const SampleArgs& args, int device, void* stream_handle) {
  const DeviceGuard guard(device);
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_handle);
  if (args.rows > 2147483647LL / Cluster::kMostBlocks)
    throw std::runtime_error("minserve: too many rows for one launch");
  if (launch_warps(args, stream)) return;
  if (launch_streaming(args, stream)) return;
  if (launch_stored(args, stream)) return;
  // From memory, which others read while one computes.
  launch<false, 512, 2>(args, 1, stream);
}

void sample_argmax(const SampleArgs& args, int device, void* stream) {
  const DeviceGuard guard(device);
  constexpr std::int64_t kRows = kArgmaxThreads / kWarp;
  const Grid grid = {dim3(static_cast<unsigned>((args.rows + kRows - 1) / kRows)), kArgmaxThreads};
  launch_early<&argmax_kernel>(grid, static_cast<cudaStream_t>(stream), "sampling", args);
}

}  // namespace cuda
}  // namespace minserve
