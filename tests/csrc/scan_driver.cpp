// Runs csrc/scan/scan.cuh in the emulator: one case, told by options, in many schedules.
//
// Compiled once per pair of cells: CELL_HEADER, FORWARD_CELL and BACKWARD_CELL name them,
// KEEP_INPUT is the input that decides how much is kept, KEEP_SHIFT added to it keeps almost all
// (0: it is the factor itself), ALL_TYPES asks for more than the two types
// whose tiles differ most. The outputs and states of every schedule and number of blocks must be
// equal in every bit, and so must those of a sequence alone and of one that is cut at a chunk's
// end, with the state carried; the values must be those of a plain serial loop in doubles. With
// --short N sequences of up to N positions are left to csrc/scan/short_sequences.cuh, but for those
// alone.
#include "cases.h"

#include "scan/short_sequences.cuh"
#include "scan/tile_kernel.cuh"
#include CELL_HEADER

namespace minserve {
namespace {

struct Case {
  std::vector<int> lengths, slots;
  long channels, tail, extra_stride, shift;
  long short_length;
  bool reverse, packed, nan;
  std::vector<int> blocks, seeds;
};

template <template <class> class CellOf, class T, bool kAligned>
class Driver {
  using Scan = cuda::TileLoop<CellOf, cuda::UsualOptions, T, kAligned>;
  using V = typename Scan::V;
  using Cell = CellOf<V>;
  static constexpr int kInputs = Cell::kInputs, kOutputs = Cell::kOutputs;
  static constexpr bool kBackward = Cell::kPrevious >= 0;
  static constexpr int kParameters = Cell::kParameters;

 public:
  explicit Driver(const Case& given) : case_(given), stride_(given.channels + given.extra_stride) {
    std::mt19937 random(1);
    std::normal_distribution<double> normal;
    std::uniform_real_distribution<double> uniform;
    begin_ = {0};
    for (int length : case_.lengths) begin_.push_back(begin_.back() + length);
    tokens_ = begin_.back() + (case_.packed ? case_.tail : 0);
    for (int n = 0; n < kInputs; ++n) {
      inputs_[n].name = "input " + std::to_string(n);
      inputs_[n].shift = case_.shift;
      for (long i = 0; i < tokens_ * stride_; ++i) {
        // Every second channel forgets so slowly that a chunk's carry is seen at the next one's
        // end.
        const bool slow = i % stride_ % 2;
        double x = normal(random);
        if (n == KEEP_INPUT && KEEP_SHIFT != 0) x += slow ? KEEP_SHIFT : 0;
        if (n == KEEP_INPUT && KEEP_SHIFT == 0) x = 1 - uniform(random) * (slow ? 0.01 : 1);
        inputs_[n].values.push_back(rounded<T>(x));
      }
    }
    if (case_.nan) {  // in the middle of the longest sequence, in every second channel
      const long longest =
          std::max_element(case_.lengths.begin(), case_.lengths.end()) - case_.lengths.begin();
      const long row = begin_[longest] + case_.lengths[longest] / 2;
      for (long c = 0; c < case_.channels; c += 2) {
        make_confusing_nan(&inputs_[0].values[row * stride_ + c]);
      }
    }
    rows_ = static_cast<long>(case_.lengths.size()) + 3;
    for (int slot : case_.slots) rows_ = std::max<long>(rows_, slot + 1);
    for (long i = 0; i < rows_ * case_.channels; ++i) {
      // Adding to -0 shows whether it was added to.
      state_.push_back(static_cast<V>(i % 5 == 3 ? -0.0 : normal(random)));
    }
    for (long i = 0; i < kParameters * case_.channels; ++i) {
      parameters_.push_back(static_cast<float>(uniform(random) / 2));
    }
    for (long i = 0; i < sequences() * case_.channels; ++i) {
      previous_.push_back(static_cast<V>(normal(random)));
    }
  }

