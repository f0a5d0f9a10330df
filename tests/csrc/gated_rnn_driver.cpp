// Runs csrc/gated_rnn in the emulator: scans and steps, compared with doubles. Every schedule,
// number of blocks and place of the weight, other sequences beside and every split of the sequences
// must give the same bits.
#include "cases.h"

#include "gated_rnn/decode.cuh"
#include "gated_rnn/scan.cuh"
#include "gated_rnn/step.cuh"

namespace minserve {
namespace {

struct Case {
  std::vector<int> lengths, slots;
  long tail, units, extra_stride;
  bool bias, float_bias;
  std::vector<int> seeds, splits, multiprocessors;
};

constexpr std::int64_t kShared = 227 * 1024, kLittleShared = 80 * 1024;  // of a block

double sigmoid_of(double x) {
  return 1 / (1 + std::exp(-x));
}

// Tokens of one sequence.
struct Piece {
  int sequence, from, to;
};

template <class T, class Unit>
class Driver {
 public:
  static constexpr int kGates = Unit::kGates;
  static constexpr bool kLstm = kGates == kLstmGates;

  explicit Driver(const Case& given) : case_(given) {
    begin_ = {0};
    for (int length : case_.lengths) begin_.push_back(begin_.back() + length);
    rows_ = sequences() + 2;  // a slot beyond is none
    const long all = begin_.back() + case_.tail, wide = kGates * case_.units;
    pre_ = numbers<T>(all * wide, 1, 1.0f);
    weight_ = numbers<T>(wide * case_.units, 2, 1.0f / std::sqrt(static_cast<float>(case_.units)));
    bias_ = numbers<T>(wide, 3, 0.5f);
    states_[0] = numbers<float>(rows_ * stride(), 4, 0.5f);
    states_[1] = numbers<float>(rows_ * stride(), 5, 0.5f);
  }

  void check() {
    const int multiprocessors = case_.multiprocessors[0];
    const Result first = scan(whole(), initial(), case_.seeds[0], multiprocessors, kShared);
    check_values(first);
    for (int seed : case_.seeds) {
      same(scan(whole(), initial(), seed, multiprocessors, kShared), first,
           " with seed " + std::to_string(seed));
    }
    for (int count : case_.multiprocessors) {
      same(scan(whole(), initial(), case_.seeds.back(), count, kShared), first,
           " on " + std::to_string(count) + " multiprocessors");
    }
    same(scan(whole(), initial(), case_.seeds.back(), multiprocessors, kLittleShared), first,
         " with the weight in global memory");
    for (int split : case_.splits) check_split(split, first);
    check_alone(first);
    check_steps();
    if constexpr (sizeof(T) == 2) {
      if (case_.units % 8 == 0 && case_.extra_stride % 8 == 0) check_decode();
    }
  }

 private:
  struct Result {
    std::vector<T> h;  // by rows of all tokens, of which some may be left out
    std::vector<float> states[2];
  };

  template <class U>
  static std::vector<U> numbers(long count, unsigned seed, float scale) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal(0.0f, scale);
    std::vector<U> all;
    for (long i = 0; i < count; ++i) all.push_back(rounded<U>(normal(random)));
    return all;
  }
  static std::size_t at(long i) { return static_cast<std::size_t>(i); }
  long stride() const { return case_.units + case_.extra_stride; }
  int sequences() const { return static_cast<int>(case_.lengths.size()); }
  std::vector<Piece> whole() const {
    std::vector<Piece> pieces;
    for (int s = 0; s < sequences(); ++s) pieces.push_back({s, 0, case_.lengths[at(s)]});
    return pieces;
  }
  Result initial() const {
    Result result;
    result.h.assign(at((begin_.back() + case_.tail) * case_.units), rounded<T>(NAN));
    for (int i = 0; i < 2; ++i) result.states[i] = states_[i];
    return result;
  }
  bool real(int s) const { return case_.slots[at(s)] >= 0 && case_.slots[at(s)] < rows_; }

