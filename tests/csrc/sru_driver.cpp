// Runs csrc/sru in the emulator: scans, steps and gradients, compared with doubles. Every schedule,
// scans by chunks side by side, splits (by whole chunks where gates do not see the state) and steps
// must give the same bits.
#include "cases.h"

#include "sru/backward.cuh"
#include "sru/scan.cuh"

namespace minserve {
namespace {

struct Case {
  std::vector<int> lengths, slots;
  long tail, channels, extra_stride;
  bool weight_c, initial;
  std::vector<int> seeds, splits;
};

double sigma(double x) {
  return 1 / (1 + std::exp(-x));
}

// Tokens of one sequence.
struct Piece {
  int sequence, from, to;
};

constexpr float kScale = 1.75f;  // of the highway's input

template <class T, bool kHighway, bool kTanh>
class Driver {
 public:
  explicit Driver(const Case& given) : case_(given) {
    begin_ = {0};
    for (int length : case_.lengths) begin_.push_back(begin_.back() + length);
    rows_ = sequences() + 2;  // a slot beyond is none
    const long all = begin_.back() + case_.tail, channels = case_.channels;
    u_ = numbers<T>(all * 3 * channels, 1, 1.0f);
    x_ = numbers<T>(all * channels, 2, 1.0f);
    weight_ = numbers<float>(2 * channels, 3, 0.5f);
    bias_ = numbers<float>(2 * channels, 4, 1.0f);
    state_ = numbers<float>(rows_ * slot_stride(), 5, 1.0f);
    if (!case_.weight_c) weight_.assign(weight_.size(), 0.0f);
  }

  void check() {
    const Result first = scan(whole(), state_, case_.seeds[0], false);
    check_values(first);
    for (int seed : case_.seeds) {
      const std::string when = " with seed " + std::to_string(seed);
      same(scan(whole(), state_, seed, false), first, when);
      if (!case_.weight_c) same(scan(whole(), state_, seed, true), first, " by chunks" + when);
      check_gradients(seed);
    }
    for (int split : case_.splits) {
      if (case_.weight_c || split % kScanChunk == 0) check_split(split, first);
    }
    if (case_.weight_c || longest() <= 1) check_steps(first);
  }

 private:
  struct Result {
    std::vector<T> h;  // by rows of all tokens, of which some may be left out
    std::vector<float> state;
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
  long slot_stride() const { return case_.channels + case_.extra_stride; }
  int longest() const { return *std::max_element(case_.lengths.begin(), case_.lengths.end()); }
  int sequences() const { return static_cast<int>(case_.lengths.size()); }
  std::vector<Piece> whole() const {
    std::vector<Piece> pieces;
    for (int s = 0; s < sequences(); ++s) pieces.push_back({s, 0, case_.lengths[at(s)]});
    return pieces;
  }

  // The inputs of some pieces, with the padding tail, on the device.
  struct Given {
    SruArgs args;
    SruGradients grads;
    std::vector<long> rows;  // of the whole
    Tensor<T> u{"u"}, x{"x"}, h{"h"}, grad_h{"grad of h"}, grad_u{"grad of u"}, grad_x{"grad of x"};
    Tensor<float> weight{"weight_c"}, bias{"bias"}, state{"state"}, carries{"carries"}, c{"c"};
    Tensor<float> c0{"c0"}, last{"grad of last"}, grad_c0{"grad of c0"}, vectors{"vectors"};
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
  static float* room(Tensor<float>& to, std::vector<float> values, emulator::Use use) {
    to.values = std::move(values);
    to.to_device(use);
    return to.device;
  }
  void prepare(Given& given, const std::vector<Piece>& pieces, long tail,
               const std::vector<float>& state) const {
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
    SruArgs& args = given.args;
    const auto read = emulator::Use::read, write = emulator::Use::write;
    args.u = stream_of(given, given.u, u_, 3 * case_.channels, read);
    if (kHighway) args.highway = stream_of(given, given.x, x_, case_.channels, read);
    args.scale = kScale;
    args.tanh = kTanh;
    args.h = stream_of(given, given.h, {}, case_.channels, write);
    if (case_.weight_c) args.weight_c = room(given.weight, weight_, read);
    args.bias = room(given.bias, bias_, read);
    args.state = room(given.state, state, write);
    args.slot_stride = slot_stride();
    given.slots.to_device(read);
    given.cu_seqlens.to_device(read);
    Layout& lay = args.layout;
    lay.sequences = static_cast<long>(pieces.size());
    lay.tokens = static_cast<long>(given.rows.size());
    lay.channels = case_.channels;
    lay.slots = given.slots.device;
    lay.num_slots = rows_;
  }
  Result result_of(const Given& given, const Result* before) const {
    Result result;
    if (before) {
      result.h = before->h;
    } else {
      result.h.assign(at((begin_.back() + case_.tail) * case_.channels), rounded<T>(NAN));
    }
    const std::vector<T> h = given.h.from_device();
    const long stride = given.args.h.stride;
    for (std::size_t r = 0; r < given.rows.size(); ++r) {
      const auto from = h.begin() + static_cast<long>(r) * stride;
      std::copy_n(from, case_.channels, result.h.begin() + given.rows[r] * case_.channels);
      for (long i = case_.channels; i < stride; ++i) {
        if (value_of(from[i]) == value_of(from[i])) differ("written between rows of h");
      }
    }
    result.state = given.state.from_device();
    return result;
  }

