// Starting a scan or a convolution: the choice of device, instruction set and regime.
#include "launch.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#if defined(MINSERVE_X86)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

#include "../sampling/logits_processor/logits_processor.h"
#include "../pinned_copy/pinned_copy.h"
#include "../sampling/row_cpu.h"
#include "../sampling/logprobs/logprobs.h"
#include "cpu_partition.h"

#ifdef MINSERVE_CUDA
// Weak: the library also loads into a torch built without CUDA, which has no such function.
extern "C" __attribute__((weak)) AOTITorchError
aoti_torch_get_current_cuda_stream(int32_t device_index, void** ret_stream);
#endif

namespace minserve {

namespace {

#if defined(MINSERVE_X86)
// Tiles (AMX) may be used once the system has been asked for room to keep them in, which holds for
// all threads and for good. Old systems and some sandboxes refuse.
bool may_use_tiles() {
#if defined(MINSERVE_AMX) && defined(__linux__)
  constexpr unsigned kBf16 = 1u << 22, kTiles = 1u << 24;
  constexpr long kAskForRoom = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  if ((d & (kBf16 | kTiles)) != (kBf16 | kTiles)) return false;
  return syscall(SYS_arch_prctl, kAskForRoom, kTileData) == 0;
#else
  return false;
#endif
}
#endif

Isa choose_isa() {
#if defined(MINSERVE_X86)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512dq");
  // For tests and for comparing: may only lower the choice.
  const char* wish = std::getenv("MINSERVE_CPU_ISA");
  const bool want_generic = wish && !std::strcmp(wish, "generic");
  const bool want_avx2 = wish && !std::strcmp(wish, "avx2");
  if (want_generic || !avx2) return Isa::generic;
  if (!avx512 || want_avx2) return Isa::avx2;
  const bool want_avx512 = wish && !std::strcmp(wish, "avx512");
  const bool bf16 = __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi");
  if (!bf16 || want_avx512) return Isa::avx512;
  const bool want_bf16 = wish && !std::strcmp(wish, "avx512_bf16");
  return !want_bf16 && may_use_tiles() ? Isa::amx : Isa::avx512_bf16;
#else
  return Isa::generic;
#endif
}

template <class Fn, class... Args>
Fn by_isa(Fn (*generic_entry)(Args...), Fn (*avx2_entry)(Args...), Fn (*avx512_entry)(Args...),
          Args... args) {
  switch (isa()) {
    case Isa::amx:
    case Isa::avx512_bf16:
    case Isa::avx512:
      return avx512_entry(args...);
    case Isa::avx2:
      return avx2_entry(args...);
    default:
      return generic_entry(args...);
  }
}

#if defined(MINSERVE_X86)
#define MS_BY_ISA(name, ...) by_isa(&generic::name, &avx2::name, &avx512::name, __VA_ARGS__)
#else
#define MS_BY_ISA(name, ...) by_isa(&generic::name, &generic::name, &generic::name, __VA_ARGS__)
#endif

ScanFn scan_kernel(Recurrence recurrence, bool in_rows, Dtype dtype, bool backward) {
  switch (recurrence) {
    case Recurrence::linear:
      return in_rows ? MS_BY_ISA(linear_row_kernel, dtype, backward)
                     : MS_BY_ISA(linear_kernel, dtype, backward);
    case Recurrence::mingru:
      return MS_BY_ISA(mingru_kernel, dtype, backward);
    default:
      return MS_BY_ISA(minlstm_kernel, dtype, backward);
  }
}

// Elements under which another thread costs more than it brings.
constexpr std::int64_t kGrainElements = 8192;

// Where time is contiguous, channels that a thread reads side by side: a line of floats. The pages
// of more are too many to be looked up quickly.
constexpr std::int64_t kRowsTogether = 16;

struct Work {  // a scan on the CPU
  const ScanArgs& args;
  ScanFn kernel;
  Share share;

  void phase(Phase which, std::int64_t count, std::int64_t rows) const {
    const std::int64_t runs = divided_up(args.layout.channels, share.width);
    const std::int64_t grain =
        std::max<std::int64_t>(1, kGrainElements / (std::max<std::int64_t>(1, rows) * share.width));
    torch::stable::parallel_for(0, count * runs, grain, [&](std::int64_t begin, std::int64_t end) {
      kernel(args, share, which, begin, end);
    });
  }

