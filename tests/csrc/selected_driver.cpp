// Runs csrc/selective/selected_step.cuh in the emulator, compared with doubles: every schedule,
// every share of units and rows, and every row alone must give the same bits.
#include "cases.h"

#include "selective/selected_step.cuh"

namespace minserve {
namespace {

constexpr long kStates = kSelectedStates;
constexpr float kEps = 1e-5f;

struct Case {
  long rows, channels, rank;
  bool gate, normed;
  std::vector<int> seeds;
};

std::size_t at(long i) {
  return static_cast<std::size_t>(i);
}
template <class U>
std::vector<U> numbers(long count, unsigned seed, float scale = 1.0f) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0f, scale);
  std::vector<U> all;
  for (long i = 0; i < count; ++i) all.push_back(rounded<U>(normal(random)));
  return all;
}

template <class State>
class Driver {
 public:
  explicit Driver(const Case& given)
      : case_(given),
        width_(given.rank + 2 * kStates),
        x_(numbers<bf16>(given.rows * given.channels, 1)),
        z_(numbers<bf16>(given.rows * given.channels, 2, 3.0f)),
        selection_(numbers<bf16>(given.rows * width_, 3)),
        weight_(numbers<bf16>(given.channels * given.rank, 4, 0.5f)),
        a_(numbers<float>(given.channels * kStates, 5)),
        d_(numbers<float>(given.channels, 6)),
        bias_(numbers<float>(given.channels, 7)),
        state_(numbers<State>((given.rows + 1) * given.channels * kStates, 8)) {
    for (float& a : a_) a = -0.01f - a * a;
    for (long r = 0; r < given.rows; ++r) {  // the second row is padding, the third names none
      slots_.push_back(static_cast<std::int32_t>(r == 1 ? -1 : r == 2 ? given.rows + 1 : r));
    }
  }

  void check() {
    const Result first = run<1, 1>(0, case_.rows, case_.seeds[0]);
    check_values(first);
    for (int seed : case_.seeds) {
      const std::string when = " with seed " + std::to_string(seed);
      same(run<1, 1>(0, case_.rows, seed), first, when);
      same(run<1, 4>(0, case_.rows, seed), first, " of four rows" + when);
      same(run<4, 4>(0, case_.rows, seed), first, " of four units" + when);
    }
    for (long r = 0; r < case_.rows; ++r) {
      const Result alone = run<1, 1>(r, r + 1, case_.seeds.back());
      const auto from = first.y.begin() + r * case_.channels;
      same_bits(alone.y, std::vector<bf16>(from, from + case_.channels), " of a row alone");
    }
  }

 private:
  struct Result {
    std::vector<bf16> y;
    std::vector<State> state;
  };

  template <int kUnits, int kRows>
  Result run(long first, long last, int seed) const {
    emulator::free_all();
    const auto read = emulator::Use::read;
    const long channels = case_.channels, rows = last - first;
    const auto part = [&](const std::vector<bf16>& all, long width) {
      return std::vector<bf16>(all.begin() + first * width, all.begin() + last * width);
    };
    Tensor<bf16> x{"x", 0, part(x_, channels)}, z{"z", 0, part(z_, channels)};
    Tensor<bf16> selection{"selection", 0, part(selection_, width_)}, weight{"dt_weight"}, y{"y"};
    for (long chunk = 0; chunk < case_.rank; chunk += kDtChunk) {
      for (long c = 0; c < channels; ++c) {
        for (long i = 0; i < kDtChunk; ++i) {
          weight.values.push_back(weight_[at(c * case_.rank + chunk + i)]);
        }
      }
    }
    Tensor<float> a{"A", 0, a_}, d{"D", 0, d_}, bias{"dt_bias", 0, bias_};
    Tensor<State> state{"state", 0, state_};
    Tensor<std::int32_t> slots{"slots", 0, {slots_.begin() + first, slots_.begin() + last}};
    for (auto* given : {&x, &z, &selection, &weight}) given->to_device(read);
    for (auto* given : {&a, &d, &bias}) given->to_device(read);
    slots.to_device(read);
    y.values.assign(at(rows * channels), rounded<bf16>(NAN));
    y.to_device(emulator::Use::write);
    state.to_device(emulator::Use::write);

    SelectedArgs args;
    SelectiveArgs& step = args.step;
    step.layout.sequences = step.layout.tokens = rows;
    step.layout.channels = channels;
    step.layout.slots = slots.device;
    step.layout.num_slots = case_.rows + 1;
    step.states = kStates;
    step.x = {x.device, channels};
    if (case_.gate) step.z = {z.device, channels};
    step.dt = {selection.device, width_};
    step.B = {selection.device + case_.rank, width_};
    step.C = {selection.device + case_.rank + kStates, width_};
    step.y = {y.device, channels};
    step.A = a.device;
    step.D = {d.device, true};
    step.dt_bias = {bias.device, true};
    step.state = state.device;
    step.slot_stride = channels * kStates;
    args.rank = static_cast<int>(case_.rank);
    args.dt_weight = weight.device;
    args.normed = case_.normed;
    args.norm_eps = kEps;
    const cuda::Grid grid = cuda::selected_grid<cuda::SelectedShare<kUnits, kRows>>(step.layout);
    const bool normed = case_.normed;
    emulator::launch({"selected step", grid.blocks.x, grid.threads, 0, true,
                      [=] {
                        if (normed) {
                          cuda::selected_step_kernel<State, kUnits, kRows, true>(args);
                        } else {
                          cuda::selected_step_kernel<State, kUnits, kRows, false>(args);
                        }
                      },
                      grid.blocks.y});
    emulator::run(static_cast<unsigned>(seed));
    return {y.from_device(), state.from_device()};
  }