  void check() {
    const Result first = run(case_.blocks[0], case_.seeds[0]);
    check_values(first);
    for (int blocks : case_.blocks) {
      for (int seed : case_.seeds) {
        const std::string schedule =
            " with " + std::to_string(blocks) + " blocks and seed " + std::to_string(seed);
        const Result again = run(blocks, seed);
        for (int n = 0; n < kOutputs; ++n) same_bits(again.outputs[n], first.outputs[n], schedule);
        same_bits(again.state, first.state, schedule);
      }
    }
    for (long s = 0; s < sequences(); ++s) {
      if (slot(s) < 0) continue;
      const long from = begin_[s], to = begin_[s + 1];
      std::vector<V> state = state_of(state_, slot(s));
      check_piece({s, from, to}, first, &state, "alone");
      same_bits(state, state_of(first.state, slot(s)), " of the state of a sequence alone");
      const long cut = (to - from) / kScanChunk / 2 * kScanChunk;
      if (cut == 0) continue;
      const long middle = case_.reverse ? to - cut : from + cut;
      const Piece below = {s, from, middle}, above = {s, middle, to};
      state = state_of(state_, slot(s));
      check_piece(case_.reverse ? above : below, first, &state, "up to a chunk's end");
      check_piece(case_.reverse ? below : above, first, &state, "from a chunk's end");
      same_bits(state, state_of(first.state, slot(s)), " of the state of a sequence in two pieces");
    }
  }

 private:
  struct Result {
    std::vector<T> outputs[kOutputs];
    std::vector<V> state;
  };

  long sequences() const { return static_cast<long>(case_.lengths.size()); }
  long slot(long s) const { return case_.packed ? case_.slots[s] : s; }

  // Rows of one sequence, as a case of their own; the scan takes them from its state to the next.
  struct Piece {
    long sequence, from, to;
  };

  Result run(int blocks, int seed) const {
    return run(0, tokens_, begin_, case_.slots, state_, previous_, blocks, seed);
  }
  Result run(const Piece& piece, const std::vector<V>& state) const {
    std::vector<V> previous;
    for (long c = 0; kBackward && c < case_.channels; ++c) {
      const long first = case_.reverse ? piece.from : piece.to - 1;
      previous.push_back(static_cast<V>(before(piece.sequence, first, c)));
    }
    const int rows = static_cast<int>(piece.to - piece.from);
    return run(piece.from, piece.to, {0, rows}, {0}, state, previous, 2, case_.seeds.back());
  }

  Result run(long first_row, long last_row, const std::vector<int>& begin,
             const std::vector<int>& slots, const std::vector<V>& state_before,
             const std::vector<V>& previous_state, int blocks, int seed) const {
    emulator::free_all();
    Layout lay;
    lay.sequences = static_cast<long>(begin.size()) - 1;
    lay.tokens = last_row - first_row;
    lay.channels = case_.channels;
    lay.reverse = case_.reverse;
    Tensor<std::int32_t> cu{"cu_seqlens", 0, begin}, of{"slots", 0, slots};
    if (case_.packed) {
      cu.to_device(emulator::Use::read);
      of.to_device(emulator::Use::read);
      lay.cu_seqlens = cu.device, lay.slots = of.device, lay.num_slots = rows_;
    } else {
      lay.time = begin[1];
    }
    ScanArgs args;
    args.layout = lay;
    args.aligned = kAligned;
    Tensor<T> inputs[kInputs], outputs[kOutputs];
    const long from = first_row * stride_, to = last_row * stride_;
    for (int n = 0; n < kInputs; ++n) {
      inputs[n] = {inputs_[n].name, inputs_[n].shift, {}};
      inputs[n].values.assign(inputs_[n].values.begin() + from, inputs_[n].values.begin() + to);
      inputs[n].to_device(emulator::Use::read);
      args.inputs[n] = {inputs[n].device, stride_};
    }
    for (int n = 0; n < kOutputs; ++n) {
      outputs[n] = {"output " + std::to_string(n), static_cast<std::size_t>(case_.shift), {}};
      outputs[n].values.assign(static_cast<std::size_t>(to - from), rounded<T>(NAN));
      outputs[n].to_device(emulator::Use::write);
      args.outputs[n] = {outputs[n].device, stride_};
    }
    Tensor<float> parameters{"parameters", static_cast<std::size_t>(case_.shift), parameters_};
    parameters.to_device(emulator::Use::read);
    for (int n = 0; n < kParameters; ++n) args.parameters[n] = parameters.device + n * lay.channels;
    Tensor<V> state{"state", 0, state_before}, previous{"previous state", 0, previous_state};
    state.to_device(emulator::Use::write);
    args.initial = args.last = state.device;
    args.initial_stride = args.last_stride = case_.channels;
    previous.to_device(emulator::Use::read);
    if (kBackward) args.h0 = previous.device;
    start(args, blocks);
    emulator::run(static_cast<unsigned>(seed));
    Result result;
    for (int n = 0; n < kOutputs; ++n) result.outputs[n] = outputs[n].from_device();
    result.state = state.from_device();
    return result;
  }

