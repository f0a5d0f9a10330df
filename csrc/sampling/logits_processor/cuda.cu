// Launching adjust_: one block for each piece of each row.
#include "../../core/launch.cuh"
#include "kernel.cuh"

namespace minserve {
namespace cuda {

void process_logits(const LogitsProcessorArgs& args, int device, void* stream) {
  const DeviceGuard guard(device);
  const std::int64_t blocks = args.rows * pieces_of(args.vocab);
  if (blocks > 2147483647LL) throw std::runtime_error("minserve: too many logits for one launch");
  const Grid grid = {dim3(static_cast<unsigned>(blocks)), kLogitsProcessorThreads};
  launch_early<&logits_processor_kernel>(grid, static_cast<cudaStream_t>(stream),
                                         "logits processor", args);
}

}  // namespace cuda
}  // namespace minserve
