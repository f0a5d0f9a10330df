// Starting a scan: the choice of device, instruction set and regime.
#include "launch.h"

#include <algorithm>

#include "../core/cuda_stream.h"
#include "cpu_partition.h"

namespace minserve {

namespace {

// Doubles are computed one lane at a time, so one build of their scans, the baseline's, serves
// every instruction set: it is a quarter of what these files take to compile.
#define MS_SCAN_BY_ISA(name) (dtype == Dtype::f64 ? &generic::name : MS_BY_ISA(name))

ScanFn scan_kernel(std::optional<CellKind> cell, bool in_rows, Dtype dtype, bool backward) {
  if (!cell) {
    return in_rows ? MS_SCAN_BY_ISA(linear_row_kernel)(dtype, backward)
                   : MS_SCAN_BY_ISA(linear_kernel)(dtype, backward);
  }
  switch (*cell) {
#define MINSERVE_CELL(name, Forward, Backward) \
  case CellKind::name:                         \
    return MS_SCAN_BY_ISA(name##_kernel)(dtype, backward);
#include "../cells/cells.def"
#undef MINSERVE_CELL
  }
  no_kernel_of(*cell);
}

// Where time is contiguous, channels that a thread reads side by side: a line of floats. The pages
// of more are too many to be looked up quickly.
constexpr std::int64_t kRowsTogether = 16;

struct Work {  // a scan on the CPU
  const ScanArgs& args;
  ScanFn kernel;
  CpuTiling tiling;

  void phase(Phase which, std::int64_t count, std::int64_t rows) const {
    const std::int64_t runs = divided_up(args.layout.channels, tiling.width);
    const std::int64_t grain = std::max<std::int64_t>(
        1, kGrainElements / (std::max<std::int64_t>(1, rows) * tiling.width));
    torch::stable::parallel_for(0, count * runs, grain, [&](std::int64_t begin, std::int64_t end) {
      kernel(args, tiling, which, begin, end);
    });
  }

  void serial(std::int64_t threads) {
    const Layout& lay = args.layout;
    const std::int64_t grains = divided_up(lay.tokens * lay.channels, kGrainElements);
    const CpuPartition partition =
        partition_for_cpu(lay, std::clamp<std::int64_t>(grains, 1, threads));
    const std::int64_t parts = static_cast<std::int64_t>(partition.edges.size()) - 1;
    tiling.width = item_width(lay.channels, partition.columns);
    const std::int64_t runs = divided_up(lay.channels, tiling.width);
    const std::int64_t of_column = divided_up(runs, partition.columns);
    const auto part = [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) {
        const std::int64_t first = i / parts * of_column;
        const std::int64_t last = std::min(runs, first + of_column);
        for (std::int64_t run = first; run < last; ++run) {
          const std::int64_t items = run * (lay.sequences + 1);
          kernel(args, tiling, Phase::serial, items + partition.edges[i % parts],
                 items + partition.edges[i % parts + 1]);
        }
      }
    };
    torch::stable::parallel_for(0, partition.columns * parts, 1, part);
  }
};

// Bytes of inputs that a thread reads for aggregates and soon again for outputs: half of a usual
// second-level cache.
constexpr std::int64_t kWaveBytes = 512 * 1024;

void run_scan_cpu(ScanArgs args, std::optional<CellKind> cell, Dtype dtype, bool backward,
                  const Tensor& like) {
  const Layout& lay = args.layout;
  const std::int64_t threads = torch::stable::get_num_threads();
  std::int64_t inputs = 0, outputs = 0;
  for (const Stream& s : args.inputs) inputs += s.data != nullptr;
  for (const Stream& s : args.outputs) outputs += s.data != nullptr;
  const std::int64_t row_bytes = lay.channels * bytes_of(like);

  // Only linear_scan has streams of stride 1 and more channels than one: time is contiguous there.
  const bool in_rows = !cell && args.inputs[0].stride == 1 && lay.channels > 1;
  Work work{args, scan_kernel(cell, in_rows, dtype, backward), {}};
  if (!work.kernel) no_kernel_of(*cell);  // its backward
  CpuTiling& tiling = work.tiling;
  tiling.past_caches = (inputs + outputs) * row_bytes * lay.tokens > last_level_cache();
  const std::int64_t items = divided_up(lay.channels, kNarrowestItem) * lay.sequences;
  if (2 * items > threads || lay.tokens < 8 * kScanChunk) {
    if (!in_rows) return work.serial(threads);
    tiling.width = kRowsTogether;
    return work.phase(Phase::serial, lay.sequences + 1, lay.time);
  }
  // Too few sequences and channels for the threads: time is cut too. Waves of chunks, so that the
  // second reading of the inputs finds them in the cache of the thread that read them first.
  const std::int64_t bound = lay.chunk_bound();
  tiling.width = in_rows ? kNarrowestItem : item_width(lay.channels, 1);
  tiling.row_channels = divided_up(lay.channels, kNarrowestItem) * kNarrowestItem;
  tiling.wave_chunks = std::min(
      bound, threads * std::max<std::int64_t>(1, kWaveBytes / (inputs * row_bytes * kScanChunk)));
  const Tensor workspace = torch::stable::new_empty(
      like, {2 * tiling.wave_chunks + 1, tiling.row_channels}, accumulation_type(dtype));
  args.workspace = workspace.mutable_data_ptr();
  for (std::int64_t first = 0; first < bound; first = tiling.last_chunk) {
    tiling.first_chunk = first;
    tiling.last_chunk = std::min(bound, first + tiling.wave_chunks);
    work.phase(Phase::aggregate, tiling.last_chunk - first, kScanChunk);
    work.phase(Phase::carry, 1, tiling.last_chunk - first);
    work.phase(Phase::output, tiling.last_chunk - first, kScanChunk);
  }
}

}  // namespace

void run_scan(ScanArgs args, std::optional<CellKind> cell, Dtype dtype, bool backward,
              const Tensor& like) {
  const Layout& lay = args.layout;
  if (lay.channels == 0 || lay.sequences + lay.tokens == 0) return;
  if (like.is_cpu()) return run_scan_cpu(args, cell, dtype, backward, like);
#ifdef MINSERVE_CUDA
  const int device = like.get_device_index();
  void* stream = current_stream(like);
  const Tensor workspace =
      torch::stable::new_empty(like, {cuda::scan_workspace_bytes(lay, dtype)}, ScalarType::Byte);
  args.workspace = workspace.mutable_data_ptr();
  if (!cell) return cuda::linear_scan(args, dtype, backward, device, stream);
  switch (*cell) {
#define MINSERVE_CELL(name, Forward, Backward) \
  case CellKind::name:                         \
    return cuda::name(args, dtype, backward, device, stream);
#include "../cells/cells.def"
#undef MINSERVE_CELL
  }
#else
  no_cuda();
#endif
}

}  // namespace minserve
