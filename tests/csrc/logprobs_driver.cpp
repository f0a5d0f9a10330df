// Runs csrc/sampling/logprobs/kernel.cuh in the emulator: rows with every kind of target, compared
// with sums in doubles and a sorted row; every schedule must give the same bits.
#include "cases.h"

#include <numeric>

#include "sampling/logprobs/kernel.cuh"

namespace minserve {
namespace {

struct Case {
  long vocab, shift, top, sampled;
  std::vector<int> seeds;
};

constexpr long kRows = 11;

// Of row r: ties of the best, impossible tokens before and after the possible ones, logits that are
// not finite.
std::vector<float> row_of(long r, long vocab) {
  std::mt19937 random(static_cast<unsigned>(r));
  std::normal_distribution<float> normal(0.0f, 3.0f);
  std::vector<float> row;
  for (long i = 0; i < vocab; ++i) row.push_back(normal(random));
  const std::size_t size = row.size();
  if (r == 2) row[size / 2] = row[size - 1] = 40.0f;
  if (r == 3) std::fill(row.begin(), row.end(), -INFINITY), row[size / 2] = 1.0f;
  if (r == 4) std::fill(row.begin(), row.end(), -INFINITY);
  if (r == 5) row[size - 1] = NAN;
  if (r == 6) row[0] = INFINITY;
  // NaNs of most threads, each beside tokens that have the better keys.
  for (std::size_t i = 0; r == 10 && i < size; ++i) row[i] = i % 2560 >= 512 ? NAN : row[i];
  // The best are all where one thread looks.
  for (std::size_t i = 0; r == 1 && i < size; ++i) row[i] += i % 128 < 4 ? 60.0f : 0.0f;
  if (r == 7) row[0] = NAN, row[size / 2] = -INFINITY;
  return row;
}
long target_of(long r, long vocab) {
  if (r == 8) return -1;
  if (r == 9) return vocab;
  return r % 4 == 2 ? vocab - 1 : r % 4 == 3 ? vocab / 2 : r * 37 % vocab;
}

// Of row r, as reported.
void check_row(const Case& given, long r, const std::int32_t* report) {
  const std::vector<float> row = row_of(r, given.vocab);
  const long target = target_of(r, given.vocab);
  const double best = *std::max_element(row.begin(), row.end());
  double sum = 0;
  for (const float x : row) sum += std::exp(x - best);
  const auto logprob = [&](long id) {
    return row[static_cast<std::size_t>(id)] - best - std::log(sum);
  };
  const auto expect = [&](std::int32_t bits, double want) {
    float got;
    std::memcpy(&got, &bits, sizeof got);
    const bool near = want != want       ? got != got
                      : std::isinf(want) ? got == want
                                         : std::fabs(got - want) < 1e-5 * (1 + std::fabs(want));
    if (!near) {
      differ("row " + std::to_string(r) + ": " + std::to_string(got) + " instead of " +
             std::to_string(want));
    }
  };
  const bool exists = target >= 0 && target < given.vocab;
  expect(report[0], exists ? logprob(target) : NAN);
  std::vector<long> order(row.size());
  std::iota(order.begin(), order.end(), 0);
  const bool finite = sum == sum && !std::isinf(best);
  if (finite) {
    std::stable_sort(order.begin(), order.end(), [&](long x, long y) {
      return row[static_cast<std::size_t>(x)] > row[static_cast<std::size_t>(y)];
    });
  }
  const bool is_first = finite && exists && order[0] == target;
  if (report[1] != is_first) differ("row " + std::to_string(r) + ": whether it is the best");
  for (long rank = 0; rank < given.top; ++rank) {
    const std::int32_t* const words = report + words_of_report(static_cast<std::int32_t>(rank));
    if (finite && words[0] != order[static_cast<std::size_t>(rank)]) {
      differ("row " + std::to_string(r) + ": " + std::to_string(words[0]) + " is number " +
             std::to_string(rank));
    }
    expect(words[1], finite ? logprob(words[0]) : NAN);
  }
}

// Reports of given targets, or of what a second step has sampled: then rows ask for less and less,
// and some have not sampled.
void check(const Case& given) {
  std::vector<std::int32_t> first;
  const auto top = static_cast<std::int32_t>(given.top);
  const std::int32_t words = words_of_report(top);
  constexpr std::int32_t kUntouched = 12345;  // as a float it is finite
  const auto is_active = [](long r) { return r % 5 != 1; };
  for (const int seed : given.seeds) {
    emulator::free_all();
    Tensor<float> logits{"logits", static_cast<std::size_t>(given.shift)};
    Tensor<std::int64_t> targets{"targets"};
    Tensor<std::int32_t> reports{"reports"}, out{"out"}, cursor{"cursor"}, told{"told"},
        tops{"tops"};
    for (long r = 0; r < kRows; ++r) {
      const std::vector<float> row = row_of(r, given.vocab);
      logits.values.insert(logits.values.end(), row.begin(), row.end());
      targets.values.push_back(target_of(r, given.vocab));
      cursor.values.push_back(is_active(r) ? 2 : 1);
      told.values.push_back(1);
      tops.values.push_back(r % 5 == 2 ? -1 : top);
    }
    for (long i = 0; i < 2 * kRows; ++i) {
      out.values.push_back(
          i < kRows ? -1 : static_cast<std::int32_t>(target_of(i - kRows, given.vocab)));
    }
    reports.values.assign(static_cast<std::size_t>(2 * kRows * words), kUntouched);
    logits.to_device(emulator::Use::read);
    targets.to_device(emulator::Use::read);
    for (auto* read : {&out, &cursor, &tops}) read->to_device(emulator::Use::read);
    for (auto* write : {&told, &reports}) write->to_device(emulator::Use::write);
    LogprobsArgs args;
    args.logits = logits.device, args.row_stride = given.vocab, args.rows = kRows;
    args.vocab = given.vocab, args.top = top, args.reports = reports.device;
    if (given.sampled) {
      args.out = out.device, args.out_stride = kRows, args.steps = 2;
      args.cursor = cursor.device, args.told = told.device, args.tops = tops.device;
    } else {
      args.targets = targets.device;
    }
    emulator::launch({"target_logprobs", static_cast<unsigned>(kRows),
                      cuda::row_threads(given.vocab, cuda::LogprobsShared::kMostThreads),
                      sizeof(cuda::LogprobsShared), false, [=] { cuda::logprobs_kernel(args); }});
    emulator::run(static_cast<unsigned>(seed));
    const std::vector<std::int32_t> got = reports.from_device(), moved = told.from_device();
    for (long r = 0; r < kRows; ++r) {
      const bool request = !given.sampled || (is_active(r) && r % 5 != 2);
      const std::int32_t* const row = got.data() + (given.sampled ? kRows + r : r) * words;
      if (request) check_row(given, r, row);
      if (!request && row[0] != kUntouched) differ("row " + std::to_string(r) + " is reported");
      const bool moves = given.sampled && request;
      if (moved[static_cast<std::size_t>(r)] != 1 + moves)
        differ("told of row " + std::to_string(r));
    }
    if (first.empty()) first = got;
    if (got != first) differ("other bits with seed " + std::to_string(seed));
  }
}

}  // namespace
}  // namespace minserve

int main(int count, char** arguments) {
  using namespace minserve;
  Options options(count, arguments);
  Case given;
  given.vocab = options.number("vocab", 66);
  given.shift = options.number("shift", 0);
  given.top = options.number("top", 0);
  given.sampled = options.number("sampled", 0);
  given.seeds = options.numbers("seeds", "0,1");
  options.none_left();
  check(given);
  std::puts("ok");
  return 0;
}
