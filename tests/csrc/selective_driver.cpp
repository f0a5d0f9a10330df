// Runs csrc/selective in the emulator: scans and steps, compared with doubles. Every schedule,
// every share of the states per thread and, with fp32 states, every split of the sequences and
// steps must give the same bits.
#include "cases.h"

#include "selective/scan.cuh"
#include "selective/step.cuh"

namespace minserve {
namespace {

struct Case {
  std::vector<int> lengths, slots;
  long tail, channels, states, extra_stride;
  bool gate, half_state, float_vectors;
  std::vector<int> seeds, splits;
};

double silu_of(double x) {
  return x / (1 + std::exp(-x));
}

// Tokens of one sequence.
struct Piece {
  int sequence, from, to;
};

template <class T, class State>
class Driver {
 public:
  explicit Driver(const Case& given) : case_(given) {
    begin_ = {0};
    for (int length : case_.lengths) begin_.push_back(begin_.back() + length);
    rows_ = sequences() + 2;  // a slot beyond is none
    const long all = begin_.back() + case_.tail, channels = case_.channels, states = case_.states;
    x_ = numbers<T>(all * channels, 1, 1.0f);
    dt_ = numbers<T>(all * channels, 2, 3.0f);
    z_ = numbers<T>(all * channels, 3, 3.0f);
    b_ = numbers<T>(all * states, 4, 1.0f);
    c_ = numbers<T>(all * states, 5, 1.0f);
    d_ = numbers<T>(channels, 6, 1.0f);
    bias_ = numbers<T>(channels, 7, 1.0f);
    state_ = numbers<State>(rows_ * slot_stride(), 8, 1.0f);
    a_ = numbers<float>(channels * states, 9, 2.0f);
    for (float& a : a_) a = -0.01f - a * a;
    // What an added zero would change: a channel that has and gets nothing.
    for (long r = 0; r < rows_; ++r) {
      for (long n = 0; n < states; ++n) state_[at(r * slot_stride() + n)] = rounded<State>(-0.0);
    }
    for (long t = 0; t < all; ++t) x_[at(t * channels)] = rounded<T>(-0.0);
  }

  void check() {
    const Result first = scan<cuda::AnyTile>(whole(), state_, case_.seeds[0]);
    check_values(first);
    for (int seed : case_.seeds) {
      const std::string when = " with seed " + std::to_string(seed);
      same(scan<cuda::AnyTile>(whole(), state_, seed), first, when);
      if (case_.states <= 16 && in_vectors()) {
        same(scan<cuda::UsualTile>(whole(), state_, seed), first, " of the usual tile" + when);
        same(scan<cuda::FewChainsTile>(whole(), state_, seed), first, " of few chains" + when);
        same(scan<cuda::ThreeBlocksTile>(whole(), state_, seed), first, " of three blocks" + when);
      }
    }
    // A state of two bytes is rounded at the end of every call.
    for (int split : case_.splits) {
      if (!case_.half_state) check_split(split, first);
    }
    if (!case_.half_state || longest() <= 1) check_steps(first);
  }

 private:
  struct Result {
    std::vector<T> y;  // by rows of all tokens, of which some may be left out
    std::vector<State> state;
  };

  template <class U>
  static std::vector<U> numbers(long count, unsigned seed, float scale) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal(0.0f, scale);
    std::vector<U> all;
    for (long i = 0; i < count; ++i) all.push_back(rounded<U>(normal(random)));
    return all;
  }
  long slot_stride() const { return case_.channels * case_.states + case_.extra_stride; }
  int longest() const { return *std::max_element(case_.lengths.begin(), case_.lengths.end()); }
  int sequences() const { return static_cast<int>(case_.lengths.size()); }
  bool in_vectors() const {
    return case_.states % 4 == 0 && case_.channels % 4 == 0 && case_.extra_stride % 4 == 0;
  }
  std::vector<Piece> whole() const {
    std::vector<Piece> pieces;
    for (int s = 0; s < sequences(); ++s) pieces.push_back({s, 0, case_.lengths[at(s)]});
    return pieces;
  }
  static std::size_t at(long i) { return static_cast<std::size_t>(i); }

