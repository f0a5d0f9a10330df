// GRU and LSTM on the CPU. A scan is one pass over time by a team of threads, each with some units:
// per time step one product of all running sequences' h with the packed matrix, whose finish is the
// cell. Compiled once per instruction set; see core/vec.h.
#include "../core/subnormals_cpu.h"
#include "../cpu_product/multiply.h"
#include "cell.h"

namespace minserve {
namespace MS_ISA {
namespace {

constexpr std::int64_t kFetchedEarly = 128 * 1024;  // bytes of weights, while waiting for others

template <class T>
MS_CELL const T* row_of(const Stream& stream, std::int64_t row) {
  return static_cast<const T*>(stream.data) + row * stream.stride;
}
template <class T>
MS_CELL T* output_row(const Stream& stream, std::int64_t row) {
  return static_cast<T*>(stream.data) + row * stream.stride;
}

template <class L>
MS_CELL void load_state(GruUnit<VF>& unit, const GatedRnnArgs& args, std::int64_t slot,
                        std::int64_t c, L lanes) {
  unit.h = load<VF>(args.hidden.data + slot * args.hidden.stride + c, lanes);
}
template <class L>
MS_CELL void load_state(LstmUnit<VF>& unit, const GatedRnnArgs& args, std::int64_t slot,
                        std::int64_t c, L lanes) {
  unit.h = load<VF>(args.hidden.data + slot * args.hidden.stride + c, lanes);
  unit.c = load<VF>(args.cell.data + slot * args.cell.stride + c, lanes);
}
template <class L>
MS_CELL void store_state(const GruUnit<VF>& unit, const GatedRnnArgs& args, std::int64_t slot,
                         std::int64_t c, L lanes) {
  store(args.hidden.data + slot * args.hidden.stride + c, unit.h, lanes);
}
template <class L>
MS_CELL void store_state(const LstmUnit<VF>& unit, const GatedRnnArgs& args, std::int64_t slot,
                         std::int64_t c, L lanes) {
  store(args.hidden.data + slot * args.hidden.stride + c, unit.h, lanes);
  store(args.cell.data + slot * args.cell.stride + c, unit.c, lanes);
}

// A vector of units of one row moves on; returns h.
template <class T, class Unit, class L>
MS_CELL VF advance(const GatedRnnArgs& args, std::int64_t row, std::int64_t slot, std::int64_t c,
                   const VF (&of_h)[Unit::kGates], L lanes) {
  VF in[Unit::kGates];
#pragma GCC unroll 4
  for (int gate = 0; gate < Unit::kGates; ++gate) {
    in[gate] = load<VF>(row_of<T>(args.pre, row) + gate * args.layout.channels + c, lanes);
  }
  Unit unit;
  load_state(unit, args, slot, c, lanes);
  unit.advance(in, of_h);
  store_state(unit, args, slot, c, lanes);
  store(output_row<T>(args.h, row) + c, unit.h, lanes);
  return unit.h;
}

// --- a scan

MS_CELL std::uint32_t word_at(const char* p) {
  std::uint32_t word;
  __builtin_memcpy(&word, p, 4);
  return word;
}
// Input `step` of a row of the weight as it is packed, or inputs 2 step and 2 step + 1.
MS_CELL std::uint32_t packed_word(const float* row, std::int64_t step, std::int64_t) {
  return word_at(reinterpret_cast<const char*>(row + step));
}
MS_CELL std::uint32_t packed_word(const f16* row, std::int64_t step, std::int64_t) {
  return bit_cast<std::uint32_t>(load<VF>(row + step, Part{1})[0]);
}
MS_CELL std::uint32_t packed_word(const bf16* row, std::int64_t step, std::int64_t inputs) {
  if (2 * step + 1 < inputs) return word_at(reinterpret_cast<const char*>(row + 2 * step));
  return row[2 * step].bits;
}

// Panels of the matrix, from rows of the weight.
template <class T>
void pack(const GatedScanWork& work, Range panels) {
  const Matrix& matrix = work.matrix;
  const std::int64_t steps = matrix.steps();
  constexpr std::int64_t kBlock = 16;  // steps, of whose rows whole cache lines are read
  for (std::int64_t panel = panels.begin; panel < panels.end; ++panel) {
    std::int64_t stride;
    char* const to = work.packed + (matrix.at(panel, stride) - matrix.data);
    const std::int64_t gate = panel % matrix.gates, first = panel / matrix.gates * kPanel;
    const std::int64_t left = matrix.outputs - first, count = left < kPanel ? left : kPanel;
    for (std::int64_t begin = 0; begin < steps; begin += kBlock) {
      const std::int64_t end = begin + kBlock < steps ? begin + kBlock : steps;
      std::uint32_t words[kBlock][kPanel] = {};
      for (std::int64_t i = 0; i < count; ++i) {
        const T* const row = row_of<T>(work.args.weight, gate * matrix.outputs + first + i);
        for (std::int64_t s = begin; s < end; ++s) {
          words[s - begin][i] = packed_word(row, s, matrix.inputs);
        }
      }
      for (std::int64_t s = begin; s < end; ++s) {
        __builtin_memcpy(to + s * stride, words[s - begin], sizeof(words[0]));
      }
    }
  }
}

template <class T, class Fed, class Unit>
class Scan {
 public:
  Scan(const GatedScanWork& work, ThreadTeam& team, std::int64_t thread)
      : work_(work),
        args_(work.args),
        team_(team),
        thread_(thread),
        units_(args_.layout.channels),
        stride_(fed_row_bytes(units_, sizeof(typename Fed::element))) {
    const Range mine = part_of(divided_up(units_, kPanel), thread, team.size);
    panels_ = {mine.begin * kGates, mine.end * kGates};
  }

