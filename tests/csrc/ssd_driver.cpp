// Runs csrc/ssd in the emulator: scans in chunks or by tokens, and steps, compared with doubles.
// Every schedule, every share of the work per block and, with fp32 states, every split of the
// sequences must give the same bits, and so must a last chunk of one token and a step.
#include "cases.h"

#include "ssd/outputs.cuh"
#include "ssd/states.cuh"

namespace minserve {
namespace {

struct Case {
  std::vector<int> lengths, slots;
  long tail, heads, head_dim, groups, states, extra_stride;
  bool half_state, float_vectors, chunks;
  float least_dt, most_dt;
  std::vector<int> seeds, splits;
};

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
    const long all = begin_.back() + case_.tail, of_choice = case_.groups * case_.states;
    x_ = numbers<T>(all * channels(), 1, 1.0f);
    dt_ = numbers<T>(all * case_.heads, 2, 3.0f);
    b_ = numbers<T>(all * of_choice, 4, 0.5f);
    c_ = numbers<T>(all * of_choice, 5, 0.5f);
    d_ = numbers<T>(case_.heads, 6, 1.0f);
    bias_ = numbers<T>(case_.heads, 7, 1.0f);
    state_ = numbers<State>(rows_ * slot_stride(), 8, 1.0f);
    a_ = numbers<float>(case_.heads, 9, 2.0f);
    for (float& a : a_) a = -0.01f - a * a;
    a_[0] = -0.001f;  // remembers for long
    if (case_.heads > 1) a_[1] = -1000.0f;
    // Nothing of padding reaches a sequence.
    for (int s = 0; s <= sequences(); ++s) {
      if (s < sequences() && case_.slots[at(s)] >= 0 && case_.slots[at(s)] < rows_) continue;
      const long end = s == sequences() ? all : begin_[at(s + 1)];
      for (long row = begin_[at(s)]; row < end; ++row) {
        std::fill_n(x_.begin() + row * channels(), channels(), rounded<T>(NAN));
        std::fill_n(dt_.begin() + row * case_.heads, case_.heads, rounded<T>(NAN));
        std::fill_n(b_.begin() + row * of_choice, of_choice, rounded<T>(NAN));
        std::fill_n(c_.begin() + row * of_choice, of_choice, rounded<T>(NAN));
      }
    }
  }

