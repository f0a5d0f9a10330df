// Mamba-2's recurrence on the CPU: the tokens of a sequence in blocks, for a run of rows of a
// head's state. Compiled once per instruction set; see core/vec.h.
#include "../cells/softplus_cpu.h"
#include "../core/subnormals_cpu.h"
#include "args.h"
#include "block_cpu.h"

namespace minserve {
namespace MS_ISA {
namespace {

template <class T>
MS_CELL float number(const T* p) {
  return load<VF>(p, Part{1})[0];
}
template <class T>
MS_CELL float number_of(const HeadVector& v, std::int64_t head) {
  return v.is_float ? static_cast<const float*>(v.data)[head]
                    : number(static_cast<const T*>(v.data) + head);
}

// Columns of a stream's rows as floats, side by side: rows that are far apart would share few sets
// of the cache.
template <class T>
MS_CELL FloatRows floats_of(const Stream& stream, std::int64_t row, std::int64_t column, int count,
                            std::int64_t columns, float* room) {
  const T* const from = static_cast<const T*>(stream.data) + row * stream.stride + column;
  for (int t = 0; t < count; ++t) {
    copy_states(from + t * stream.stride, room + t * columns, columns);
  }
  return {room, columns};
}

// Rows [first, first + rows) of a head.
struct Run {
  std::int64_t head, first, rows;
};

// What a head has for all its tokens.
struct Head {
  float log_a, d, bias;  // A, base 2
};

// Time steps behind softplus, and the logarithms of what the tokens leave; both [kBlock].
template <class T>
MS_CELL void time_steps(const SsdArgs& args, const Head& head, std::int64_t index, std::int64_t row,
                        int count, float* dt, float* log) {
  const T* const from = static_cast<const T*>(args.dt.data) + row * args.dt.stride + index;
  for (int t = 0; t < kBlock; ++t) dt[t] = t < count ? number(from + t * args.dt.stride) : 0.0f;
  for (int t = 0; t < count; t += kWidth) {
    VF step = softplus(load<VF>(dt + t, Full{}) + all_lanes(head.bias));
    step = minimum(maximum(step, all_lanes(args.least_dt)), all_lanes(args.most_dt));
    store(dt + t, step, Full{});
    store(log + t, step * all_lanes(head.log_a), Full{});
  }
}

template <class T, class S>
MS_CELL void read_token(const float* B, const float* C, const float* x, std::int64_t rows,
                        std::int64_t states, float kept, float dt, float D, S* h, T* y) {
  const VF step = all_lanes(dt), d = all_lanes(D);
  std::int64_t p = 0;
  for (; p + kWidth <= rows; p += kWidth) {
    const VF given = load<VF>(x + p, Full{});
    const VF sum = advance_token(h + p * states, B, C, states, kept, step * given, kWidth);
    store(y + p, fmadd(d, given, sum), Full{});
  }
  if (p < rows) {
    const Part rest{static_cast<int>(rows - p)};
    const VF given = load<VF>(x + p, rest);
    const VF sum = advance_token(h + p * states, B, C, states, kept, step * given, rest.count);
    store(y + p, fmadd(d, given, sum), rest);
  }
}

// All tokens of a sequence; h: the run's states, of floats unless there is only one token.
template <class T, class S>
void read_sequence(const SsdArgs& args, const Run& run, std::int64_t begin, std::int64_t end,
                   S* h) {
  alignas(64) float room_b[kBlock * kMostSsdStates], room_c[kBlock * kMostSsdStates];
  alignas(64) float room_x[kBlock * kMostSsdRows];
  alignas(64) float dt[kBlock], log[kBlock];
  const std::int64_t states = args.states, rows = run.rows;
  const std::int64_t column = run.head * args.head_dim + run.first;
  const std::int64_t shared = run.head / (args.heads / args.groups) * states;
  const Head head{args.A[run.head] * static_cast<float>(kLog2e), number_of<T>(args.D, run.head),
                  number_of<T>(args.dt_bias, run.head)};
  Block block;
  for (std::int64_t row = begin; row < end; row += kBlock) {
    const int count = end - row < kBlock ? static_cast<int>(end - row) : kBlock;
    block.count = count;
    block.B = floats_of<T>(args.B, row, shared, count, states, room_b);
    block.C = floats_of<T>(args.C, row, shared, count, states, room_c);
    const FloatRows x = floats_of<T>(args.x, row, column, count, rows, room_x);
    T* const y = static_cast<T*>(args.y.data) + row * args.y.stride + column;
    time_steps<T>(args, head, run.head, row, count, dt, log);
    if (count == 1) {
      const float kept = exp2_of(all_lanes(log[0]))[0];
      read_token(block.B[0], block.C[0], x[0], rows, states, kept, dt[0], head.d, h, y);
    } else if constexpr (sizeof(S) == sizeof(float)) {
      weigh(block, dt, log, states);
      read_block<T>(block, x, head.d, rows, states, h, y, args.y.stride);
    }
  }
}

template <class T>
void zero_rows(const SsdArgs& args, const Run& run, std::int64_t begin, std::int64_t end) {
  for (std::int64_t row = begin; row < end; ++row) {
    T* const y = static_cast<T*>(args.y.data) + row * args.y.stride;
    __builtin_memset(static_cast<void*>(y + run.head * args.head_dim + run.first), 0,
                     sizeof(T) * static_cast<unsigned long>(run.rows));
  }
}

template <class T>
void read_run(const SsdArgs& args, const Run& run, std::int64_t s) {
  const Layout& lay = args.layout;
  const std::int64_t begin = lay.begin(s), end = lay.end(s), slot = lay.slot(s);
  if (begin == end) return;
  if (slot < 0) return zero_rows<T>(args, run, begin, end);
  const std::int64_t at =
      slot * args.slot_stride + (run.head * args.head_dim + run.first) * args.states;
  if (!args.half_state) {
    return read_sequence<T>(args, run, begin, end, static_cast<float*>(args.state) + at);
  }
  bf16* const h = static_cast<bf16*>(args.state) + at;
  if (end - begin == 1) return read_sequence<T>(args, run, begin, end, h);
  alignas(64) float wide[kSsdRunStates];
  copy_states(h, wide, run.rows * args.states);
  read_sequence<T>(args, run, begin, end, wide);
  copy_states(wide, h, run.rows * args.states);
}

// Items are pairs of a sequence and a run of all heads' rows. Of a scan the first items have the
// first run of every sequence, so that threads share long sequences; of a step, in which all are
// equal, every run of the first sequence, in the order of the states in memory.
template <class T>
void run_ssd(const SsdArgs& args, std::int64_t begin, std::int64_t end) {
  const WithoutSubnormals of_states;
  const std::int64_t sequences = args.layout.sequences + 1, most = ssd_run_rows(args.states);
  const std::int64_t runs = divided_up(args.head_dim, most), of_all = args.heads * runs;
  const bool step = !args.layout.cu_seqlens;
  for (std::int64_t i = begin; i < end; ++i) {
    const std::int64_t run = step ? i % of_all : i / sequences, first = run % runs * most;
    const std::int64_t left = args.head_dim - first;
    read_run<T>(args, {run / runs, first, left < most ? left : most},
                step ? i / of_all : i % sequences);
  }
}

}  // namespace

SsdFn ssd_kernel(Dtype dtype) {
  switch (dtype) {
    case Dtype::f32:
      return &run_ssd<float>;
    case Dtype::bf16:
      return &run_ssd<bf16>;
    case Dtype::f16:
      return &run_ssd<f16>;
    case Dtype::f64:
      break;
  }
  return nullptr;
}

}  // namespace MS_ISA
}  // namespace minserve