  // The inputs of some pieces, with the padding tail, on the device.
  struct Given {
    SelectiveArgs args;
    std::vector<long> rows;  // of the whole
    Tensor<T> x{"x"}, dt{"dt"}, z{"z"}, b{"B"}, c{"C"}, d{"D"}, bias{"dt_bias"}, y{"y"};
    Tensor<float> wide_d{"D"}, wide_bias{"dt_bias"}, a{"A"};
    Tensor<State> state{"state"};
    Tensor<std::int32_t> slots{"slots"}, cu_seqlens{"cu_seqlens"};
  };
  Stream stream_of(Given& given, Tensor<T>& to, const std::vector<T>& from, long width,
                   emulator::Use use) const {
    const long stride = width + case_.extra_stride;
    to.values.assign(given.rows.size() * at(stride), rounded<T>(NAN));
    for (std::size_t r = 0; r < given.rows.size() && !from.empty(); ++r) {
      std::copy_n(from.begin() + given.rows[r] * width, width,
                  to.values.begin() + static_cast<long>(r) * stride);
    }
    to.to_device(use);
    return {to.device, stride};
  }
  void prepare(Given& given, const std::vector<Piece>& pieces, long tail,
               const std::vector<State>& state) const {
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
    SelectiveArgs& args = given.args;
    const auto read = emulator::Use::read, write = emulator::Use::write;
    args.x = stream_of(given, given.x, x_, case_.channels, read);
    args.dt = stream_of(given, given.dt, dt_, case_.channels, read);
    args.B = stream_of(given, given.b, b_, case_.states, read);
    args.C = stream_of(given, given.c, c_, case_.states, read);
    if (case_.gate) args.z = stream_of(given, given.z, z_, case_.channels, read);
    args.y = stream_of(given, given.y, {}, case_.channels, write);
    given.a.values = a_;
    given.a.to_device(read);
    args.A = given.a.device;
    args.D = vector_of(given.d, given.wide_d, d_);
    args.dt_bias = vector_of(given.bias, given.wide_bias, bias_);
    given.state.values = state;
    given.state.to_device(write);
    given.slots.to_device(read);
    args.state = given.state.device;
    args.slot_stride = slot_stride();
    args.half_state = case_.half_state;
    args.states = case_.states;
    Layout& lay = args.layout;
    lay.sequences = static_cast<long>(pieces.size());
    lay.tokens = static_cast<long>(given.rows.size());
    lay.channels = case_.channels;
    lay.slots = given.slots.device;
    lay.num_slots = rows_;
  }
  ChannelVector vector_of(Tensor<T>& own, Tensor<float>& wide, const std::vector<T>& from) const {
    if (!case_.float_vectors) {
      own.values = from;
      own.to_device(emulator::Use::read);
      return {own.device, false};
    }
    for (T number : from) wide.values.push_back(static_cast<float>(value_of(number)));
    wide.to_device(emulator::Use::read);
    return {wide.device, true};
  }
  Result result_of(const Given& given, const Result* before) const {
    Result result;
    if (before) {
      result.y = before->y;
    } else {
      result.y.assign(at((begin_.back() + case_.tail) * case_.channels), rounded<T>(NAN));
    }
    const std::vector<T> y = given.y.from_device();
    const long stride = given.args.y.stride;
    for (std::size_t r = 0; r < given.rows.size(); ++r) {
      const auto from = y.begin() + static_cast<long>(r) * stride;
      std::copy_n(from, case_.channels, result.y.begin() + given.rows[r] * case_.channels);
      for (long i = case_.channels; i < stride; ++i) {
        if (value_of(from[i]) == value_of(from[i])) differ("written between rows of y");
      }
    }
    result.state = given.state.from_device();
    return result;
  }