  // The inputs of some pieces, with the padding tail, on the device.
  struct Given {
    GatedRnnArgs args;
    std::vector<long> rows;  // of the whole
    Tensor<T> pre{"pre"}, recurrent{"recurrent"}, weight{"weight"}, bias{"bias"}, h{"h"};
    Tensor<float> wide_bias{"bias"}, states[2] = {{"hidden"}, {"cell"}};
    Tensor<std::int32_t> slots{"slots"}, cu_seqlens{"cu_seqlens"};
  };
  Stream stream_of(Tensor<T>& to, const std::vector<T>& from, const std::vector<long>& rows,
                   long width, emulator::Use use) const {
    const long apart = width + case_.extra_stride;
    to.values.assign(rows.size() * at(apart), rounded<T>(NAN));
    for (std::size_t r = 0; r < rows.size() && !from.empty(); ++r) {
      std::copy_n(from.begin() + rows[r] * width, width,
                  to.values.begin() + static_cast<long>(r) * apart);
    }
    to.to_device(use);
    return {to.device, apart};
  }
  void prepare(Given& given, const std::vector<Piece>& pieces, long tail,
               const Result& before) const {
    emulator::free_all();
    given.cu_seqlens.values = {0};
    for (const Piece& piece : pieces) {
      for (int t = piece.from; t < piece.to; ++t) {
        given.rows.push_back(begin_[at(piece.sequence)] + t);
      }
      given.slots.values.push_back(case_.slots[at(piece.sequence)]);
      given.cu_seqlens.values.push_back(static_cast<std::int32_t>(given.rows.size()));
    }
    for (long t = 0; t < tail; ++t) given.rows.push_back(begin_.back() + t);
    GatedRnnArgs& args = given.args;
    const auto read = emulator::Use::read, write = emulator::Use::write;
    const long wide = kGates * case_.units;
    args.pre = stream_of(given.pre, pre_, given.rows, wide, read);
    args.h = stream_of(given.h, {}, given.rows, case_.units, write);
    std::vector<long> all;
    for (long r = 0; r < wide; ++r) all.push_back(r);
    args.weight = stream_of(given.weight, weight_, all, case_.units, read);
    if (case_.bias && case_.float_bias) {
      for (T number : bias_) given.wide_bias.values.push_back(static_cast<float>(value_of(number)));
      given.wide_bias.to_device(read);
      args.bias = {given.wide_bias.device, true};
    } else if (case_.bias) {
      given.bias.values = bias_;
      given.bias.to_device(read);
      args.bias = {given.bias.device, false};
    }
    for (int i = 0; i < (kLstm ? 2 : 1); ++i) {
      given.states[i].values = before.states[i];
      given.states[i].to_device(write);
      (i ? args.cell : args.hidden) = StateRows{given.states[i].device, stride()};
    }
    given.slots.to_device(read);
    Layout& lay = args.layout;
    lay.sequences = static_cast<long>(pieces.size());
    lay.tokens = static_cast<long>(given.rows.size());
    lay.channels = case_.units;
    lay.slots = given.slots.device;
    lay.num_slots = rows_;
  }
  Result result_of(const Given& given, const Result& before) const {
    Result result = before;
    const std::vector<T> h = given.h.from_device();
    const long apart = given.args.h.stride;
    for (std::size_t r = 0; r < given.rows.size(); ++r) {
      const auto from = h.begin() + static_cast<long>(r) * apart;
      std::copy_n(from, case_.units, result.h.begin() + given.rows[r] * case_.units);
      for (long i = case_.units; i < apart; ++i) {
        if (value_of(from[i]) == value_of(from[i])) differ("written between rows of h");
      }
    }
    for (int i = 0; i < (kLstm ? 2 : 1); ++i) result.states[i] = given.states[i].from_device();
    return result;
  }