  template <class Kernel>
  static void launch(const char* name, const cuda::Grid& grid, const Kernel& kernel) {
    emulator::launch({name, grid.blocks.x, grid.threads, 0, true, kernel, grid.blocks.y});
  }
  Result scan(const std::vector<Piece>& pieces, const std::vector<float>& state, int seed,
              bool chunks, const Result* before = nullptr) const {
    Given given;
    prepare(given, pieces, case_.tail, state);
    SruArgs& args = given.args;
    Layout& lay = args.layout;
    lay.cu_seqlens = given.cu_seqlens.device;
    if (chunks) {
      std::vector<float> none(at(2 * lay.chunk_bound() * lay.channels), NAN);
      args.carries = room(given.carries, std::move(none), emulator::Use::write);
      const cuda::Grid grid = cuda::row_grid(lay.chunk_bound(), lay.channels);
      launch("sums", grid, [=] { cuda::sru_sums_kernel<T>(args); });
      launch("carries", cuda::row_grid(lay.sequences, lay.channels),
             [=] { cuda::sru_carries_kernel(args); });
      launch("chunks", grid, [=] { cuda::sru_chunks_kernel<T, kHighway, kTanh>(args); });
    } else {
      const cuda::Grid grid = cuda::row_grid(lay.sequences + 1, lay.channels);
      if (case_.weight_c) {
        launch("scan", grid, [=] { cuda::sru_scan_kernel<T, kHighway, kTanh, false>(args); });
      } else {
        launch("scan", grid, [=] { cuda::sru_scan_kernel<T, kHighway, kTanh, true>(args); });
      }
    }
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
    for (bool chunks : {false, true}) {
      if (chunks && case_.weight_c) continue;
      const Result before = scan(early, state_, seed, chunks);
      same(scan(late, before.state, seed, chunks, &before), first,
           " split at " + std::to_string(split));
    }
  }

  // Every sequence read in steps; they end one after another.
  void check_steps(const Result& first) const {
    Result now;
    now.h = first.h;  // that of the tail, and of sequences without a slot
    now.state = state_;
    for (int t = 0; t < longest(); ++t) {
      std::vector<Piece> pieces;
      for (int s = 0; s < sequences(); ++s) {
        if (t < case_.lengths[at(s)]) pieces.push_back({s, t, t + 1});
      }
      Given given;
      prepare(given, pieces, 0, now.state);
      const SruArgs args = given.args;
      const cuda::Grid grid = cuda::row_grid(args.layout.tokens, args.layout.channels);
      if (case_.weight_c) {
        launch("step", grid, [=] { cuda::sru_step_kernel<T, kHighway, kTanh, false>(args); });
      } else {
        launch("step", grid, [=] { cuda::sru_step_kernel<T, kHighway, kTanh, true>(args); });
      }
      emulator::run(static_cast<unsigned>(case_.seeds.back()));
      now = result_of(given, &now);
    }
    same(now, first, " in steps");
  }

  void same(const Result& got, const Result& want, const std::string& when) const {
    same_bits(got.h, want.h, when);
    same_bits(got.state, want.state, " of the state" + when);
  }

  // A channel's inputs at a row, as doubles.
  struct Numbers {
    double u0, u1, u2, x;
  };
  Numbers inputs(long row, long c) const {
    const long channels = case_.channels;
    const auto u = [&](long plane) {
      return value_of(u_[at(row * 3 * channels + plane * channels + c)]);
    };
    return {u(0), u(1), u(2), kHighway ? value_of(x_[at(row * channels + c)]) * kScale : 0.0};
  }
  struct Gates {
    double f, r;
  };
  Gates gates(const Numbers& in, long c, double before) const {
    const long reset = case_.channels + c;
    const auto of = [&](double u, long i) {
      return sigma(u + static_cast<double>(weight_[at(i)]) * before +
                   static_cast<double>(bias_[at(i)]));
    };
    return {of(in.u1, c), of(in.u2, reset)};
  }

