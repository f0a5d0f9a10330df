// Runs csrc/fused_norm/gated.cuh in the emulator: a step with an output gate, and beside it the
// gated norms and both forms of SwiGLU; compared with doubles, and every schedule must give the
// same bits.
#include "cases.h"

#include "cells/hgrn.h"
#include "fused_norm/gated.cuh"

namespace minserve {
namespace {

constexpr float kEps = 1e-6f;

struct Case {
  long rows, width, channels;
  std::vector<int> seeds;
};

std::vector<bf16> numbers(long count, unsigned seed, float scale = 1.0f) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0f, scale);
  std::vector<bf16> all;
  for (long i = 0; i < count; ++i) all.push_back(rounded<bf16>(normal(random)));
  return all;
}

double silu_of(double x) {
  return x / (1 + std::exp(-x));
}
double rounded_value(double x) {
  return value_of(rounded<bf16>(x));
}

void check(const Case& given) {
  const long rows = given.rows, channels = given.channels;
  std::vector<bf16> first_out, first_normed, first_gated, first_divided, first_grouped;
  for (const int seed : given.seeds) {
    emulator::free_all();
    Tensor<bf16> x{"x"}, pre{"pre"}, bias{"bias"}, weight{"weight"}, out{"out"}, h{"h"},
        normed{"normed"}, gated{"gated"}, divided{"divided"}, grouped{"grouped"};
    Tensor<float> state{"state"}, bound{"bound"};
    Tensor<std::int32_t> slots{"slots"};
    x.values = numbers(rows * given.width, 1, 3.0f);
    pre.values = numbers(rows * 3 * channels, 2, 5.0f);
    bias.values = numbers(3 * channels, 3);
    weight.values = numbers(channels, 4);
    h.values = numbers(rows * channels, 5);
    for (long i = 0; i < rows * channels; ++i) {
      state.values.push_back(static_cast<float>(i % 17) / 8.0f - 1.0f);
    }
    for (long c = 0; c < channels; ++c) bound.values.push_back(static_cast<float>(c % 8) / 8.0f);
    for (long r = 0; r < rows; ++r) {  // the second row is padding, the third names none
      slots.values.push_back(static_cast<std::int32_t>(r == 1 ? -1 : r == 2 ? rows : r));
    }
    for (auto* made : {&out, &normed, &gated, &divided, &grouped}) {
      made->values.assign(static_cast<std::size_t>(rows * channels), bf16{0});
      made->to_device(emulator::Use::write);
    }
    for (auto* read : {&pre, &bias, &weight, &h}) read->to_device(emulator::Use::read);
    x.to_device(emulator::Use::write);
    bound.to_device(emulator::Use::read);
    slots.to_device(emulator::Use::read);
    state.to_device(emulator::Use::write);

    NormedArgs step;
    step.rows = rows, step.width = given.width, step.channels = channels, step.eps = kEps;
    step.x = x.device, step.y = pre.device, step.bias = bias.device, step.out = out.device;
    step.state = state.device, step.state_stride = channels, step.num_slots = rows;
    step.slots = slots.device, step.lower_bound = bound.device, step.weight = weight.device;
    // The first two thirds of a row of pre are gate | up in a third of its rows.
    NormedArgs mlp = step;
    mlp.rows = 1, mlp.out = divided.device;
    GatedNormArgs norm;
    norm.rows = rows, norm.channels = channels, norm.gate_stride = 3 * channels, norm.eps = kEps;
    norm.h = h.device, norm.gate = pre.device + 2 * channels, norm.weight = weight.device;
    norm.out = normed.device;
    // Of all channels as one group where they are no two of whole vectors.
    GatedNormArgs of_groups = norm;
    of_groups.groups = channels % 16 ? 1 : 2, of_groups.gate_first = true;
    of_groups.out = grouped.device;
    SwigluArgs glu;
    glu.rows = rows, glu.channels = channels, glu.y = pre.device, glu.out = gated.device;
    const unsigned blocks = static_cast<unsigned>(rows), threads = cuda::normed_threads(step, 1);
    const std::size_t shared = sizeof(cuda::Block::Shared);
    emulator::launch({"step", blocks, threads, shared, true,
                      [=] { cuda::normed_gated_step_kernel<cuda::HgrnCell>(step); }});
    emulator::launch({"norm", blocks, threads, shared, true,
                      [=] { cuda::gated_rms_norm_kernel<bf16, false>(norm); }});
    emulator::launch({"norm of groups", blocks * static_cast<unsigned>(of_groups.groups), threads,
                      shared, true, [=] { cuda::gated_rms_norm_kernel<bf16, true>(of_groups); }});
    emulator::launch(
        {"swiglu", blocks, threads, shared, true, [=] { cuda::swiglu_kernel<bf16>(glu); }});
    emulator::launch(
        {"normed swiglu", 1, threads, shared, true, [=] { cuda::normed_swiglu_kernel(mlp); }});
    emulator::run(static_cast<unsigned>(seed));

    const std::vector<bf16> out_of = out.from_device(), normed_of = normed.from_device(),
                            gated_of = gated.from_device(), divided_of = divided.from_device(),
                            grouped_of = grouped.from_device();
    const std::vector<float> state_of = state.from_device();
    const auto at = [](const auto& all, long i) {
      return static_cast<double>(value_of(all[static_cast<std::size_t>(i)]));
    };
    for (long r = 0; r < rows; ++r) {
      double squares = 0;
      for (long i = 0; i < given.width; ++i) {
        const double own = at(x.values, r * given.width + i);
        squares += own * own;
      }
      const double scale = 1 / std::sqrt(squares / static_cast<double>(given.width) + kEps);
      const auto pre_of = [&](long column, long c) {
        return rounded_value(at(pre.values, (r * 3 + column) * channels + c) * scale +
                             at(bias.values, column * channels + c));
      };
      const bool real = r != 1 && r != 2;
      std::vector<double> after;
      double sum = 0, sum_of_h = 0;
      for (long c = 0; c < channels; ++c) {
        const double was = at(state.values, r * channels + c), l = at(bound.values, c);
        const double keep = 1 / (1 + std::exp(-pre_of(1, c)));
        const double now =
            (l + (1 - l) * keep) * was + (1 - l) * (1 - keep) * silu_of(pre_of(0, c));
        check_value<bf16>(at(state_of, r * channels + c), real ? now : was, "state", r, c);
        after.push_back(rounded_value(now));
        sum += after.back() * after.back();
        sum_of_h += at(h.values, r * channels + c) * at(h.values, r * channels + c);
      }
      const double width = static_cast<double>(channels);
      const auto gated_h = [&](long c) {
        return at(h.values, r * channels + c) * silu_of(at(pre.values, (r * 3 + 2) * channels + c));
      };
      std::vector<double> sums_of_groups(static_cast<std::size_t>(of_groups.groups));
      const auto sum_of_group = [&](long c) -> double& {
        return sums_of_groups[static_cast<std::size_t>(c * of_groups.groups / channels)];
      };
      for (long c = 0; c < channels; ++c) sum_of_group(c) += gated_h(c) * gated_h(c);
      for (long c = 0; c < channels; ++c) {
        const long place = r * channels + c;
        const double raw = at(pre.values, (r * 3 + 2) * channels + c);
        check_value<bf16>(at(out_of, place),
                          real
                              ? after[static_cast<std::size_t>(c)] / std::sqrt(sum / width + kEps) *
                                    at(weight.values, c) * silu_of(pre_of(2, c))
                              : 0,
                          "step", r, c);
        check_value<bf16>(at(normed_of, place),
                          at(h.values, place) / std::sqrt(sum_of_h / width + kEps) *
                              at(weight.values, c) * silu_of(raw),
                          "norm", r, c);
        const double of_each = width / static_cast<double>(of_groups.groups);
        check_value<bf16>(
            at(grouped_of, place),
            gated_h(c) / std::sqrt(sum_of_group(c) / of_each + kEps) * at(weight.values, c),
            "norm of groups", r, c);
        check_value<bf16>(at(gated_of, place),
                          silu_of(at(pre.values, r * 2 * channels + c)) *
                              at(pre.values, (r * 2 + 1) * channels + c),
                          "swiglu", r, c);
        if (r > 0) continue;
        check_value<bf16>(at(divided_of, place), silu_of(pre_of(0, c)) * pre_of(1, c),
                          "normed swiglu", r, c);
      }
    }
    if (first_out.empty()) {
      first_out = out_of, first_normed = normed_of, first_gated = gated_of;
      first_divided = divided_of, first_grouped = grouped_of;
    }
    const std::string when = " with seed " + std::to_string(seed);
    same_bits(out_of, first_out, when);
    same_bits(normed_of, first_normed, when);
    same_bits(gated_of, first_gated, when);
    same_bits(divided_of, first_divided, when);
    same_bits(grouped_of, first_grouped, when);
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
  given.seeds = options.numbers("seeds", "0,1");
  options.none_left();
  check(given);
  std::puts("ok");
  return 0;
}
