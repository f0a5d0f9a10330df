// Runs csrc/scan/time_contiguous.cuh in the emulator: one case, told by options, in many schedules.
//
// What must be equal is told in scan_driver.cpp; here a row alone is the same as among others.
#include "cases.h"

#include "cells/linear_scan.h"
#include "scan/time_contiguous.cuh"

namespace minserve {
namespace {

struct Case {
  long rows, time, shift;
  bool reverse, initial, nan;
  std::vector<int> blocks, seeds;
};

template <template <class> class CellOf, class T, int kWarps>
class Driver {
  using Scan = cuda::RowScan<CellOf, T, kWarps>;
  using V = typename Scan::V;
  using Cell = CellOf<V>;
  static constexpr int kInputs = Cell::kInputs, kOutputs = Cell::kOutputs;
  static constexpr bool kBackward = Cell::kPrevious >= 0;

 public:
  explicit Driver(const Case& given) : case_(given) {
    std::mt19937 random(1);
    std::normal_distribution<double> normal;
    std::uniform_real_distribution<double> uniform;
    for (int n = 0; n < kInputs; ++n) {
      for (long i = 0; i < case_.rows * case_.time; ++i) {
        // Forgets so slowly that a tile's carry is seen at the next one's end.
        const double keep = uniform(random) < 0.0005 ? 0.5 : 1 - 0.0002 * uniform(random);
        inputs_[n].push_back(rounded<T>(n == 0 ? keep : 0.05 * normal(random)));
      }
    }
    if (case_.nan) make_confusing_nan(&inputs_[0][case_.time / 2]);
    for (long r = 0; r < case_.rows; ++r) start_.push_back(static_cast<V>(normal(random)));
  }

  void check() const {
    const Result first = run(0, case_.rows, case_.blocks[0], case_.seeds[0]);
    check_values(first);
    for (int blocks : case_.blocks) {
      for (int seed : case_.seeds) {
        same_bits_of(
            run(0, case_.rows, blocks, seed), first, 0,
            " with " + std::to_string(blocks) + " blocks and seed " + std::to_string(seed));
      }
    }
    for (long r = 0; r < case_.rows; ++r) {
      same_bits_of(run(r, 1, 3, case_.seeds.back()), first, r, " of row " + std::to_string(r));
    }
  }

 private:
  struct Result {
    std::vector<T> outputs[kOutputs];
    std::vector<V> last;
  };

  // The rows [first, first + rows) as a case of their own.
  Result run(long first, long rows, int blocks, int seed) const {
    emulator::free_all();
    ScanArgs args;
    args.layout.sequences = 1;
    args.layout.channels = rows;
    args.layout.time = args.layout.tokens = case_.time;
    args.layout.reverse = case_.reverse;
    args.aligned = case_.shift == 0 && case_.time * sizeof(T) % 16 == 0;
    const std::size_t shift = static_cast<std::size_t>(case_.shift);
    const long from = first * case_.time, to = (first + rows) * case_.time;
    Tensor<T> inputs[kInputs], outputs[kOutputs];
    for (int n = 0; n < kInputs; ++n) {
      inputs[n] = {"input " + std::to_string(n), shift,
                   std::vector<T>(inputs_[n].begin() + from, inputs_[n].begin() + to)};
      inputs[n].to_device(emulator::Use::read);
      args.inputs[n] = {inputs[n].device, 1};
    }
    for (int n = 0; n < kOutputs; ++n) {
      outputs[n] = {"output " + std::to_string(n), shift,
                    std::vector<T>(static_cast<std::size_t>(to - from), rounded<T>(NAN))};
      outputs[n].to_device(emulator::Use::write);
      args.outputs[n] = {outputs[n].device, 1};
    }
    const auto part = std::vector<V>(start_.begin() + first, start_.begin() + first + rows);
    Tensor<V> start{"state before", 0, part}, last{"state after", 0, std::vector<V>(part.size())};
    start.to_device(emulator::Use::read);
    last.to_device(emulator::Use::write);
    if (case_.initial) (kBackward ? args.h0 : args.initial) = start.device;
    args.last = last.device;
    launch(args, blocks);
    emulator::run(static_cast<unsigned>(seed));
    Result result;
    for (int n = 0; n < kOutputs; ++n) result.outputs[n] = outputs[n].from_device();
    result.last = last.from_device();
    return result;
  }