  Result scan(const std::vector<Piece>& pieces, const Result& before, int seed, int multiprocessors,
              std::int64_t shared, long tail = -1) const {
    Given given;
    prepare(given, pieces, tail < 0 ? case_.tail : tail, before);
    given.cu_seqlens.to_device(emulator::Use::read);
    GatedRnnArgs args = given.args;
    args.layout.cu_seqlens = given.cu_seqlens.device;
    const std::size_t bytes = at(cuda::gated_exchange_bytes(args, sizeof(T)));
    void* const exchange = emulator::allocate("exchange", bytes, emulator::Use::write);
    cuda::with_gated_scan<T, kGates>(
        args, {multiprocessors, shared}, exchange, [&](auto kind, const cuda::GatedScanGrid& grid) {
          using Kind = decltype(kind);
          if (grid.blocks > multiprocessors) differ("more blocks than run at once");
          std::memset(exchange, 0, at(grid.blocks) * cuda::kFlagBytes);
          const cuda::GatedScanPlan plan = grid.plan;
          emulator::launch(
              {"gated scan", static_cast<unsigned>(grid.blocks), cuda::kScanThreads,
               at(grid.shared_bytes), false,
               [=] { cuda::gated_scan_kernel<T, Unit, Kind::kTiles, Kind::kShared>(args, plan); }});
        });
    emulator::run(static_cast<unsigned>(seed));
    return result_of(given, before);
  }

  // Every sequence read up to a token, then from there.
  void check_split(int split, const Result& first) const {
    std::vector<Piece> early, late;
    for (const Piece& piece : whole()) {
      const int middle = std::min(split, piece.to);
      early.push_back({piece.sequence, 0, middle});
      late.push_back({piece.sequence, middle, piece.to});
    }
    const int seed = case_.seeds.back(), count = case_.multiprocessors[0];
    const Result before = scan(early, initial(), seed, count, kShared);
    same(scan(late, before, seed, count, kShared), first, " split at " + std::to_string(split));
  }

  // The longest sequence without the others.
  void check_alone(const Result& first) const {
    int longest = 0;
    for (int s = 0; s < sequences(); ++s) {
      if (real(s) && case_.lengths[at(s)] > case_.lengths[at(longest)]) longest = s;
    }
    const Result alone = scan({whole()[at(longest)]}, initial(), case_.seeds.back(),
                              case_.multiprocessors[0], kShared, 0);
    for (long row = begin_[at(longest)]; row < begin_[at(longest) + 1]; ++row) {
      const auto part = [&](const Result& result) {
        const auto from = result.h.begin() + row * case_.units;
        return std::vector<T>(from, from + case_.units);
      };
      same_bits(part(alone), part(first), " alone");
    }
  }

  void same(const Result& got, const Result& want, const std::string& when) const {
    same_bits(got.h, want.h, when);
    for (int i = 0; i < 2; ++i) same_bits(got.states[i], want.states[i], " of the state" + when);
  }

  // The cell in doubles.
  static void advance(const std::vector<double>& pre, const std::vector<double>& of_h, long units,
                      std::vector<double>& h, std::vector<double>& c) {
    for (long u = 0; u < units; ++u) {
      const auto x = [&](int gate) { return pre[at(gate * units + u)]; };
      const auto y = [&](int gate) { return of_h[at(gate * units + u)]; };
      if (kLstm) {
        c[at(u)] =
            sigmoid_of(x(1) + y(1)) * c[at(u)] + sigmoid_of(x(0) + y(0)) * std::tanh(x(2) + y(2));
        h[at(u)] = sigmoid_of(x(kGates - 1) + y(kGates - 1)) * std::tanh(c[at(u)]);
      } else {
        const double r = sigmoid_of(x(0) + y(0)), z = sigmoid_of(x(1) + y(1));
        h[at(u)] = (1 - z) * std::tanh(x(2) + r * y(2)) + z * h[at(u)];
      }
    }
  }
  std::vector<double> row_of(const std::vector<T>& from, long row) const {
    std::vector<double> values;
    const long wide = kGates * case_.units;
    for (long i = 0; i < wide; ++i) values.push_back(value_of(from[at(row * wide + i)]));
    return values;
  }
  std::vector<double> state_of(int which, long slot) const {
    const auto from = states_[which].begin() + slot * stride();
    return std::vector<double>(from, from + case_.units);
  }