  void start(ScanArgs args, int most_blocks) const {
    const Layout& lay = args.layout;
    const std::int64_t bytes = cuda::workspace_bytes(lay, sizeof(cuda::LookbackWord<V>));
    args.workspace =
        emulator::allocate("words", static_cast<std::size_t>(bytes), emulator::Use::write);
    // What an earlier scan left: carries, which the scan must not take for its own.
    for (std::int64_t i = 0; i + 16 <= bytes; i += sizeof(cuda::LookbackWord<V>)) {
      const cuda::LookbackWord<V> stale = cuda::LookbackWord<V>::carry(V(1e6));
      std::memcpy(static_cast<char*>(args.workspace) + i, &stale, sizeof stale);
    }
    auto* const tickets = reinterpret_cast<cuda::Tickets::Shared*>(
        static_cast<char*>(args.workspace) + bytes - cuda::kTicketBytes);
    const int stages = most_blocks % 2 ? 1 : Scan::Memory::kMostStages;  // both are to be right
    if (lay.sequences > 1) args.short_length = case_.short_length;
    if (args.short_length >= 0) {
      if constexpr (!kBackward && kAligned) {
        using Short = cuda::ShortScan<CellOf, cuda::UsualOptions, T>;
        emulator::launch({"short scan", Short::blocks(lay), Short::threads(lay), 0, true, [=] {
                            cuda::short_kernel<CellOf, cuda::UsualOptions, T>(
                                args, cuda::UsualOptions{}, tickets);
                          }});
      }
    } else {
      emulator::launch(
          {"clear", 1 + static_cast<unsigned>(bytes / 16 / 1024), 256, 0, false,
           [=] { cuda::clear_lookback_kernel(static_cast<uint4*>(args.workspace), bytes / 16); }});
    }
    const std::int64_t tiles =
        lay.chunk_bound() * ((lay.channels + Scan::G::kChannels - 1) / Scan::G::kChannels);
    emulator::launch(
        {"scan", static_cast<unsigned>(std::min<std::int64_t>(tiles, most_blocks)), Scan::kThreads,
         static_cast<std::size_t>(Scan::Memory::shared_bytes(stages)), true, [=] {
           cuda::tile_kernel<CellOf, cuda::UsualOptions, T, kAligned>(args, tickets, stages);
         }});
  }

  std::vector<V> state_of(const std::vector<V>& all, long row) const {
    const auto from = all.begin() + row * case_.channels;
    return std::vector<V>(from, from + case_.channels);
  }
  void check_piece(const Piece& piece, const Result& whole, std::vector<V>* state,
                   const std::string& what) const {
    const Result alone = run(piece, *state);
    const std::string when = " of sequence " + std::to_string(piece.sequence) + " " + what;
    for (int n = 0; n < kOutputs; ++n) {
      const auto from = whole.outputs[n].begin() + piece.from * stride_;
      same_bits(alone.outputs[n],
                std::vector<T>(from, from + static_cast<long>(alone.outputs[n].size())), when);
    }
    *state = alone.state;
  }