  void serial(std::int64_t threads) {
    const Layout& lay = args.layout;
    const std::int64_t grains = divided_up(lay.tokens * lay.channels, kGrainElements);
    const Deal dealt = deal(lay, std::clamp<std::int64_t>(grains, 1, threads));
    const std::int64_t parts = static_cast<std::int64_t>(dealt.edges.size()) - 1;
    share.width = item_width(lay.channels, dealt.columns);
    const std::int64_t runs = divided_up(lay.channels, share.width);
    const std::int64_t of_column = divided_up(runs, dealt.columns);
    const auto part = [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) {
        const std::int64_t first = i / parts * of_column;
        const std::int64_t last = std::min(runs, first + of_column);
        for (std::int64_t run = first; run < last; ++run) {
          const std::int64_t items = run * (lay.sequences + 1);
          kernel(args, share, Phase::serial, items + dealt.edges[i % parts],
                 items + dealt.edges[i % parts + 1]);
        }
      }
    };
    torch::stable::parallel_for(0, dealt.columns * parts, 1, part);
  }
};

#ifndef MINSERVE_CUDA
[[noreturn]] void no_cuda() {
  throw std::runtime_error(
      "minserve: this build has no CUDA kernels; rebuild with `MINSERVE_CUDA=ON pip install -e .` "
      "(nvcc is needed) or move the tensors to the CPU");
}
#endif

// Bytes of inputs that a thread reads for aggregates and soon again for outputs: half of a usual
// second-level cache.
constexpr std::int64_t kWaveBytes = 512 * 1024;

void run_scan_cpu(ScanArgs args, Recurrence recurrence, Dtype dtype, bool backward,
                  const Tensor& like) {
  const Layout& lay = args.layout;
  const std::int64_t threads = torch::stable::get_num_threads();
  std::int64_t inputs = 0, outputs = 0;
  for (const Stream& s : args.inputs) inputs += s.data != nullptr;
  for (const Stream& s : args.outputs) outputs += s.data != nullptr;
  const std::int64_t row_bytes = lay.channels * bytes_of(like);

  // Only linear_scan has streams of stride 1 and more channels than one: time is contiguous there.
  const bool in_rows =
      recurrence == Recurrence::linear && args.inputs[0].stride == 1 && lay.channels > 1;
  Work work{args, scan_kernel(recurrence, in_rows, dtype, backward), {}};
  Share& share = work.share;
  share.past_caches = (inputs + outputs) * row_bytes * lay.tokens > last_level_cache();
  const std::int64_t items = divided_up(lay.channels, kNarrowestItem) * lay.sequences;
  if (2 * items > threads || lay.tokens < 8 * kScanChunk) {
    if (!in_rows) return work.serial(threads);
    share.width = kRowsTogether;
    return work.phase(Phase::serial, lay.sequences + 1, lay.time);
  }
  // Too few sequences and channels for the threads: time is cut too. Waves of chunks, so that the
  // second reading of the inputs finds them in the cache of the thread that read them first.
  const std::int64_t bound = lay.chunk_bound();
  share.width = in_rows ? kNarrowestItem : item_width(lay.channels, 1);
  share.row_channels = divided_up(lay.channels, kNarrowestItem) * kNarrowestItem;
  share.wave_chunks = std::min(
      bound, threads * std::max<std::int64_t>(1, kWaveBytes / (inputs * row_bytes * kScanChunk)));
  const Tensor workspace = torch::stable::new_empty(
      like, {2 * share.wave_chunks + 1, share.row_channels}, accumulation_type(dtype));
  args.workspace = workspace.mutable_data_ptr();
  for (std::int64_t first = 0; first < bound; first = share.last_chunk) {
    share.first_chunk = first;
    share.last_chunk = std::min(bound, first + share.wave_chunks);
    work.phase(Phase::aggregate, share.last_chunk - first, kScanChunk);
    work.phase(Phase::carry, 1, share.last_chunk - first);
    work.phase(Phase::output, share.last_chunk - first, kScanChunk);
  }
}

// Rows of logits on the CPU: kernel(args, begin, end).
template <class Args, class Kernel>
void by_rows(const Args& args, const Kernel& kernel) {
  const std::int64_t grain = std::max<std::int64_t>(1, kGrainElements / args.vocab);
  torch::stable::parallel_for(
      0, args.rows, grain, [&](std::int64_t begin, std::int64_t end) { kernel(args, begin, end); });
}

}  // namespace

Isa isa() {
  static const Isa chosen = choose_isa();
  return chosen;
}

#ifdef MINSERVE_CUDA
void* current_stream(const Tensor& like) {
  void* stream = nullptr;
  if (!aoti_torch_get_current_cuda_stream ||
      aoti_torch_get_current_cuda_stream(like.get_device_index(), &stream) != AOTI_TORCH_SUCCESS) {
    throw std::runtime_error("minserve: this torch gives no CUDA stream");
  }
  return stream;
}
#endif