  // A serial loop in doubles; what nothing may touch is looked at too.
  void check_values(const Result& result) const {
    const long units = case_.units;
    std::vector<float> wanted[2] = {states_[0], states_[1]};
    for (int s = 0; s <= sequences(); ++s) {
      const bool reads = s < sequences() && real(s);
      const long begin = begin_[at(s)];
      const long end = s == sequences() ? begin + case_.tail : begin_[at(s + 1)];
      const long slot = reads ? case_.slots[at(s)] : 0;
      std::vector<double> h = state_of(0, slot), c = state_of(1, slot);
      for (long row = begin; row < end; ++row) {
        if (reads) {
          std::vector<double> of_h(at(kGates * units));
          for (long g = 0; g < kGates * units; ++g) {
            double sum = case_.bias ? value_of(bias_[at(g)]) : 0.0;
            for (long k = 0; k < units; ++k) {
              sum += value_of(weight_[at(g * units + k)]) * value_of(rounded<T>(h[at(k)]));
            }
            of_h[at(g)] = sum;
          }
          advance(row_of(pre_, row), of_h, units, h, c);
        }
        for (long u = 0; u < units; ++u) {
          check_value<T>(value_of(result.h[at(row * units + u)]), reads ? h[at(u)] : 0.0, "h", row,
                         u);
        }
      }
      if (!reads || begin == end) continue;
      for (long u = 0; u < units; ++u) {
        const std::size_t place = at(slot * stride() + u);
        check_value<T>(static_cast<double>(result.states[0][place]), h[at(u)], "hidden", slot, u);
        wanted[0][place] = result.states[0][place];
        if (!kLstm) continue;
        check_value<T>(static_cast<double>(result.states[1][place]), c[at(u)], "cell", slot, u);
        wanted[1][place] = result.states[1][place];
      }
    }
    for (int i = 0; i < 2; ++i) {
      same_bits(result.states[i], wanted[i], " of what no sequence has");
    }
  }

  // The first token of every sequence, from products that are other pre-activations.
  void check_steps() const {
    std::vector<Piece> pieces;
    for (int s = 0; s < sequences(); ++s) {
      if (case_.lengths[at(s)] > 0) pieces.push_back({s, 0, 1});
    }
    if (pieces.empty()) return;  // the operator launches nothing then
    const Result one = steps<1>(pieces);
    if (case_.units % 4 == 0 && case_.extra_stride % 4 == 0) same(steps<4>(pieces), one, " of 4");
    for (const Piece& piece : pieces) {
      const int s = piece.sequence;
      const long row = begin_[at(s)], slot = real(s) ? case_.slots[at(s)] : 0;
      std::vector<double> h = state_of(0, slot), c = state_of(1, slot);
      advance(row_of(pre_, row), row_of(pre_, other_row(row)), case_.units, h, c);
      for (long u = 0; u < case_.units; ++u) {
        const double wanted = real(s) ? h[at(u)] : 0.0;
        check_value<T>(value_of(one.h[at(row * case_.units + u)]), wanted, "h of a step", row, u);
        if (!real(s)) continue;
        const std::size_t place = at(slot * stride() + u);
        check_value<float>(static_cast<double>(one.states[0][place]), h[at(u)], "hidden", slot, u);
        if (kLstm) {
          check_value<float>(static_cast<double>(one.states[1][place]), c[at(u)], "cell", slot, u);
        }
      }
    }
  }
  long other_row(long row) const { return (row + 1) % (begin_.back() + case_.tail); }
  template <int kVec>
  Result steps(const std::vector<Piece>& pieces) const {
    Given given;
    prepare(given, pieces, 0, initial());
    GatedRnnArgs args = given.args;
    std::vector<long> others;
    for (long row : given.rows) others.push_back(other_row(row));
    args.recurrent =
        stream_of(given.recurrent, pre_, others, kGates * case_.units, emulator::Use::read);
    if (kVec > 1 && !cuda::steps_in_vectors<T, kVec>(args)) differ("this case is not aligned");
    const cuda::Grid grid = cuda::gated_step_grid<kVec>(args.layout);
    emulator::launch({"gated step", grid.blocks.x, grid.threads, 0, true,
                      [=] { cuda::gated_step_kernel<T, Unit, kVec>(args); }, grid.blocks.y});
    emulator::run(static_cast<unsigned>(case_.seeds.back()));
    return result_of(given, initial());
  }