  // A serial loop in doubles; what nothing may touch is looked at too.
  void check_values(const Result& result) const {
    std::vector<double> state(state_.begin(), state_.end());
    for (long s = 0; s <= sequences(); ++s) {
      const long from = begin_[s], to = s == sequences() ? tokens_ : begin_[s + 1];
      const long at = s == sequences() ? -1 : slot(s);
      for (long c = 0; c < case_.channels; ++c) {
        double h = at >= 0 ? state[at * case_.channels + c] : 0;
        for (long p = 0; p < to - from; ++p) {
          const long row = case_.reverse ? to - 1 - p : from + p;
          double in[kInputs], out[kOutputs] = {};
          if (at >= 0) {
            for (int n = 0; n < kInputs; ++n)
              in[n] = value_of(inputs_[n].values[row * stride_ + c]);
            if (kBackward) in[Cell::kPrevious < 0 ? 0 : Cell::kPrevious] = before(s, row, c);
            cuda::Parameters<double, kParameters> parameters;
            if constexpr (kParameters > 0) {
              for (int n = 0; n < kParameters; ++n) {
                parameters.at[n] = parameters_[n * case_.channels + c];
              }
            }
            const auto step = CellOf<double>::coefficients(cuda::UsualOptions{}, in, parameters);
            const double after = step.a * h + step.b;
            CellOf<double>::outputs(cuda::UsualOptions{}, in, h, after, out);
            h = after;
          }
          for (int n = 0; n < kOutputs; ++n) {
            check_value<T>(value_of(result.outputs[n][row * stride_ + c]), out[n], "output", row,
                           c);
          }
        }
        if (at >= 0) state[at * case_.channels + c] = h;
      }
    }
    for (long i = 0; i < rows_ * case_.channels; ++i) {
      check_value<T>(static_cast<double>(result.state[i]), state[i], "state", i / case_.channels,
                     i % case_.channels);
    }
    for (long row = 0; row < tokens_; ++row) {
      for (long c = case_.channels; c < stride_; ++c) {
        for (int n = 0; n < kOutputs; ++n) {
          check_value<T>(value_of(result.outputs[n][row * stride_ + c]), NAN, "between rows", row,
                         c);
        }
      }
    }
  }
  // The state before a row in the forward direction, which is against this scan's.
  double before(long s, long row, long channel) const {
    const bool first = case_.reverse ? row == begin_[s] : row == begin_[s + 1] - 1;
    if (first) return static_cast<double>(previous_[s * case_.channels + channel]);
    const long at = case_.reverse ? row - 1 : row + 1;
    return value_of(
        inputs_[Cell::kPrevious < 0 ? 0 : Cell::kPrevious].values[at * stride_ + channel]);
  }

  Case case_;
  long stride_, tokens_ = 0, rows_ = 0;
  std::vector<int> begin_;
  Tensor<T> inputs_[kInputs];
  std::vector<V> state_, previous_;
  std::vector<float> parameters_;
};

template <template <class> class CellOf>
void check(const Case& given, const std::string& type, bool aligned) {
  if (type == "f32" && aligned) return Driver<CellOf, float, true>(given).check();
  if (type == "bf16" && aligned) return Driver<CellOf, bf16, true>(given).check();
#ifdef ALL_TYPES
  if (type == "f32") return Driver<CellOf, float, false>(given).check();
  if (type == "bf16") return Driver<CellOf, bf16, false>(given).check();
  if (type == "f64") return Driver<CellOf, double, false>(given).check();
#endif
  Options::usage("--type " + type);
}

}  // namespace
}  // namespace minserve

int main(int count, char** arguments) {
  using namespace minserve;
  Options options(count, arguments);
  Case given;
  const std::string type = options.text("type", "f32");
  const bool backward = options.number("backward", 0);
  given.lengths = options.numbers("lengths", "1,300,0,128,129,64");
  given.slots = options.numbers("slots", "");
  given.packed = !given.slots.empty();
  given.channels = options.number("channels", 64);
  given.tail = options.number("tail", 0);
  given.extra_stride = options.number("extra-stride", 0);
  given.shift = options.number("shift", 0);
  given.reverse = options.number("reverse", 0);
  given.nan = options.number("nan", 0);
  given.short_length = options.number("short", -1);
  given.blocks = options.numbers("blocks", "1,2,7,50");
  given.seeds = options.numbers("seeds", "1");
  options.none_left();
  const long size = type == "f64" ? 8 : type == "f32" ? 4 : 2;
  const bool aligned = size < 8 && given.shift == 0 && given.channels * size % 16 == 0 &&
                       given.extra_stride * size % 16 == 0;
  if (given.short_length >= 0 && (backward || !aligned)) Options::usage("--short");
  if constexpr (cuda::kIsThere<cuda::BACKWARD_CELL<float>>) {
    if (backward) check<cuda::BACKWARD_CELL>(given, type, aligned);
  } else {
    if (backward) Options::usage("--backward");
  }
  if (!backward) check<cuda::FORWARD_CELL>(given, type, aligned);
  std::puts("ok");
  return 0;
}
