// Runs csrc/fused_norm/kernel.cuh in the emulator: a GELU and, overlapping with it, a step and a
// norm that read the stream which the GELU has added to; compared with doubles, and every schedule
// must give the same bits. The GELU's curve by itself before.
#include "cases.h"

#include "cells/dispatch.h"
#include "fused_norm/added.cuh"

namespace minserve {

void no_kernel_of(CellKind) {
  std::abort();
}

namespace {

constexpr float kEps = 1e-6f;

struct Case {
  long rows, width, channels, gates;
  int processors;
  std::vector<int> seeds;
};

std::vector<bf16> numbers(long count, unsigned seed, float scale = 1.0f) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0f, scale);
  std::vector<bf16> all;
  for (long i = 0; i < count; ++i) all.push_back(rounded<bf16>(normal(random)));
  return all;
}

struct Tensors {
  Tensor<bf16> x{"x"}, ahead{"ahead"}, y{"y"}, bias{"bias"}, pre{"pre"}, gate_bias{"gate_bias"},
      out{"out"}, weight{"weight"}, normed{"normed"};
  Tensor<bf16> added{"added"}, added_normed{"added_normed"};
  Tensor<float> state{"state"}, wide{"wide"};
  Tensor<std::int32_t> slots{"slots"};

  explicit Tensors(const Case& given) {
    x.values = numbers(given.rows * given.width, 1, 3.0f);
    ahead.values = numbers(given.width, 2);
    y.values = numbers(given.rows * given.channels, 3, 5.0f);
    bias.values = numbers(given.channels, 4);
    pre.values = numbers(given.rows * given.gates * given.channels, 5, 5.0f);
    gate_bias.values = numbers(given.gates * given.channels, 6);
    weight.values = numbers(given.width, 7);
    normed.values.assign(static_cast<std::size_t>(given.rows * given.width), bf16{0});
    added.values = numbers(given.rows * given.width, 8);
    for (const bf16& number : numbers(given.rows * given.width, 9, 3.0f)) {
      wide.values.push_back(1.001f * static_cast<float>(value_of(number)));
    }
    added_normed.values = normed.values;
    out.values.assign(static_cast<std::size_t>(given.rows * given.channels), bf16{0});
    for (long i = 0; i < given.rows * given.channels; ++i) {
      state.values.push_back(static_cast<float>(i % 17) / 8.0f - 1.0f);
    }
    for (long r = 0; r < given.rows; ++r) {  // the second row is padding, the third names none
      slots.values.push_back(static_cast<std::int32_t>(r == 1 ? -1 : r == 2 ? given.rows : r));
    }
    for (auto* read : {&ahead, &bias, &pre, &gate_bias, &weight, &added})
      read->to_device(emulator::Use::read);
    for (auto* written : {&x, &y, &out, &normed, &added_normed})
      written->to_device(emulator::Use::write);
    state.to_device(emulator::Use::write);
    wide.to_device(emulator::Use::write);
    slots.to_device(emulator::Use::read);
  }
};

double gelu_of(double y) {
  return 0.5 * y * (1 + std::erf(y / std::sqrt(2.0)));
}

void check_added(const Case& given, const Tensors& tensors) {
  const std::vector<float> wide = tensors.wide.from_device();
  const std::vector<bf16> normed = tensors.added_normed.from_device();
  for (long r = 0; r < given.rows; ++r) {
    double squares = 0;
    for (long i = 0; i < given.width; ++i) {
      const std::size_t place = static_cast<std::size_t>(r * given.width + i);
      const double own = static_cast<double>(wide[place]);
      const double was = static_cast<double>(tensors.wide.values[place]);
      check_value<float>(own, was + value_of(tensors.added.values[place]), "stream", r, i);
      squares += own * own;
    }
    const double norm = std::sqrt(squares / static_cast<double>(given.width) + kEps);
    for (long i = 0; i < given.width; ++i) {
      const std::size_t place = static_cast<std::size_t>(r * given.width + i);
      const double weight = value_of(tensors.weight.values[static_cast<std::size_t>(i)]);
      check_value<bf16>(value_of(normed[place]), static_cast<double>(wide[place]) / norm * weight,
                        "added norm", r, i);
    }
  }
}