  // The first tokens of up to eight sequences, whose x are rows of numbers of another width.
  void check_decode() const {
    constexpr long kWidth = 56;
    std::vector<Piece> pieces;
    for (int s = 0; s < sequences() && pieces.size() < 8; ++s) {
      if (case_.lengths[at(s)] > 0) pieces.push_back({s, 0, 1});
    }
    if (pieces.empty()) return;
    const long wide = kGates * case_.units, count = static_cast<long>(pieces.size());
    const std::vector<T> x = numbers<T>(count * kWidth, 7, 1.0f);
    const std::vector<T> weight = numbers<T>(wide * kWidth, 8, 0.2f);
    const std::vector<T> bias = numbers<T>(wide, 9, 0.5f);
    Result first;
    for (int seed : case_.seeds) {
      Given given;
      prepare(given, pieces, 0, initial());
      GatedDecodeArgs args;
      args.step = given.args;
      Tensor<T> of_x{"x"}, of_weight{"W"}, of_bias{"b"};
      Tensor<float> next{"next"};
      of_x.values = x, of_weight.values = weight, of_bias.values = bias;
      next.values.assign(at(count * case_.units), NAN);
      for (Tensor<T>* tensor : {&of_x, &of_weight, &of_bias}) {
        tensor->to_device(emulator::Use::read);
      }
      next.to_device(emulator::Use::write);
      args.x = {of_x.device, kWidth};
      args.width = kWidth;
      args.input_weight = {of_weight.device, kWidth};
      args.input_bias = {of_bias.device, false};
      args.next = next.device;
      emulator::launch({"gated decode", static_cast<unsigned>(case_.units / 8), cuda::kScanThreads,
                        at(cuda::decode_shared_bytes<kGates>(kWidth, case_.units)), true,
                        [=] { cuda::gated_decode_kernel<T, Unit>(args); }});
      const cuda::Grid grid = cuda::row_grid(count, case_.units);
      emulator::launch({"states", grid.blocks.x, grid.threads, 0, true,
                        [=] { cuda::move_hidden_kernel(args); }, grid.blocks.y});
      emulator::run(static_cast<unsigned>(seed));
      const Result result = result_of(given, initial());
      if (seed == case_.seeds[0]) first = result;
      same(result, first, " of a decode step");
    }
    for (long i = 0; i < count; ++i) {
      const int s = pieces[at(i)].sequence;
      const long row = begin_[at(s)], slot = real(s) ? case_.slots[at(s)] : 0;
      std::vector<double> h = state_of(0, slot), c = state_of(1, slot);
      std::vector<double> of_x(at(wide)), of_h(at(wide));
      for (long g = 0; g < wide; ++g) {
        of_x[at(g)] = value_of(bias[at(g)]);
        for (long k = 0; k < kWidth; ++k) {
          of_x[at(g)] += value_of(weight[at(g * kWidth + k)]) * value_of(x[at(i * kWidth + k)]);
        }
        of_h[at(g)] = case_.bias ? value_of(bias_[at(g)]) : 0.0;
        for (long k = 0; k < case_.units; ++k) {
          of_h[at(g)] +=
              value_of(weight_[at(g * case_.units + k)]) * value_of(rounded<T>(h[at(k)]));
        }
      }
      advance(of_x, of_h, case_.units, h, c);
      for (long u = 0; u < case_.units; ++u) {
        check_value<T>(value_of(first.h[at(row * case_.units + u)]), real(s) ? h[at(u)] : 0.0,
                       "h of a decode step", row, u);
        if (!real(s)) continue;
        const std::size_t place = at(slot * stride() + u);
        check_value<float>(static_cast<double>(first.states[0][place]), h[at(u)], "hidden", slot,
                           u);
        if (kLstm) {
          check_value<float>(static_cast<double>(first.states[1][place]), c[at(u)], "cell", slot,
                             u);
        }
      }
    }
  }

