// Adjusting logits on a GPU: blocks take pieces of rows, most of which have nothing to adjust.
#include "../common/device.cuh"
#include "../common/kernels.h"
#include "../common/launch.cuh"
#include "adjust.h"

namespace minserve {
namespace cuda {
namespace {

constexpr int kAdjustThreads = 256;
constexpr std::int64_t kPiece = 4096;  // tokens

__global__ void __launch_bounds__(kAdjustThreads)
    adjust_kernel(const __grid_constant__ AdjustArgs args) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const std::int64_t begin = blockIdx.y * kPiece;
  const std::int64_t end = begin + kPiece < args.vocab ? begin + kPiece : args.vocab;
  adjust_piece(args, blockIdx.x, begin, end, threadIdx.x, kAdjustThreads, [] { __syncthreads(); });
}

}  // namespace

void adjust(const AdjustArgs& args, int device, void* stream) {
  const DeviceGuard guard(device);
  const std::int64_t pieces = (args.vocab + kPiece - 1) / kPiece;
  if (args.rows > 2147483647LL || pieces > 65535)
    throw std::runtime_error("minserve: too many logits for one launch");
  const Grid grid = {dim3(static_cast<unsigned>(args.rows), static_cast<unsigned>(pieces)),
                     kAdjustThreads};
  launch_early<&adjust_kernel>(grid, static_cast<cudaStream_t>(stream), "adjust", args);
}

}  // namespace cuda
}  // namespace minserve
