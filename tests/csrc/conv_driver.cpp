// Runs csrc/conv1d in the emulator: scans and steps, compared with a loop in doubles; every
// schedule, several channels per thread and one, steps and scans of one token must give the same
// bits.
#include "cases.h"

#include "conv1d/generic.cuh"
#include "conv1d/scan.cuh"
#include "conv1d/step.cuh"

namespace minserve {
namespace {

struct Case {
  std::vector<int> lengths, slots;
  long tail, channels, extra_stride;
  bool bias, silu;
  std::vector<int> seeds;
};

template <class T, int kTaps>
class Driver {
 public:
  explicit Driver(const Case& given) : case_(given), stride_(given.channels + given.extra_stride) {
    begin_ = {0};
    for (int length : case_.lengths) begin_.push_back(begin_.back() + length);
    tokens_ = begin_.back() + case_.tail;
    rows_ = sequences() + 2;  // a slot beyond is none
    x_ = numbers<T>(tokens_ * stride_, 1);
    weight_ = numbers<T>(case_.channels * kTaps, 2);
    bias_ = numbers<T>(case_.channels, 3);
    state_ = numbers<float>(rows_ * (kTaps - 1) * case_.channels, 4);
  }

  void check() {
    const Result first = run(Form::any, case_.seeds[0]);
    check_values(first);
    for (int seed : case_.seeds) {
      const std::string when = " with seed " + std::to_string(seed);
      same(run(Form::any, seed), first, when);
      if (in_vectors()) same(run(Form::vectors, seed), first, " in vectors" + when);
    }
    if (!std::all_of(case_.lengths.begin(), case_.lengths.end(), [](int l) { return l == 1; })) {
      return;
    }
    for (int seed : case_.seeds) {
      same(run(Form::any_step, seed), first, " of a step");
      if (!in_vectors()) continue;
      same(run(Form::step, seed), first, " of a step in vectors");
      same(run(Form::step_of_two, seed), first, " of a step of two rows");
    }
  }

 private:
  enum class Form { any, vectors, any_step, step, step_of_two };
  struct Result {
    std::vector<T> y;
    std::vector<float> state;
  };

  template <class U>
  static std::vector<U> numbers(long count, unsigned seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal(0.0f, 2.0f);
    std::vector<U> all;
    for (long i = 0; i < count; ++i) all.push_back(rounded<U>(normal(random)));
    return all;
  }
  static std::size_t at(long i) { return static_cast<std::size_t>(i); }
  int sequences() const { return static_cast<int>(case_.lengths.size()); }
  bool in_vectors() const { return case_.channels % 4 == 0 && stride_ % 4 == 0; }

  Result run(Form form, int seed) const {
    emulator::free_all();
    Tensor<T> x{"x", 0, x_}, weight{"weight", 0, weight_}, bias{"bias", 0, bias_}, y{"y"};
    Tensor<float> state{"state", 0, state_};
    Tensor<std::int32_t> slots{"slots", 0, case_.slots}, cu_seqlens{"cu_seqlens", 0, begin_};
    for (auto* read : {&x, &weight, &bias}) read->to_device(emulator::Use::read);
    slots.to_device(emulator::Use::read);
    cu_seqlens.to_device(emulator::Use::read);
    y.values.assign(at(tokens_ * case_.channels), rounded<T>(NAN));
    y.to_device(emulator::Use::write);
    state.to_device(emulator::Use::write);
    ConvArgs args;
    Layout& lay = args.layout;
    lay.sequences = sequences();
    lay.tokens = tokens_;
    lay.channels = case_.channels;
    lay.slots = slots.device;
    lay.num_slots = rows_;
    const bool steps = form != Form::any && form != Form::vectors;
    if (!steps) lay.cu_seqlens = cu_seqlens.device;
    if (steps) lay.time = 1;
    args.taps = kTaps;
    args.x = {x.device, stride_};
    args.weight = weight.device;
    args.bias = case_.bias ? bias.device : nullptr;
    args.state = state.device;
    args.slot_stride = (kTaps - 1) * case_.channels;
    args.tap_stride = case_.channels;
    args.out = y.device;
    args.silu = case_.silu;
    if (form != Form::any && form != Form::any_step) {
      if (!cuda::in_vectors<T, kTaps>(args)) differ("this case is not aligned");
    }
    if (case_.silu) {
      launch<true>(form, args);
    } else {
      launch<false>(form, args);
    }
    emulator::run(static_cast<unsigned>(seed));
    return {y.from_device(), state.from_device()};
  }

