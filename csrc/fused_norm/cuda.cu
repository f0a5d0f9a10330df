// The launches of the kernels between two library products.
#include "../core/launch.cuh"
#include "../cells/dispatch.h"
#include "kernel.cuh"

namespace minserve {
namespace cuda {

namespace {

Grid grid_of_rows(const NormedArgs& args, unsigned threads) {
  if (args.rows > 2147483647LL) throw std::runtime_error("minserve: too many rows for one launch");
  return {dim3(static_cast<unsigned>(args.rows)), threads, static_cast<int>(sizeof(Block::Shared))};
}

template <template <class> class CellOf>
void step(CellTag<CellOf>, const NormedArgs& args, cudaStream_t stream) {
  const Grid grid = grid_of_rows(args, normed_threads(args, 1));
  if (args.linear_candidate || !args.normalize_gates) {
    const AnyOptions options{args.linear_candidate, args.normalize_gates};
    return launch_early<&normed_step_kernel<CellOf, AnyOptions>>(grid, stream, "normed step", args,
                                                                 options);
  }
  launch_early<&normed_step_kernel<CellOf, UsualOptions>>(grid, stream, "normed step", args,
                                                          UsualOptions{});
}

}  // namespace

void rms_norm(const NormedArgs& args, int device, void* stream) {
  const DeviceGuard guard(device);
  launch_early<&rms_norm_kernel>(grid_of_rows(args, normed_threads(args, 1)),
                                 static_cast<cudaStream_t>(stream), "rms norm", args);
}

void normed_gelu(const NormedArgs& args, int device, void* stream) {
  const DeviceGuard guard(device);
  const unsigned threads = gelu_threads(args, multiprocessors(device));
  launch_early<&normed_gelu_kernel>(grid_of_rows(args, threads), static_cast<cudaStream_t>(stream),
                                    "normed gelu", args);
}

void normed_step(const NormedArgs& args, CellKind cell, int device, void* stream) {
  const DeviceGuard guard(device);
  const cudaStream_t on = static_cast<cudaStream_t>(stream);
  with_cell<NormedCells>(cell, [&](auto tag) { step(tag, args, on); });
}

}  // namespace cuda
}  // namespace minserve