template <template <class> class CellOf>
void check(cuda::CellTag<CellOf>, const Case& given) {
  std::vector<bf16> first_y, first_out, first_normed;
  for (const int seed : given.seeds) {
    emulator::free_all();
    Tensors tensors(given);
    NormedArgs args;
    args.rows = given.rows, args.width = given.width, args.channels = given.channels;
    args.eps = kEps;
    args.x = tensors.x.device, args.ahead = tensors.ahead.device;
    args.y = tensors.y.device, args.bias = tensors.bias.device;
    NormedArgs step = args;
    step.ahead = nullptr;
    step.y = tensors.pre.device, step.bias = tensors.gate_bias.device;
    step.out = tensors.out.device, step.state = tensors.state.device;
    step.state_stride = given.channels, step.num_slots = given.rows;
    step.slots = tensors.slots.device;
    NormedArgs norm;
    norm.rows = given.rows, norm.width = norm.channels = given.width, norm.eps = kEps;
    norm.x = tensors.x.device, norm.y = tensors.normed.device;
    norm.weight = tensors.weight.device;
    const unsigned rows = static_cast<unsigned>(given.rows);
    const std::size_t shared = sizeof(cuda::Block::Shared);
    emulator::launch({"gelu", rows, cuda::gelu_threads(args, given.processors), shared, true,
                      [=] { cuda::normed_gelu_kernel(args); }});
    emulator::launch({"step", rows, cuda::normed_threads(step, 1), shared, true, [=] {
                        cuda::normed_step_kernel<CellOf, cuda::UsualOptions>(step,
                                                                             cuda::UsualOptions{});
                      }});
    emulator::launch({"norm", rows, cuda::normed_threads(norm, 1), shared, true,
                      [=] { cuda::rms_norm_kernel(norm); }});
    AddedNormArgs added;
    added.rows = given.rows, added.width = given.width, added.eps = kEps;
    added.x = tensors.wide.device, added.y = tensors.added.device;
    added.weight = tensors.weight.device, added.out = tensors.added_normed.device;
    emulator::launch({"added norm", rows, cuda::normed_threads(norm, 1), shared, true,
                      [=] { cuda::added_rms_norm_kernel<float>(added); }});
    emulator::run(static_cast<unsigned>(seed));
    check_added(given, tensors);
    const std::vector<bf16> x = tensors.x.from_device(), y = tensors.y.from_device(),
                            out = tensors.out.from_device(), normed = tensors.normed.from_device();
    const std::vector<float> state = tensors.state.from_device();
    const auto at = [](const auto& all, long i) {
      return value_of(all[static_cast<std::size_t>(i)]);
    };
    for (long r = 0; r < given.rows; ++r) {
      double before = 0, after = 0;
      for (long i = 0; i < given.width; ++i) {
        const long place = r * given.width + i;
        const double was = at(tensors.x.values, place), is = at(x, place);
        check_value<bf16>(is, was + at(tensors.ahead.values, i), "x", r, i);
        before += was * was, after += is * is;
      }
      const double width = static_cast<double>(given.width);
      const double divided = 1 / std::sqrt(before / width + kEps);
      const double divided_later = 1 / std::sqrt(after / width + kEps);
      for (long i = 0; i < given.width; ++i) {
        const long place = r * given.width + i;
        check_value<bf16>(at(normed, place),
                          at(x, place) * divided_later * at(tensors.weight.values, i), "normed", r,
                          i);
      }
      const bool real = r != 1 && r != 2;
      for (long c = 0; c < given.channels; ++c) {
        const long place = r * given.channels + c;
        const double pre = at(tensors.y.values, place) * divided + at(tensors.bias.values, c);
        check_value<bf16>(at(y, place), gelu_of(pre), "y", r, c);
        float in[CellOf<float>::kInputs];
        for (long g = 0; g < given.gates; ++g) {
          const long own = (r * given.gates + g) * given.channels + c;
          in[g] = static_cast<float>(
              value_of(rounded<bf16>(at(tensors.pre.values, own) * divided_later +
                                     at(tensors.gate_bias.values, g * given.channels + c))));
        }
        const auto affine = CellOf<float>::coefficients(cuda::UsualOptions{}, in);
        const double was = at(tensors.state.values, place);
        const double h = static_cast<double>(affine.a) * was + static_cast<double>(affine.b);
        check_value<bf16>(at(state, place), real ? h : was, "state", r, c);
        check_value<bf16>(at(out, place), real ? h : 0, "h", r, c);
      }
    }
    if (first_y.empty()) first_y = y, first_out = out, first_normed = normed;
    same_bits(y, first_y, " with seed " + std::to_string(seed));
    same_bits(out, first_out, " with seed " + std::to_string(seed));
    same_bits(normed, first_normed, " with seed " + std::to_string(seed));
  }
}

// The function itself, relative to its own values, which are small where y is negative.
void check_curve() {
  for (int step = -8000; step <= 8000; ++step) {
    const double y = step / 1000.0;
    const double expected = y * 0.5 * std::erfc(-y / std::sqrt(2.0));
    const double error = std::fabs(cuda::gelu(static_cast<float>(y)) - expected);
    const double allowed = y > -4.2 ? 1.5e-4 * std::fabs(expected)
                           : y > -5 ? 6e-4 * std::fabs(expected)
                                    : 1e-8;
    if (error <= allowed) continue;
    std::fprintf(stderr, "gelu(%g): %g off, of %g\n", y, error, expected);
    std::exit(1);
  }
}

}  // namespace
}  // namespace minserve

int main(int count, char** arguments) {
  using namespace minserve;
  Options options(count, arguments);
  Case given;
  given.rows = options.number("rows", 5);
  given.width = options.number("width", 64);
  given.channels = options.number("channels", 72);
  const long cell = options.number("cell", 0);  // its number in cells.def
  given.processors = static_cast<int>(options.number("processors", 132));
  given.seeds = options.numbers("seeds", "0,1");
  options.none_left();
  check_curve();
  cuda::with_cell<CellList<CellKind::mingru, CellKind::minlstm>>(
      static_cast<CellKind>(cell), [&](auto tag) {
        given.gates = decltype(tag)::Traits::kPreactivations;
        check(tag, given);
      });
  std::puts("ok");
  return 0;
}