  template <class Tile>
  Result scan(const std::vector<Piece>& pieces, const std::vector<State>& state, int seed,
              const Result* before = nullptr) const {
    if constexpr (Tile::kVec == 1) {
      if (case_.states > 64) return scan_with<cuda::States256Tile>(pieces, state, seed, before);
      if (case_.states > 16) return scan_with<cuda::States64Tile>(pieces, state, seed, before);
    }
    return scan_with<Tile>(pieces, state, seed, before);
  }
  template <class Tile>
  Result scan_with(const std::vector<Piece>& pieces, const std::vector<State>& state, int seed,
                   const Result* before) const {
    Given given;
    prepare(given, pieces, case_.tail, state);
    given.cu_seqlens.to_device(emulator::Use::read);
    SelectiveArgs args = given.args;
    args.layout.cu_seqlens = given.cu_seqlens.device;
    if (Tile::kVec > 1 && !cuda::scans_in_vectors<T>(args)) differ("this case is not aligned");
    emulator::launch({"selective scan", static_cast<unsigned>(cuda::scan_blocks<Tile>(args.layout)),
                      Tile::kThreads, Tile::kSharedBytes, true,
                      [=] { cuda::selective_scan_kernel<T, Tile>(args); }});
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
    const int seed = case_.seeds.back();
    const Result before = scan<cuda::AnyTile>(early, state_, seed);
    same(scan<cuda::AnyTile>(late, before.state, seed, &before), first,
         " split at " + std::to_string(split));
  }

  // Every sequence read in steps; they end one after another.
  void check_steps(const Result& first) const {
    if (case_.states > 64) return check_steps_of<cuda::StepShare<8, 32, 1, false>>(first, 1);
    if (case_.states > 16) return check_steps_of<cuda::StepShare<4, 16, 1, false>>(first, 2);
    check_steps_of<cuda::StepShare<4, 4, 1, false>>(first, 1);
    if (case_.states != 16 || !in_vectors()) return;
    check_steps_of<cuda::StepShare<4, 4, 1, true>>(first, 1);
    check_steps_of<cuda::StepShare<4, 4, 4, true>>(first, 3);
  }
  template <class Share>
  void check_steps_of(const Result& first, int rows) const {
    Result now;
    now.y = first.y;  // that of the tail, and of sequences without a slot
    now.state = state_;
    for (int t = 0; t < longest(); ++t) {
      std::vector<Piece> pieces;
      for (int s = 0; s < sequences(); ++s) {
        if (t < case_.lengths[at(s)]) pieces.push_back({s, t, t + 1});
      }
      Given given;
      prepare(given, pieces, 0, now.state);
      const SelectiveArgs args = given.args;
      if (Share::kWhole && !cuda::steps_are_whole<T, State, Share::kStates, Share::kLanes>(args)) {
        differ("this case is not aligned");
      }
      cuda::StepGrid of = cuda::step_grid<Share::kLanes, Share::kUnits>(args.layout);
      of.rows = rows;  // as many of as there may be
      const long groups = (args.layout.tokens + rows - 1) / rows;
      emulator::launch({"selective step", of.grid.blocks.x, of.grid.threads, 0, true,
                        [=] {
                          cuda::selective_step_kernel<T, State, Share::kStates, Share::kLanes,
                                                      Share::kUnits, Share::kWhole>(args, rows);
                        },
                        static_cast<unsigned>(groups)});
      emulator::run(static_cast<unsigned>(case_.seeds.back()));
      now = result_of(given, &now);
    }
    same(now, first, " in steps");
  }

  void same(const Result& got, const Result& want, const std::string& when) const {
    same_bits(got.y, want.y, when);
    same_bits(got.state, want.state, " of the state" + when);
  }