  void same(const Result& got, const Result& want, const std::string& when) const {
    same_bits(got.y, want.y, when);
    same_bits(got.state, want.state, " of the state" + when);
  }

  void check_values(const Result& result) const {
    std::vector<State> wanted = state_;
    for (long r = 0; r < case_.rows; ++r) {
      const bf16* const chosen = selection_.data() + r * width_;
      const auto scale = [&](long from, long count) {
        double squares = 0;
        for (long i = 0; i < count; ++i)
          squares += value_of(chosen[from + i]) * value_of(chosen[from + i]);
        return case_.normed ? 1 / std::sqrt(squares / static_cast<double>(count) + kEps) : 1;
      };
      const double of_dt = scale(0, case_.rank), of_b = scale(case_.rank, kStates),
                   of_c = scale(case_.rank + kStates, kStates);
      const bool real = slots_[at(r)] >= 0 && slots_[at(r)] <= case_.rows;
      for (long c = 0; c < case_.channels; ++c) {
        double dt = static_cast<double>(bias_[at(c)]), y = 0;
        for (long i = 0; i < case_.rank; ++i) {
          dt += value_of(weight_[at(c * case_.rank + i)]) * value_of(chosen[i]) * of_dt;
        }
        const double delta = std::log1p(std::exp(dt)), x = value_of(x_[at(r * case_.channels + c)]);
        for (long n = 0; n < kStates && real; ++n) {
          const std::size_t place = at((slots_[at(r)] * case_.channels + c) * kStates + n);
          const double h = std::exp(delta * static_cast<double>(a_[at(c * kStates + n)])) *
                               value_of(state_[place]) +
                           delta * x * of_b * value_of(chosen[case_.rank + n]);
          y += h * of_c * value_of(chosen[case_.rank + kStates + n]);
          check_value<State>(value_of(result.state[place]), h, "state", r, c);
          wanted[place] = result.state[place];
        }
        y += static_cast<double>(d_[at(c)]) * x;
        const double z = value_of(z_[at(r * case_.channels + c)]);
        if (case_.gate) y *= z / (1 + std::exp(-z));
        check_value<bf16>(value_of(result.y[at(r * case_.channels + c)]), real ? y : 0, "y", r, c);
      }
    }
    same_bits(result.state, wanted, " of what no row has");
  }

  const Case case_;
  const long width_;
  std::vector<bf16> x_, z_, selection_, weight_;
  std::vector<float> a_, d_, bias_;
  std::vector<State> state_;
  std::vector<std::int32_t> slots_;
};

}  // namespace
}  // namespace minserve

int main(int count, char** arguments) {
  using namespace minserve;
  Options options(count, arguments);
  Case given;
  given.rows = options.number("rows", 5);
  given.channels = options.number("channels", 44);
  given.rank = options.number("rank", 48);
  given.gate = options.number("gate", 1);
  given.normed = options.number("normed", 0);
  given.seeds = options.numbers("seeds", "0,1");
  const bool half = options.number("half-state", 0);
  options.none_left();
  if (half) {
    Driver<bf16>(given).check();
  } else {
    Driver<float>(given).check();
  }
  std::puts("ok");
  return 0;
}