const char* cpu_isa() {
  switch (isa()) {
    case Isa::amx:
      return "amx";
    case Isa::avx512_bf16:
      return "avx512_bf16";
    case Isa::avx512:
      return "avx512";
    case Isa::avx2:
      return "avx2";
    default:
      return "generic";
  }
}

void run_scan(ScanArgs args, Recurrence recurrence, Dtype dtype, bool backward,
              const Tensor& like) {
  const Layout& lay = args.layout;
  if (lay.channels == 0 || lay.sequences + lay.tokens == 0) return;
  if (like.is_cpu()) return run_scan_cpu(args, recurrence, dtype, backward, like);
#ifdef MINSERVE_CUDA
  const int device = like.get_device_index();
  void* stream = current_stream(like);
  const Tensor workspace =
      torch::stable::new_empty(like, {cuda::scan_workspace_bytes(lay, dtype)}, ScalarType::Byte);
  args.workspace = workspace.mutable_data_ptr();
  switch (recurrence) {
    case Recurrence::linear:
      return cuda::linear_scan(args, dtype, backward, device, stream);
    case Recurrence::mingru:
      return cuda::mingru(args, dtype, backward, device, stream);
    case Recurrence::minlstm:
      return cuda::minlstm(args, dtype, backward, device, stream);
  }
#else
  no_cuda();
#endif
}

void run_conv(const ConvArgs& given, Dtype dtype, const Tensor& like) {
  ConvArgs args = given;
  const Layout& lay = args.layout;
  if (lay.channels == 0 || lay.sequences + lay.tokens == 0) return;
  if (like.is_cpu()) {
    const ConvFn kernel = MS_BY_ISA(conv_kernel, dtype);
    Tensor rows = torch::stable::new_empty(like, {args.taps + 1, lay.channels}, ScalarType::Float);
    args.weight_rows = static_cast<float*>(rows.mutable_data_ptr());
    kernel(args, Phase::carry, 0, 1);
    const std::int64_t grain = std::max<std::int64_t>(1, kGrainElements / lay.channels);
    for (const Phase phase : {Phase::output, Phase::aggregate}) {
      torch::stable::parallel_for(
          0, phase == Phase::output ? lay.tokens : lay.sequences, grain,
          [&](std::int64_t begin, std::int64_t end) { kernel(args, phase, begin, end); });
    }
    return;
  }
#ifdef MINSERVE_CUDA
  const int device = like.get_device_index();
  return cuda::conv(args, dtype, device, current_stream(like));
#else
  no_cuda();
#endif
}

void run_draw(const DrawArgs& args, const Tensor& logits) {
  if (args.rows == 0) return;
  if (logits.is_cpu()) {
    const DrawKernels kernels = MS_BY_ISA(draw_kernels, Dtype::f32);
    return by_rows(args, [&](const DrawArgs&, std::int64_t begin, std::int64_t end) {
      RowDraw row(args, kernels);
      for (std::int64_t r = begin; r < end; ++r) {
        if (args.draws(r)) move_on(args, r, row.token(r));
      }
    });
  }
#ifdef MINSERVE_CUDA
  return cuda::draw(args, logits.get_device_index(), current_stream(logits));
#else
  no_cuda();
#endif
}

void run_adjust(const AdjustArgs& args, const Tensor& logits) {
  if (args.rows == 0) return;
  if (logits.is_cpu()) return by_rows(args, MS_BY_ISA(adjust_kernel, Dtype::f32));
#ifdef MINSERVE_CUDA
  return cuda::adjust(args, logits.get_device_index(), current_stream(logits));
#else
  no_cuda();
#endif
}

void run_copy_words(const CopyArgs& args, const Tensor& like) {
  if (args.count == 0) return;
  if (like.is_cpu()) {
    std::copy(args.source, args.source + args.count, args.to);
    std::fill_n(args.source + args.first_zero, args.zeros, 0);
    return;
  }
#ifdef MINSERVE_CUDA
  return cuda::copy_words(args, like.get_device_index(), current_stream(like));
#else
  no_cuda();
#endif
}

void run_target_logprobs(const TargetArgs& args, const Tensor& logits) {
  if (args.rows == 0) return;
  if (logits.is_cpu()) return by_rows(args, MS_BY_ISA(target_kernel, Dtype::f32));
#ifdef MINSERVE_CUDA
  return cuda::target_logprobs(args, logits.get_device_index(), current_stream(logits));
#else
  no_cuda();
#endif
}

}  // namespace minserve