  // A serial loop in doubles; what nothing may touch is looked at too.
  void check_values(const Result& result) const {
    const long channels = case_.channels;
    std::vector<float> wanted = state_;
    for (int s = 0; s <= sequences(); ++s) {
      const long begin = begin_[at(s)];
      const long end = s == sequences() ? begin + case_.tail : begin_[at(s + 1)];
      const long slot = s == sequences() ? -1 : case_.slots[at(s)];
      const bool real = slot >= 0 && slot < rows_;
      for (long i = 0; i < channels; ++i) {
        double c = real ? static_cast<double>(state_[at(slot * slot_stride() + i)]) : 0.0;
        for (long row = begin; row < end; ++row) {
          double h = 0;
          if (real) {
            const Numbers in = inputs(row, i);
            const Gates g = gates(in, i, c);
            c = g.f * c + (1 - g.f) * in.u0;
            h = g.r * (kTanh ? std::tanh(c) : c) + (1 - g.r) * in.x;
          }
          check_value<T>(value_of(result.h[at(row * channels + i)]), h, "h", row, i);
        }
        if (!real || begin == end) continue;
        const std::size_t place = at(slot * slot_stride() + i);
        check_value<float>(static_cast<double>(result.state[place]), c, "state", i, 0);
        wanted[place] = result.state[place];
      }
    }
    same_bits(result.state, wanted, " of what no sequence has");
  }

  // The training scan, which keeps c, and its gradients. Sequences have rows of c0 by their number.
  void check_gradients(int seed) const {
    const long channels = case_.channels, count = sequences() * channels;
    Given given;
    prepare(given, whole(), case_.tail, state_);
    SruArgs& args = given.args;
    Layout& lay = args.layout;
    lay.cu_seqlens = given.cu_seqlens.device;
    lay.slots = nullptr;
    const std::vector<float> zeros(at(count), 0.0f);
    const std::vector<float> c0 = case_.initial ? numbers<float>(count, 6, 1.0f) : zeros;
    const std::vector<float> last = case_.initial ? numbers<float>(count, 7, 1.0f) : zeros;
    const auto read = emulator::Use::read, write = emulator::Use::write;
    args.state = room(given.state, c0, write);
    args.slot_stride = channels;
    args.c = room(given.c, std::vector<float>(at(lay.tokens * channels), NAN), write);
    const cuda::Grid grid = cuda::row_grid(lay.sequences + 1, channels);
    launch("training scan", grid, [=] { cuda::sru_scan_kernel<T, kHighway, kTanh, false>(args); });
    emulator::run(static_cast<unsigned>(seed));
    const std::vector<float> c = given.c.from_device();

    const std::vector<T> grad_h = numbers<T>((begin_.back() + case_.tail) * channels, 8, 1.0f);
    SruGradients& grads = given.grads;
    grads.h = stream_of(given, given.grad_h, grad_h, channels, read);
    grads.u = stream_of(given, given.grad_u, {}, 3 * channels, write);
    if (kHighway) grads.highway = stream_of(given, given.grad_x, {}, channels, write);
    if (case_.initial) {
      grads.c0 = room(given.c0, c0, read);
      grads.last = room(given.last, last, read);
    }
    grads.of_c0 = room(given.grad_c0, std::vector<float>(at(count), NAN), write);
    grads.vectors = room(given.vectors, std::vector<float>(at(4 * count), NAN), write);
    launch("gradients", grid,
           [=] { cuda::sru_backward_kernel<T, kHighway, kTanh>(args, grads); });
    emulator::run(static_cast<unsigned>(seed));

    const std::vector<T> of_u = given.grad_u.from_device(), of_x = given.grad_x.from_device();
    const std::vector<float> of_c0 = given.grad_c0.from_device();
    const std::vector<float> vectors = given.vectors.from_device();
    const long stride = grads.u.stride;
    for (int s = 0; s <= sequences(); ++s) {
      const long begin = begin_[at(s)], end = s == sequences() ? begin + case_.tail
                                                               : begin_[at(s + 1)];
      for (long i = 0; i < channels; ++i) {
        const auto of = [&](long row, long plane) {
          return value_of(of_u[at(row * stride + plane * channels + i)]);
        };
        if (s == sequences()) {
          for (long row = begin; row < end; ++row) {
            for (long plane = 0; plane < 3; ++plane) {
              check_value<T>(of(row, plane), 0.0, "gradient of the tail", row, i);
            }
            check_value<float>(static_cast<double>(c[at(row * channels + i)]), 0.0, "c of the tail",
                               row, i);
          }
          continue;
        }
        std::vector<double> states = {static_cast<double>(c0[at(s * channels + i)])};
        for (long row = begin; row < end; ++row) {
          const Numbers in = inputs(row, i);
          const Gates g = gates(in, i, states.back());
          states.push_back(g.f * states.back() + (1 - g.f) * in.u0);
          check_value<float>(static_cast<double>(c[at(row * channels + i)]), states.back(), "c",
                             row, i);
        }
        double carry = static_cast<double>(last[at(s * channels + i)]), sums[4] = {};
        for (long row = end - 1; row >= begin; --row) {
          const Numbers in = inputs(row, i);
          const double before = states[at(row - begin)], own = states[at(row - begin + 1)];
          const Gates g = gates(in, i, before);
          const double out = value_of(grad_h[at(row * channels + i)]);
          const double active = kTanh ? std::tanh(own) : own;
          const double of_r = out * (active - in.x) * g.r * (1 - g.r);
          const double of_own = carry + out * g.r * (kTanh ? 1 - active * active : 1);
          const double of_f = of_own * (before - in.u0) * g.f * (1 - g.f);
          check_value<T>(of(row, 0), of_own * (1 - g.f), "gradient of u0", row, i);
          check_value<T>(of(row, 1), of_f, "gradient of u1", row, i);
          check_value<T>(of(row, 2), of_r, "gradient of u2", row, i);
          if (kHighway) {
            check_value<T>(value_of(of_x[at(row * grads.highway.stride + i)]),
                           out * (1 - g.r) * kScale, "gradient of x", row, i);
          }
          carry = of_own * g.f + of_f * static_cast<double>(weight_[at(i)]) +
                  of_r * static_cast<double>(weight_[at(channels + i)]);
          sums[0] += of_f * before, sums[1] += of_r * before, sums[2] += of_f, sums[3] += of_r;
        }
        check_value<float>(static_cast<double>(of_c0[at(s * channels + i)]), carry,
                           "gradient of c0", s, i);
        for (long n = 0; n < 4; ++n) {
          check_value<float>(static_cast<double>(vectors[at(n * count + s * channels + i)]),
                             sums[n], "gradient of a vector", n, i);
        }
      }
    }
  }