  void check() {
    const Result first = scan(whole(), state_, case_.seeds[0], 0);
    check_values(first);
    for (int seed : case_.seeds) {
      const std::string when = " with seed " + std::to_string(seed);
      for (int share = 0; share < 2; ++share) {
        if (seed == case_.seeds[0] && share == 0) continue;
        same(scan(whole(), state_, seed, share), first, " of another share" + when);
      }
    }
    // A state of two bytes is rounded at the end of every call.
    for (int split : case_.splits) {
      if (!case_.half_state) check_split(split, first);
    }
    check_last_tokens(first);
    check_steps(first);
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
  long channels() const { return case_.heads * case_.head_dim; }
  long slot_stride() const { return channels() * case_.states + case_.extra_stride; }
  int longest() const { return *std::max_element(case_.lengths.begin(), case_.lengths.end()); }
  int sequences() const { return static_cast<int>(case_.lengths.size()); }
  std::vector<Piece> whole() const {
    std::vector<Piece> pieces;
    for (int s = 0; s < sequences(); ++s) pieces.push_back({s, 0, case_.lengths[at(s)]});
    return pieces;
  }
  static std::size_t at(long i) { return static_cast<std::size_t>(i); }

  // The inputs of some pieces, with the padding tail, on the device.
  struct Given {
    SsdArgs args;
    std::vector<long> rows;  // of the whole
    Tensor<T> x{"x"}, dt{"dt"}, b{"B"}, c{"C"}, d{"D"}, bias{"dt_bias"}, y{"y"};
    Tensor<float> wide_d{"D"}, wide_bias{"dt_bias"}, a{"A"};
    Tensor<State> state{"state"};
    Tensor<std::int32_t> slots{"slots"}, cu_seqlens{"cu_seqlens"};
    Tensor<float> workspace{"workspace"};
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
    SsdArgs& args = given.args;
    const auto read = emulator::Use::read, write = emulator::Use::write;
    args.heads = case_.heads, args.head_dim = case_.head_dim;
    args.groups = case_.groups, args.states = case_.states;
    args.least_dt = case_.least_dt, args.most_dt = case_.most_dt;
    args.x = stream_of(given, given.x, x_, channels(), read);
    args.dt = stream_of(given, given.dt, dt_, case_.heads, read);
    args.B = stream_of(given, given.b, b_, case_.groups * case_.states, read);
    args.C = stream_of(given, given.c, c_, case_.groups * case_.states, read);
    args.y = stream_of(given, given.y, {}, channels(), write);
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
    Layout& lay = args.layout;
    lay.sequences = static_cast<long>(pieces.size());
    lay.tokens = static_cast<long>(given.rows.size());
    lay.channels = channels();
    lay.slots = given.slots.device;
    lay.num_slots = rows_;
  }
  HeadVector vector_of(Tensor<T>& own, Tensor<float>& wide, const std::vector<T>& from) const {
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
      result.y.assign(at((begin_.back() + case_.tail) * channels()), rounded<T>(NAN));
    }
    const std::vector<T> y = given.y.from_device();
    const long stride = given.args.y.stride;
    for (std::size_t r = 0; r < given.rows.size(); ++r) {
      const auto from = y.begin() + static_cast<long>(r) * stride;
      std::copy_n(from, channels(), result.y.begin() + given.rows[r] * channels());
      for (long i = channels(); i < stride; ++i) {
        if (value_of(from[i]) == value_of(from[i])) differ("written between rows of y");
      }
    }
    result.state = given.state.from_device();
    return result;
  }

  // share: one of two of how much a block or a thread does.
  Result scan(const std::vector<Piece>& pieces, const std::vector<State>& state, int seed,
              int share, const Result* before = nullptr) const {
    Given given;
    prepare(given, pieces, case_.tail, state);
    given.cu_seqlens.to_device(emulator::Use::read);
    SsdArgs& args = given.args;
    args.layout.cu_seqlens = given.cu_seqlens.device;
    if (case_.chunks != (std::is_same_v<T, bf16> && cuda::reads_in_chunks(args))) {
      differ("another form is chosen");
    }
    if (case_.chunks) {
      given.workspace.values.resize(at(cuda::chunk_workspace_bytes(args) / 4));
      given.workspace.to_device(emulator::Use::write);
      args.workspace = given.workspace.device;
    }
    if constexpr (std::is_same_v<T, bf16>) {
      if (case_.chunks && case_.states == 64) launch_chunks<64>(args, share);
      if (case_.chunks && case_.states == 128) launch_chunks<128>(args, share);
    }
    if (!case_.chunks) launch_rows<false>(args, share);
    emulator::run(static_cast<unsigned>(seed));
    return result_of(given, before);
  }
  template <int kStates>
  void launch_chunks(const SsdArgs& args, int share) const {
    const long decays = args.layout.chunk_bound() * divided_up(args.heads, cuda::kDecayHeads);
    emulator::launch({"decays", static_cast<unsigned>(decays), cuda::kDecayHeads * cuda::kWarpLanes,
                      0, true, [=] { cuda::ssd_decays_kernel(args); }});
    if (share) {
      launch_states<cuda::StatesTile<kStates, 64>>(args);
    } else {
      launch_states<cuda::StatesTile<kStates, 32>>(args);
    }
    const int units = share ? 3 : 1;
    emulator::launch({"outputs", static_cast<unsigned>(cuda::outputs_blocks(args, units)),
                      cuda::kOutputThreads, sizeof(cuda::OutputMemory<kStates>), true,
                      [=] { cuda::ssd_outputs_kernel<State, kStates>(args, units); }});
  }
  template <class Tile>
  void launch_states(const SsdArgs& args) const {
    emulator::launch({"states", static_cast<unsigned>(cuda::states_blocks<Tile>(args)),
                      Tile::kThreads, Tile::kSharedBytes, true,
                      [=] { cuda::ssd_states_kernel<State, Tile>(args); }});
  }
  template <bool kSteps>
  void launch_rows(const SsdArgs& args, int share) const {
    const auto launch = [&](auto of) {
      using Share = decltype(of);
      const cuda::Grid grid = cuda::rows_grid<Share>(args, kSteps);
      emulator::launch({kSteps ? "step" : "scan by tokens", grid.blocks.x, grid.threads, 0, true,
                        [=] { cuda::ssd_rows_kernel<T, State, Share, kSteps>(args); },
                        grid.blocks.y});
    };
    const bool whole = cuda::rows_are_whole<T, State>(args);
    if (share && whole && case_.states == 64) return launch(cuda::WholeShare<State, 64, 8>{});
    if (share && whole && case_.states == 128) return launch(cuda::WholeShare<State, 128, 8>{});
    if (share && case_.states <= 128) return launch(cuda::RowShare<4, 1, 32, 4, false>{});
    cuda::with_row_share<T, State>(args, launch);
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
    const Result before = scan(early, state_, seed, 0);
    same(scan(late, before.state, seed, 1, &before), first, " split at " + std::to_string(split));
  }