  void run() {
    for (std::int64_t i = 0; i < work_.skipped_count; ++i) skip(work_.skipped[i]);
    if (work_.run_count == 0) return;
    pack<T>(work_, panels_);
    begin();
    std::int64_t stride;
    const char* const weights = work_.matrix.at(panels_.begin, stride);
    const std::int64_t bytes =
        (panels_.end - panels_.begin) * work_.matrix.steps() * work_.matrix.step_bytes();
    std::int64_t running = work_.run_count;
    for (std::int64_t t = 0; t < work_.runs[0].length; ++t) {
      team_.barrier(weights, bytes < kFetchedEarly ? bytes : kFetchedEarly);
      while (work_.runs[running - 1].length <= t) --running;
      const auto finish = [&](std::int64_t r, std::int64_t panel, std::int64_t, const float* sums) {
        advance_run(r, t, panel, sums);
      };
      multiply<Fed>(work_.matrix, fed(t), stride_, {0, running}, panels_, finish);
    }
  }

 private:
  static constexpr std::int64_t kGates = Unit::kGates;

  // What a step reads of h, of all running sequences; the next one's is written meanwhile.
  char* fed(std::int64_t t) const {
    return work_.fed + t % 2 * work_.run_count * fed_row_bytes(units_, 4);
  }

  void skip(const SkippedRows& rows) const {
    const Range mine = part_of(rows.end - rows.begin, thread_, team_.size);
    for (std::int64_t row = rows.begin + mine.begin; row < rows.begin + mine.end; ++row) {
      __builtin_memset(static_cast<void*>(output_row<T>(args_.h, row)), 0,
                       sizeof(T) * static_cast<std::size_t>(units_));
    }
  }

  // Calls f(unit, lanes) for the vectors of a panel; lanes beyond the last unit are none.
  template <class F>
  MS_CELL void each_vector_of(std::int64_t first, const F& f) const {
#pragma GCC unroll 4
    for (int part = 0; part < kParts; ++part) {
      const std::int64_t c = first + part * kWidth, left = units_ - c;
      if (left >= kWidth) {
        f(part, c, Full{});
      } else {
        f(part, c, Part{static_cast<int>(left < 0 ? 0 : left)});
      }
    }
  }

  void begin() const {
    for (std::int64_t r = 0; r < work_.run_count; ++r) {
      const float* const h = args_.hidden.data + work_.runs[r].slot * args_.hidden.stride;
      for (std::int64_t panel = panels_.begin; panel < panels_.end; panel += kGates) {
        each_vector_of(panel / kGates * kPanel, [&](int, std::int64_t c, auto lanes) {
          Fed::put(fed(0) + r * stride_, c, load<VF>(h + c, lanes));
        });
      }
    }
  }

