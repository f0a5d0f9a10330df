// Runs csrc/target_logprobs/kernel.cuh in the emulator: rows with every kind of target, compared
// with sums in doubles; every schedule must give the same bits.
#include "cases.h"

#include "target_logprobs/kernel.cuh"

namespace minserve {
namespace {

struct Case {
  long vocab, shift;
  std::vector<int> seeds;
};

constexpr long kRows = 10;

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
  if (r == 7) row[0] = NAN, row[size / 2] = -INFINITY;
  return row;
}
long target_of(long r, long vocab) {
  if (r == 8) return -1;
  if (r == 9) return vocab;
  return r % 4 == 2 ? vocab - 1 : r % 4 == 3 ? vocab / 2 : r * 37 % vocab;
}

void check_row(long r, long vocab, float logprob, bool is_greedy) {
  const std::vector<float> row = row_of(r, vocab);
  const long target = target_of(r, vocab);
  const double best = *std::max_element(row.begin(), row.end());
  double sum = 0, want = NAN;
  for (const float x : row) sum += std::exp(x - best);
  bool first = false;
  if (target >= 0 && target < vocab) {
    want = row[static_cast<std::size_t>(target)] - best - std::log(sum);
    first = target == std::max_element(row.begin(), row.end()) - row.begin() && want == want;
  }
  const bool near = want != want       ? logprob != logprob
                    : std::isinf(want) ? logprob == want
                                       : std::fabs(logprob - want) < 1e-5 * (1 + std::fabs(want));
  if (!near || first != is_greedy) {
    differ("row " + std::to_string(r) + ": " + std::to_string(logprob) + ", " +
           std::to_string(is_greedy) + " instead of " + std::to_string(want) + ", " +
           std::to_string(first));
  }
}

void check(const Case& given) {
  std::vector<float> first;
  for (const int seed : given.seeds) {
    emulator::free_all();
    Tensor<float> logits{"logits", static_cast<std::size_t>(given.shift)}, logprobs{"logprobs"};
    Tensor<std::int64_t> targets{"targets"};
    for (long r = 0; r < kRows; ++r) {
      const std::vector<float> row = row_of(r, given.vocab);
      logits.values.insert(logits.values.end(), row.begin(), row.end());
      targets.values.push_back(target_of(r, given.vocab));
    }
    logprobs.values.assign(kRows, -1.0f);
    logits.to_device(emulator::Use::read);
    targets.to_device(emulator::Use::read);
    logprobs.to_device(emulator::Use::write);
    bool is_greedy[kRows];
    TargetArgs args;
    args.logits = logits.device, args.row_stride = given.vocab, args.rows = kRows;
    args.vocab = given.vocab, args.targets = targets.device;
    args.logprobs = logprobs.device, args.is_greedy = is_greedy;
    emulator::launch({"target_logprobs", static_cast<unsigned>(kRows),
                      cuda::row_threads(given.vocab, 128), sizeof(cuda::Block::Shared), false,
                      [=] { cuda::target_kernel<128>(args); }});
    emulator::run(static_cast<unsigned>(seed));
    const std::vector<float> got = logprobs.from_device();
    for (long r = 0; r < kRows; ++r) {
      check_row(r, given.vocab, got[static_cast<std::size_t>(r)], is_greedy[r]);
    }
    if (first.empty()) first = got;
    same_bits(got, first, " with seed " + std::to_string(seed));
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
  given.seeds = options.numbers("seeds", "0,1");
  options.none_left();
  check(given);
  std::puts("ok");
  return 0;
}