  Result step(const std::vector<Piece>& pieces, int share, const Result& before) const {
    Given given;
    prepare(given, pieces, 0, before.state);
    launch_rows<true>(given.args, share);
    emulator::run(static_cast<unsigned>(case_.seeds.back()));
    return result_of(given, &before);
  }

  // One token behind whole chunks read by a step.
  void check_last_tokens(const Result& first) const {
    std::vector<Piece> early, late;
    for (const Piece& piece : whole()) {
      if (piece.to % cuda::kChunk == 1) {
        early.push_back({piece.sequence, 0, piece.to - 1});
        late.push_back({piece.sequence, piece.to - 1, piece.to});
      } else {
        early.push_back(piece);
      }
    }
    if (late.empty() || (case_.half_state && !case_.chunks && longest() > 1)) return;
    const Result before = scan(early, state_, case_.seeds.back(), 0);
    for (int share = 0; share < 2; ++share) {
      same(step(late, share, before), first, " with steps at last");
    }
  }

  // Every sequence read in steps; they end one after another.
  void check_steps(const Result& first) const {
    Result now;
    now.y = first.y;  // that of the tail, and of sequences without a slot
    now.state = state_;
    for (int t = 0; t < longest(); ++t) {
      if (case_.chunks && t == 16) return;  // not the scan's bits anyway
      std::vector<Piece> pieces;
      for (int s = 0; s < sequences(); ++s) {
        if (t < case_.lengths[at(s)]) pieces.push_back({s, t, t + 1});
      }
      now = step(pieces, t % 2, now);
    }
    if (case_.chunks) return check_values(now);
    if (!case_.half_state || longest() <= 1) same(now, first, " in steps");
  }

  void same(const Result& got, const Result& want, const std::string& when) const {
    same_bits(got.y, want.y, when);
    same_bits(got.state, want.state, " of the state" + when);
  }

  // Chunks round what they multiply to bf16, once, and outputs are rounded once more: an error is
  // small beside the largest number.
  template <class U>
  void near(U got, double want, double largest, const char* what, long row, long place) const {
    if (!case_.chunks) return check_value<U>(value_of(got), want, what, row, place);
    if (std::fabs(value_of(got) - want) <= (sizeof(U) == 2 ? 8e-3 : 4e-3) * largest) return;
    differ(std::string(what) + ", row " + std::to_string(row) + ", place " + std::to_string(place) +
           ": " + std::to_string(value_of(got)) + " instead of " + std::to_string(want));
  }