  const Case case_;
  long rows_ = 0;
  std::vector<int> begin_;
  std::vector<T> pre_, weight_, bias_;
  std::vector<float> states_[2];
};

// Of an H200: where the weight is, and by how many sequences it is multiplied at once.
template <class T, int kGates>
int kind_of(long units, long sequences) {
  GatedRnnArgs args;
  args.layout.channels = args.weight.stride = units;
  args.layout.sequences = sequences;
  int found = 0;
  cuda::with_gated_scan<T, kGates>(args, {132, kShared}, nullptr,
                                   [&](auto kind, const cuda::GatedScanGrid& grid) {
                                     found = decltype(kind)::kTiles + 10 * decltype(kind)::kShared;
                                     if (grid.blocks > 132) differ("too many blocks");
                                   });
  return found;
}
void check_choice() {
  const bool right =
      kind_of<bf16, kGruGates>(1024, 1) == 11 && kind_of<bf16, kGruGates>(1024, 9) == 14 &&
      kind_of<bf16, kGruGates>(1024, 64) == 18 && kind_of<bf16, kLstmGates>(1024, 64) == 18 &&
      kind_of<float, kGruGates>(1024, 64) == 18 && kind_of<float, kLstmGates>(1024, 64) == 18 &&
      kind_of<bf16, kGruGates>(2048, 1) == 11 && kind_of<bf16, kGruGates>(2048, 64) == 14 &&
      kind_of<bf16, kLstmGates>(2048, 1) == 1 && kind_of<bf16, kLstmGates>(2048, 64) == 8 &&
      kind_of<bf16, kGruGates>(8, 1000) == 18 && kind_of<float, kLstmGates>(4096, 1) == 1;
  if (!right) differ("another kernel is chosen");
}

template <class T>
void check(const Case& given, bool lstm) {
  if (lstm) return Driver<T, cuda::LstmUnit<float>>(given).check();
  Driver<T, cuda::GruUnit<float>>(given).check();
}

}  // namespace
}  // namespace minserve

int main(int count, char** arguments) {
  using namespace minserve;
  Options options(count, arguments);
  Case given;
  const std::string type = options.text("type", "bf16"), cell = options.text("cell", "gru");
  given.lengths = options.numbers("lengths", "1,6,0,3,5,2");
  given.slots = options.numbers("slots", "3,0,5,-1,1,99");
  given.tail = options.number("tail", 3);
  given.units = options.number("units", 40);
  given.extra_stride = options.number("extra-stride", 0);
  given.bias = options.number("bias", 1);
  given.float_bias = options.number("float-bias", 1);
  given.splits = options.numbers("splits", "1,4");
  given.seeds = options.numbers("seeds", "0,1");
  given.multiprocessors = options.numbers("multiprocessors", "4,1,8");
  options.none_left();
  check_choice();
  if (type == "f32") {
    check<float>(given, cell == "lstm");
  } else if (type == "bf16") {
    check<bf16>(given, cell == "lstm");
  } else if (type == "f16") {
    check<f16>(given, cell == "lstm");
  } else {
    Options::usage("--type " + type);
  }
  std::puts("ok");
  return 0;
}