  const Case case_;
  long rows_ = 0;
  std::vector<int> begin_;
  std::vector<T> u_, x_;
  std::vector<float> weight_, bias_, state_;
};

bool reads_chunks(long sequences, long channels, long tokens, bool carries) {
  SruArgs args;
  float room = 0;
  args.carries = carries ? &room : nullptr;
  args.layout.sequences = sequences;
  args.layout.channels = channels;
  args.layout.tokens = tokens;
  return cuda::sru_reads_chunks(args);
}
void check_choice() {
  const bool right = reads_chunks(1, 1024, 512, true) && !reads_chunks(1, 1024, 512, false) &&
                     !reads_chunks(1, 1024, 256, true) && !reads_chunks(64, 1024, 32768, true) &&
                     reads_chunks(8, 2048, 8192, true);
  if (!right) differ("another scan is chosen");
}

template <class T>
void check(const Case& given, bool highway, bool tanh) {
  if (highway) {
    if (tanh) return Driver<T, true, true>(given).check();
    return Driver<T, true, false>(given).check();
  }
  if (tanh) return Driver<T, false, true>(given).check();
  Driver<T, false, false>(given).check();
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
  given.extra_stride = options.number("extra-stride", 0);
  given.weight_c = options.number("weight-c", 1);
  given.initial = options.number("initial", 1);
  given.splits = options.numbers("splits", "1,32,128");
  given.seeds = options.numbers("seeds", "0,1");
  const bool highway = options.number("highway", 1), tanh = options.number("tanh", 0);
  options.none_left();
  check_choice();
  if (type == "f32") {
    check<float>(given, highway, tanh);
  } else if (type == "bf16") {
    check<bf16>(given, highway, tanh);
  } else if (type == "f16") {
    check<f16>(given, highway, tanh);
  } else {
    Options::usage("--type " + type);
  }
  std::puts("ok");
  return 0;
}