  // A serial loop in doubles; what nothing may touch is looked at too.
  void check_values(const Result& result) const {
    std::vector<State> wanted = state_;
    for (int s = 0; s <= sequences(); ++s) {
      const long begin = begin_[at(s)];
      const long end = s == sequences() ? begin + case_.tail : begin_[at(s + 1)];
      const long slot = s == sequences() ? -1 : case_.slots[at(s)];
      for (long h = 0; h < case_.heads; ++h) {
        check_head(result, wanted, begin, end, slot >= 0 && slot < rows_ ? slot : -1, h);
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
  void check_head(const Result& result, std::vector<State>& wanted, long begin, long end, long slot,
                  long h) const {
    const long width = case_.head_dim, states = case_.states;
    const long group = h / (case_.heads / case_.groups);
    if (slot < 0) {
      for (long row = begin; row < end; ++row) {
        for (long p = 0; p < width; ++p) {
          check_value<T>(value_of(result.y[at(row * channels() + h * width + p)]), 0, "padding",
                         row, p);
        }
      }
      return;
    }
    std::vector<double> ys, own;
    for (long i = 0; i < width * states; ++i) {
      own.push_back(value_of(state_[at(slot * slot_stride() + h * width * states + i)]));
    }
    for (long row = begin; row < end; ++row) {
      const double raw = value_of(dt_[at(row * case_.heads + h)]) + value_of(bias_[at(h)]);
      const double delta =
          std::min(std::max(std::log1p(std::exp(raw)), static_cast<double>(case_.least_dt)),
                   static_cast<double>(case_.most_dt));
      const double kept = std::exp(delta * static_cast<double>(a_[at(h)]));
      for (long p = 0; p < width; ++p) {
        const double x = value_of(x_[at(row * channels() + h * width + p)]);
        double y = value_of(d_[at(h)]) * x;
        for (long n = 0; n < states; ++n) {
          const std::size_t choice = at((row * case_.groups + group) * states + n);
          double& s = own[at(p * states + n)];
          s = kept * s + delta * x * value_of(b_[choice]);
          y += s * value_of(c_[choice]);
        }
        ys.push_back(y);
      }
    }
    const auto largest = [](const std::vector<double>& all) {
      double most = 1;
      for (double x : all) most = std::max(most, std::fabs(x));
      return most;
    };
    const double most_y = largest(ys), most_s = largest(own);
    for (long row = begin; row < end; ++row) {
      for (long p = 0; p < width; ++p) {
        near(result.y[at(row * channels() + h * width + p)], ys[at((row - begin) * width + p)],
             most_y, "y", row, h * width + p);
      }
    }
    for (long i = 0; i < width * states; ++i) {
      const std::size_t place = at(slot * slot_stride() + h * width * states + i);
      near(result.state[place], own[at(i)], most_s, "state", h, i);
      wanted[place] = result.state[place];
    }
  }

  const Case case_;
  long rows_ = 0;
  std::vector<int> begin_;
  std::vector<T> x_, dt_, b_, c_, d_, bias_;
  std::vector<float> a_;
  std::vector<State> state_;
};

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
  given.lengths = options.numbers("lengths", "1,37,0,33,9,6");
  given.slots = options.numbers("slots", "3,0,5,-1,1,99");
  given.tail = options.number("tail", 5);
  given.heads = options.number("heads", 2);
  given.head_dim = options.number("head-dim", 64);
  given.groups = options.number("groups", 1);
  given.states = options.number("states", 64);
  given.extra_stride = options.number("extra-stride", 0);
  given.half_state = options.number("half-state", 0);
  given.float_vectors = options.number("float-vectors", 1);
  given.chunks = options.number("chunks", 0);
  given.least_dt = std::stof(options.text("least-dt", "0"));
  given.most_dt = std::stof(options.text("most-dt", "inf"));
  given.splits = options.numbers("splits", given.chunks ? "128" : "1,32");
  given.seeds = options.numbers("seeds", "0,1");
  options.none_left();
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