  static void launch(ScanArgs args, int most_blocks) {
    cuda::RowTiles tiles;
    tiles.rows = static_cast<unsigned>(args.layout.channels);
    tiles.per_row = static_cast<unsigned>((args.layout.time + Scan::kTile - 1) / Scan::kTile);
    tiles.total = tiles.rows * tiles.per_row;
    tiles.counter = nullptr;
    if (tiles.per_row > 1) {  // all ones: empty words, and a counter that has counted nothing
      const std::size_t bytes =
          static_cast<std::size_t>(tiles.words()) * sizeof(cuda::LookbackWord<V>) + 16;
      args.workspace = emulator::allocate("words", bytes, emulator::Use::write);
      tiles.counter = reinterpret_cast<unsigned*>(static_cast<char*>(args.workspace) + bytes - 16);
    }
    emulator::launch({"scan of rows", std::min<unsigned>(tiles.total, most_blocks), Scan::kThreads,
                      sizeof(typename Scan::Shared), false,
                      [=] { cuda::row_kernel<CellOf, T, kWarps>(args, tiles); }});
  }

  // Of rows that begin with `row` of the whole.
  void same_bits_of(const Result& got, const Result& whole, long row,
                    const std::string& when) const {
    for (int n = 0; n < kOutputs; ++n) {
      const auto from = whole.outputs[n].begin() + row * case_.time;
      const long count = static_cast<long>(got.outputs[n].size());
      same_bits(got.outputs[n], std::vector<T>(from, from + count), when);
    }
    const auto from = whole.last.begin() + row;
    same_bits(got.last, std::vector<V>(from, from + static_cast<long>(got.last.size())), when);
  }

  // A serial loop in doubles.
  void check_values(const Result& result) const {
    for (long r = 0; r < case_.rows; ++r) {
      double h = case_.initial && !kBackward ? static_cast<double>(start_[r]) : 0;
      for (long p = 0; p < case_.time; ++p) {
        const long at = case_.reverse ? case_.time - 1 - p : p;
        double in[kInputs], out[kOutputs];
        for (int n = 0; n < kInputs; ++n) in[n] = value_of(inputs_[n][r * case_.time + at]);
        if (kBackward) in[kInputs - 1] = before(r, at, p + 1 == case_.time);
        const auto step = CellOf<double>::coefficients(cuda::UsualOptions{}, in);
        const double after = step.a * h + step.b;
        CellOf<double>::outputs(cuda::UsualOptions{}, in, h, after, out);
        h = after;
        for (int n = 0; n < kOutputs; ++n) {
          check_value<T>(value_of(result.outputs[n][r * case_.time + at]), out[n], "output", r, at);
        }
      }
      check_value<T>(static_cast<double>(result.last[r]), h, "last state", r, 0);
    }
  }
  // The state before a position in the forward direction, which is against this scan's.
  double before(long row, long at, bool first) const {
    if (first) return case_.initial ? static_cast<double>(start_[row]) : 0;
    return value_of(inputs_[kInputs - 1][row * case_.time + (case_.reverse ? at - 1 : at + 1)]);
  }

  Case case_;
  std::vector<T> inputs_[kInputs];
  std::vector<V> start_;
};

// As many warps as the launcher takes for rows of this length.
template <template <class> class CellOf, class T>
void check(const Case& given) {
  if (given.time <= cuda::RowScan<CellOf, T, 1>::kTile) {
    Driver<CellOf, T, 1>(given).check();
  } else {
    Driver<CellOf, T, 4>(given).check();
  }
}
template <class T>
void check_either(const Case& given, bool backward) {
  backward ? check<cuda::LinearBackwardCell, T>(given) : check<cuda::LinearCell, T>(given);
}

}  // namespace
}  // namespace minserve

int main(int count, char** arguments) {
  using namespace minserve;
  Options options(count, arguments);
  Case given;
  const std::string type = options.text("type", "f32");
  const bool backward = options.number("backward", 0);
  given.rows = options.number("rows", 3);
  given.time = options.number("time", 5000);
  given.shift = options.number("shift", 0);
  given.reverse = options.number("reverse", 0);
  given.initial = options.number("initial", 1);
  given.nan = options.number("nan", 0);
  given.blocks = options.numbers("blocks", "1,2,7,50");
  given.seeds = options.numbers("seeds", "1");
  options.none_left();
  if (type == "f32") {
    check_either<float>(given, backward);
  } else if (type == "bf16") {
    check_either<bf16>(given, backward);
  } else if (type == "f64") {
    check_either<double>(given, backward);
  } else {
    Options::usage("--type " + type);
  }
  std::puts("ok");
  return 0;
}
