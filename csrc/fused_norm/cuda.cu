// The launches of the kernels between two library products.
#include "../core/launch.cuh"
#include "../cells/dispatch.h"
#include "added.cuh"
#include "gated.cuh"
#include "kernel.cuh"

namespace minserve {
namespace cuda {

namespace {

Grid grid_of_rows(std::int64_t rows, unsigned threads) {
  if (rows > 2147483647LL) throw std::runtime_error("minserve: too many rows for one launch");
  return {dim3(static_cast<unsigned>(rows)), threads, static_cast<int>(sizeof(Block::Shared))};
}

// One for each vector of a row.
unsigned threads_of(std::int64_t channels) {
  NormedArgs shape;
  shape.channels = channels;
  return normed_threads(shape, 1);
}

template <template <class> class CellOf>
void step_plain(const NormedArgs& args, const Grid& grid, cudaStream_t stream) {
  if (args.linear_candidate || !args.normalize_gates) {
    const AnyOptions options{args.linear_candidate, args.normalize_gates};
    return launch_early<&normed_step_kernel<CellOf, AnyOptions>>(grid, stream, "normed step", args,
                                                                 options);
  }
  launch_early<&normed_step_kernel<CellOf, UsualOptions>>(grid, stream, "normed step", args,
                                                          UsualOptions{});
}

template <template <class> class CellOf>
void step(CellTag<CellOf>, const NormedArgs& args, cudaStream_t stream) {
  const Grid grid = grid_of_rows(args.rows, normed_threads(args, 1));
  if constexpr (!kIsPlain<CellOf<float>>) {
    return launch_early<&normed_gated_step_kernel<CellOf>>(grid, stream, "normed step", args);
  } else {
    step_plain<CellOf>(args, grid, stream);
  }
}

// Calls f with a number of the dtype.
template <class F>
void with_type(Dtype dtype, const F& f) {
  switch (dtype) {
    case Dtype::f32:
      return f(float{});
    case Dtype::bf16:
      return f(bf16{});
    case Dtype::f16:
      return f(f16{});
    case Dtype::f64:
      throw std::runtime_error("minserve: no kernel of float64");
  }
}

}  // namespace

void rms_norm(const NormedArgs& args, int device, void* stream) {
  const DeviceGuard guard(device);
  launch_early<&rms_norm_kernel>(grid_of_rows(args.rows, normed_threads(args, 1)),
                                 static_cast<cudaStream_t>(stream), "rms norm", args);
}

void normed_gelu(const NormedArgs& args, int device, void* stream) {
  const DeviceGuard guard(device);
  const unsigned threads = gelu_threads(args, multiprocessors(device));
  launch_early<&normed_gelu_kernel>(grid_of_rows(args.rows, threads),
                                    static_cast<cudaStream_t>(stream), "normed gelu", args);
}

void normed_swiglu(const NormedArgs& args, int device, void* stream) {
  const DeviceGuard guard(device);
  launch_early<&normed_swiglu_kernel>(grid_of_rows(args.rows, normed_threads(args, 1)),
                                      static_cast<cudaStream_t>(stream), "normed swiglu", args);
}

void gated_rms_norm(const GatedNormArgs& args, Dtype dtype, int device, void* stream) {
  const DeviceGuard guard(device);
  const Grid grid = grid_of_rows(args.rows * args.groups, threads_of(args.channels / args.groups));
  const cudaStream_t on = static_cast<cudaStream_t>(stream);
  with_type(dtype, [&](auto type) {
    using T = decltype(type);
    if (args.gate_first) {
      return launch_early<&gated_rms_norm_kernel<T, true>>(grid, on, "gated rms norm", args);
    }
    launch_early<&gated_rms_norm_kernel<T, false>>(grid, on, "gated rms norm", args);
  });
}

void swiglu(const SwigluArgs& args, Dtype dtype, int device, void* stream) {
  const DeviceGuard guard(device);
  const Grid grid = grid_of_rows(args.rows, threads_of(args.channels));
  with_type(dtype, [&](auto type) {
    launch_early<&swiglu_kernel<decltype(type)>>(grid, static_cast<cudaStream_t>(stream), "swiglu",
                                                 args);
  });
}

void added_rms_norm(const AddedNormArgs& args, Dtype dtype, int device, void* stream) {
  const DeviceGuard guard(device);
  const cudaStream_t on = static_cast<cudaStream_t>(stream);
  const Grid grid = grid_of_rows(args.rows, threads_of(args.width));
  if (dtype == Dtype::f32) {
    return launch_early<&added_rms_norm_kernel<float>>(grid, on, "added rms norm", args);
  }
  launch_early<&added_rms_norm_kernel<bf16>>(grid, on, "added rms norm", args);
}

void normed_step(const NormedArgs& args, CellKind cell, int device, void* stream) {
  const DeviceGuard guard(device);
  const cudaStream_t on = static_cast<cudaStream_t>(stream);
  with_cell<NormedCells>(cell, [&](auto tag) { step(tag, args, on); });
}

}  // namespace cuda
}  // namespace minserve