  // A serial loop in doubles; what nothing may touch is looked at too.
  void check_values(const Result& result) const {
    const long channels = case_.channels, states = case_.states;
    std::vector<State> wanted = state_;
    for (int s = 0; s <= sequences(); ++s) {
      const long begin = begin_[at(s)];
      const long end = s == sequences() ? begin + case_.tail : begin_[at(s + 1)];
      const long slot = s == sequences() ? -1 : case_.slots[at(s)];
      const bool real = slot >= 0 && slot < rows_;
      for (long c = 0; c < channels; ++c) {
        std::vector<double> h;
        for (long n = 0; n < states && real; ++n) {
          h.push_back(value_of(state_[at(slot * slot_stride() + c * states + n)]));
        }
        for (long row = begin; row < end; ++row) {
          double y = 0;
          if (real) {
            const double x = value_of(x_[at(row * channels + c)]);
            const double delta = std::log1p(
                std::exp(value_of(dt_[at(row * channels + c)]) + value_of(bias_[at(c)])));
            for (long n = 0; n < states; ++n) {
              const double a = static_cast<double>(a_[at(c * states + n)]);
              double& own = h[at(n)];
              own = std::exp(delta * a) * own + delta * x * value_of(b_[at(row * states + n)]);
              y += own * value_of(c_[at(row * states + n)]);
            }
            y += value_of(d_[at(c)]) * x;
            if (case_.gate) y *= silu_of(value_of(z_[at(row * channels + c)]));
          }
          check_value<T>(value_of(result.y[at(row * channels + c)]), y, "y", row, c);
        }
        for (long n = 0; n < states && real; ++n) {
          const std::size_t place = at(slot * slot_stride() + c * states + n);
          check_value<State>(value_of(result.state[place]), h[at(n)], "state", c, n);
          wanted[place] = result.state[place];
        }
      }
    }
    for (int s = 0; s < sequences(); ++s) {  // an empty one's is as it was
      const long slot = case_.slots[at(s)];
      if (case_.lengths[at(s)] > 0 || slot < 0 || slot >= rows_) continue;
      const auto from = state_.begin() + slot * slot_stride();
      std::copy(from, from + slot_stride(), wanted.begin() + slot * slot_stride());
    }
    same_bits(result.state, wanted, " of what no sequence has");
  }

  const Case case_;
  long rows_ = 0;
  std::vector<int> begin_;
  std::vector<T> x_, dt_, z_, b_, c_, d_, bias_;
  std::vector<float> a_;
  std::vector<State> state_;
};

// Of an H100: states of a thread.
int states_of_thread(long sequences, long channels, long states, long stride) {
  SelectiveArgs args;
  args.layout.sequences = sequences;
  args.layout.channels = channels;
  args.states = states;
  for (Stream* stream : {&args.x, &args.dt, &args.z, &args.y, &args.B, &args.C}) {
    stream->stride = stride;
  }
  int found = 0;
  cuda::with_scan_tile<bf16>(
      args, 132, [&](auto tile) { found = decltype(tile)::kStates + 100 * decltype(tile)::kVec; });
  return found;
}
void check_choice() {
  const bool right =
      states_of_thread(1, 1536, 16, 1536) == 202 && states_of_thread(1, 5120, 16, 5120) == 202 &&
      states_of_thread(1, 4096, 16, 4096) == 202 && states_of_thread(2, 4096, 16, 4096) == 404 &&
      states_of_thread(1, 1536, 16, 1537) == 104 && states_of_thread(1, 1535, 16, 1536) == 104 &&
      states_of_thread(1, 1536, 15, 1536) == 104 && states_of_thread(1, 1536, 17, 1536) == 104 &&
      states_of_thread(1, 1536, 65, 1536) == 108;
  if (!right) differ("another tile is chosen");
}

template <class T>
void check(const Case& given) {
  if (given.half_state) return Driver<T, bf16>(given).check();
  Driver<T, float>(given).check();
}

}  // namespace
}  // namespace minserve

int main(int count, char** arguments) {
  using namespace minserve;
  Options options(count, arguments);
  Case given;
  const std::string type = options.text("type", "bf16");
  given.lengths = options.numbers("lengths", "1,37,0,33,64,9");
  given.slots = options.numbers("slots", "3,0,5,-1,1,99");
  given.tail = options.number("tail", 5);
  given.channels = options.number("channels", 20);
  given.states = options.number("states", 16);
  given.extra_stride = options.number("extra-stride", 0);
  given.gate = options.number("gate", 1);
  given.half_state = options.number("half-state", 0);
  given.float_vectors = options.number("float-vectors", 1);
  given.splits = options.numbers("splits", "1,32");
  given.seeds = options.numbers("seeds", "0,1");
  options.none_left();
  check_choice();
  if (type == "f32") {
    check<float>(given);
  } else if (type == "bf16") {
    check<bf16>(given);
  } else if (type == "f16") {
    check<f16>(given);
  } else {
    Options::usage("--type " + type);
  }
  std::puts("ok");
  return 0;
}