  // As csrc/conv1d/launch.cuh.
  template <bool kSilu>
  static void launch(Form form, const ConvArgs& args) {
    const Layout& lay = args.layout;
    const auto start = [](const char* name, const cuda::Grid& grid, auto kernel) {
      emulator::launch(
          {name, grid.blocks.x, grid.threads, 0, true, kernel, grid.blocks.y * grid.blocks.z});
    };
    const auto one_channel_each = [&](long rows) {
      const long blocks = (lay.channels + cuda::kThreads - 1) / cuda::kThreads;
      return cuda::Grid{dim3(static_cast<unsigned>(rows), static_cast<unsigned>(blocks)),
                        cuda::kThreads};
    };
    const long per_row = lay.channels / cuda::kVec;
    switch (form) {
      case Form::any:
        emulator_plain("scan", one_channel_each((lay.tokens + cuda::kAnyRun - 1) / cuda::kAnyRun),
                       [=] { cuda::any_scan_kernel<T>(args); });
        emulator_plain("keep", one_channel_each(lay.sequences),
                       [=] { cuda::any_keep_kernel<T>(args); });
        return;
      case Form::any_step:
        emulator_plain("step", one_channel_each(lay.tokens),
                       [=] { cuda::any_step_kernel<T>(args); });
        return;
      case Form::vectors: {
        const int run = 8;
        start("scan", cuda::row_grid((lay.tokens + run - 1) / run, per_row),
              [=] { cuda::conv_scan_kernel<T, kTaps, kSilu>(args, run); });
        start("keep", cuda::row_grid(lay.sequences, per_row),
              [=] { cuda::conv_keep_kernel<T, kTaps>(args); });
        return;
      }
      case Form::step:
        start("step", cuda::row_grid(lay.tokens, per_row),
              [=] { cuda::conv_step_kernel<T, kTaps, kSilu, 1>(args); });
        return;
      case Form::step_of_two:
        start("step", cuda::row_grid((lay.tokens + 1) / 2, per_row),
              [=] { cuda::conv_step_kernel<T, kTaps, kSilu, 2>(args); });
        return;
    }
  }
  template <class Kernel>
  static void emulator_plain(const char* name, const cuda::Grid& grid, Kernel kernel) {
    emulator::launch({name, grid.blocks.x, grid.threads, 0, false, kernel, grid.blocks.y});
  }

  void same(const Result& got, const Result& want, const std::string& when) const {
    same_bits(got.y, want.y, when);
    same_bits(got.state, want.state, " of the state" + when);
  }

  void check_values(const Result& result) const {
    const long channels = case_.channels;
    std::vector<float> wanted = state_;
    for (int s = 0; s <= sequences(); ++s) {
      const long begin = begin_[at(s)];
      const long end = s == sequences() ? tokens_ : begin_[at(s + 1)];
      const long slot = s == sequences() ? -1 : case_.slots[at(s)];
      const bool real = slot >= 0 && slot < rows_;
      for (long c = 0; c < channels; ++c) {
        const auto input = [&](long row) {  // before the sequence: of the state
          return row >= begin
                     ? value_of(x_[at(row * stride_ + c)])
                     : static_cast<double>(state_[at(
                           (slot * (kTaps - 1) + kTaps - 1 + row - begin) * channels + c)]);
        };
        for (long row = begin; row < end; ++row) {
          double y = 0;
          if (real) {
            y = case_.bias ? value_of(bias_[at(c)]) : 0;
            for (long k = 0; k < kTaps; ++k) {
              y += value_of(weight_[at(c * kTaps + k)]) * input(row - (kTaps - 1) + k);
            }
            if (case_.silu) y /= 1 + std::exp(-y);
          }
          check_value<T>(value_of(result.y[at(row * channels + c)]), y, "y", row, c);
        }
        for (long k = 0; k < kTaps - 1 && real; ++k) {
          wanted[at((slot * (kTaps - 1) + k) * channels + c)] =
              static_cast<float>(input(end - (kTaps - 1) + k));
        }
      }
    }
    same_bits(result.state, wanted, " of the state");
  }

  const Case case_;
  const long stride_;
  long tokens_ = 0, rows_ = 0;
  std::vector<int> begin_;
  std::vector<T> x_, weight_, bias_;
  std::vector<float> state_;
};

template <class T>
void check(const Case& given, long taps) {
  if (taps == 2) return Driver<T, 2>(given).check();
  if (taps == 4) return Driver<T, 4>(given).check();
  Options::usage("--taps " + std::to_string(taps));
}

}  // namespace
}  // namespace minserve

int main(int count, char** arguments) {
  using namespace minserve;
  Options options(count, arguments);
  Case given;
  const std::string type = options.text("type", "bf16");
  given.lengths = options.numbers("lengths", "1,37,0,2,64,9,3");
  given.slots = options.numbers("slots", "3,0,5,6,-1,1,99");
  given.tail = options.number("tail", 5);
  given.channels = options.number("channels", 20);
  given.extra_stride = options.number("extra-stride", 0);
  given.bias = options.number("bias", 1);
  given.silu = options.number("silu", 1);
  given.seeds = options.numbers("seeds", "0,1");
  const long taps = options.number("taps", 4);
  options.none_left();
  if (type == "f32") {
    check<float>(given, taps);
  } else if (type == "bf16") {
    check<bf16>(given, taps);
  } else {
    Options::usage("--type " + type);
  }
  std::puts("ok");
  return 0;
}
