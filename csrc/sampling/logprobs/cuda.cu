// Launching target_logprobs and report_logprobs_: one block for each row.
#include "../../core/launch.cuh"
#include "kernel.cuh"

namespace minserve {
namespace cuda {

void logprobs(const LogprobsArgs& args, int device, void* stream_handle) {
  const DeviceGuard guard(device);
  if (args.rows > 2147483647LL) throw std::runtime_error("minserve: too many rows for one launch");
  const Grid grid = {dim3(static_cast<unsigned>(args.rows)),
                     row_threads(args.vocab, LogprobsShared::kMostThreads),
                     static_cast<int>(sizeof(LogprobsShared))};
  launch_early<&logprobs_kernel>(grid, static_cast<cudaStream_t>(stream_handle), "target_logprobs",
                                 args);
}

}  // namespace cuda
}  // namespace minserve