  template <class L>
  MS_CELL VF with_bias(VF sum, std::int64_t at, L lanes) const {
    if (!args_.bias.data) return sum;
    return sum + (args_.bias.is_float
                      ? load<VF>(static_cast<const float*>(args_.bias.data) + at, lanes)
                      : load<VF>(static_cast<const T*>(args_.bias.data) + at, lanes));
  }

  MS_CELL void advance_run(std::int64_t r, std::int64_t t, std::int64_t panel, const float* sums) {
    const GatedRun& run = work_.runs[r];
    char* const next = fed(t + 1) + r * stride_;
    each_vector_of(panel / kGates * kPanel, [&](int part, std::int64_t c, auto lanes) {
      VF of_h[kGates];
#pragma GCC unroll 4
      for (int gate = 0; gate < kGates; ++gate) {
        of_h[gate] = with_bias(load<VF>(sums + gate * kPanel + part * kWidth, Full{}),
                               gate * units_ + c, lanes);
      }
      Fed::put(next, c, advance<T, Unit>(args_, run.begin + t, run.slot, c, of_h, lanes));
    });
  }

  const GatedScanWork& work_;
  const GatedRnnArgs& args_;
  ThreadTeam& team_;
  const std::int64_t thread_, units_, stride_;
  Range panels_;
};

template <class T, class Fed, class Unit>
void run_scan(const GatedScanWork& work, ThreadTeam& team, std::int64_t thread) {
  const WithoutSubnormals as_tiles_have_them;
  Scan<T, Fed, Unit>(work, team, thread).run();
}

// --- a step

template <class T, class Unit>
void run_step(const GatedRnnArgs& args, std::int64_t begin, std::int64_t end) {
  const WithoutSubnormals of_states;
  const std::int64_t units = args.layout.channels, runs = divided_up(units, kGatedRun);
  for (std::int64_t i = begin; i < end; ++i) {
    const std::int64_t row = i / runs, slot = args.layout.slot(row), first = i % runs * kGatedRun;
    const std::int64_t last = first + kGatedRun < units ? first + kGatedRun : units;
    if (slot < 0) {
      __builtin_memset(static_cast<void*>(output_row<T>(args.h, row) + first), 0,
                       sizeof(T) * static_cast<std::size_t>(last - first));
      continue;
    }
    const auto vector = [&](std::int64_t c, auto lanes) {
      VF of_h[Unit::kGates];
#pragma GCC unroll 4
      for (int gate = 0; gate < Unit::kGates; ++gate) {
        of_h[gate] = load<VF>(row_of<T>(args.recurrent, row) + gate * units + c, lanes);
      }
      advance<T, Unit>(args, row, slot, c, of_h, lanes);
    };
    std::int64_t c = first;
    for (; c + kWidth <= last; c += kWidth) vector(c, Full{});
    if (c < last) vector(c, Part{static_cast<int>(last - c)});
  }
}

template <class Unit>
GatedScanFn scan_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::f32:
      return &run_scan<float, FedFloat, Unit>;
    case Dtype::bf16:
      return &run_scan<bf16, FedHalf, Unit>;
    case Dtype::f16:
      return &run_scan<f16, FedFloat, Unit>;
    case Dtype::f64:
      break;
  }
  return nullptr;
}
template <class Unit>
GatedStepFn step_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::f32:
      return &run_step<float, Unit>;
    case Dtype::bf16:
      return &run_step<bf16, Unit>;
    case Dtype::f16:
      return &run_step<f16, Unit>;
    case Dtype::f64:
      break;
  }
  return nullptr;
}

}  // namespace

GatedScanFn gated_scan_kernel(Dtype dtype, bool lstm) {
  return lstm ? scan_of<LstmUnit<VF>>(dtype) : scan_of<GruUnit<VF>>(dtype);
}
GatedStepFn gated_step_kernel(Dtype dtype, bool lstm) {
  return lstm ? step_of<LstmUnit<VF>>(dtype) : step_of<GruUnit<VF>>(dtype);
}

}  // namespace MS_ISA
}  // namespace minserve
