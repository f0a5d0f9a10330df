// Runs csrc/sampling/kernel.cuh, with --each csrc/sampling/warp_kernel.cuh, with --streamed
// csrc/sampling/streaming_kernel.cuh or with --part csrc/sampling/argmax.cuh, in the emulator: rows
// of one kind of logits, sampled with many sets of parameters, in many schedules. Every token must
// be the one that csrc/sampling/row_cpu.h finds by partial sorting, with the same powers. With
// --sums it compares sums of weights instead, those of GPUs with quick doubles with those of
// others, and with --edges where nuclei end with where bins say that they do.
#include "cases.h"

#include "sampling/argmax.cuh"
#include "sampling/filters_cpu.h"
#include "sampling/kernel.cuh"
#include "sampling/row_cpu.h"
#include "sampling/warp_kernel.cuh"
#include "sampling/streaming_kernel.cuh"

namespace minserve {
namespace {

struct Case {
  std::string kind;
  long vocab, threads, shift, each, part;
  bool stored, streamed;
  long given_up;  // rows at most that the streaming kernel gives up
  std::vector<int> seeds;
};

struct Parameters {
  float temperature;
  int top_k;
  double top_p;
  float min_p;
};
constexpr float kWeightOne = std::int64_t{1} << kWeightBits;  // the best token's
constexpr float kOctaves = 1.44269504f;  // the temperature at which logits are octaves
constexpr Parameters kParameters[] = {
    {0.0f, 0, 1.0, 0.0f},        {1.0f, 0, 1.0, 0.0f},        {0.7f, 1, 1.0, 0.0f},
    {1.0f, 9, 1.0, 0.0f},        {2.0f, 300, 1.0, 0.0f},      {1.0f, 0, 0.9, 0.0f},
    {0.5f, 0, 0.3, 0.0f},        {1e4f, 0, 0.7, 0.0f},        {1e-30f, 40, 0.9, 0.0f},
    {1.3f, 200, 0.95, 0.01f},    {1.0f, 0, 1.0, 0.2f},        {1.0f, 0, 0.0, 0.0f},
    {1.0f, 0, 0.99999, 0.0f},    {1.0f, 5, 0.5, 1.0f},        {1.0f, 1 << 20, 0.8, 0.5f},
    {1.0f, 700, 1.0, 0.0f},      {1.5f, 900, 0.8, 0.05f},     {1.0f, 600, 0.999, 0.0f},
    {kOctaves, 4090, 1.0, 0.0f}, {kOctaves, 2000, 0.9, 0.0f}, {1.0f, 3, 1.0, 0.0f},
};
constexpr long kRows = sizeof kParameters / sizeof *kParameters + 4;

float best_of(const float* logits, std::int64_t vocab) {
  float best = logits[0];
  for (std::int64_t i = 1; i < vocab; ++i) best = cuda::max_or_nan(best, logits[i]);
  return best;
}
float scaled_prob(float distance) {
  return cuda::fast_exp2(-distance);
}
float find_weights(const float* logits, std::int64_t vocab, float best, float octaves,
                   float* distances, std::int64_t* weights) {
  float farthest = 0.0f;
  for (std::int64_t i = 0; i < vocab; ++i) {
    distances[i] = (best - logits[i]) * octaves;
    if (distances[i] <= kFarthest) farthest = std::max(farthest, distances[i]);
    weights[i] = static_cast<std::int64_t>(cuda::fast_exp2(-distances[i]) * kWeightOne);
  }
  return farthest;
}

std::vector<float> logits_of(const Case& given) {
  std::mt19937 random(static_cast<unsigned>(given.vocab));
  std::normal_distribution<float> normal;
  std::vector<float> logits;
  for (long r = 0; r < kRows; ++r) {
    for (long i = 0; i < given.vocab; ++i) {
      const float x = normal(random);
      logits.push_back(given.kind == "normal" || given.kind == "holes" ? x
                       : given.kind == "ties"                          ? std::round(4 * x)
                       : given.kind == "narrow"                        ? 5 + 1e-3f * x
                       : given.kind == "equal"                         ? (i % 2 ? 0.0f : -0.0f)
                       : given.kind == "geometric"                     ? -std::exp2(30 * x - 60)
                       : given.kind == "few"   ? (x > 1.5f || i == 1 ? x : -INFINITY)
                       : given.kind == "later" ? 3 * x
                                               : 1e-4f * x);
    }
    float* const row = &logits[static_cast<std::size_t>(r * given.vocab)];
    if (given.kind == "later") {  // than a warp's first step come all the good ones
      constexpr float kApart[] = {0, 2, 5, 8, 12, 15, 17, 20, 30, INFINITY};
      const long warps = given.threads / 32;
      const long run = ((given.vocab + warps - 1) / warps + 127) / 128 * 128;
      for (long i = 0; i < given.vocab; ++i) {
        row[i] -= i % run < cuda::kStepTokens ? 20 + kApart[r % 10] : 20;
      }
    }
    // Whole sections of none but impossible tokens, at either end and between; the best comes late.
    for (long i = 0; given.kind == "holes" && i < given.vocab; ++i) {
      const long section = i / kSection, last = (given.vocab - 1) / kSection;
      row[i] += 6.0f * static_cast<float>(i) / static_cast<float>(given.vocab);
      if (section == 0 || section == 2 || section == last) row[i] = -INFINITY;
    }
    // Of thousands that weigh nothing some lie in the last bin, alone; the best comes late.
    if (given.kind == "weightless") {
      for (long i = 0; i < given.vocab; ++i) {
        row[i] = i < 399 ? -4 - 1e-3f * static_cast<float>(i) : i < 409 ? -38.014f : -38.005f;
      }
      row[0] = -3.011f, row[given.vocab - 2] = 0.0f, row[given.vocab - 1] = -INFINITY;
    }
    if (given.kind == "outlier") row[given.vocab / 3] = 6.0f, row[given.vocab - 1] = -1e30f;
    if (r == kRows - 1) row[given.vocab - 1] = NAN;
    if (r == kRows - 2) row[given.vocab / 2] = INFINITY;
    if (r == kRows - 3) std::fill(row, row + given.vocab, -INFINITY);
  }
  return logits;
}

// Everything that draw_ reads and changes, on the host; device() tells where the kernel finds it.
struct Rows {
  Tensor<float> logits, temperature{"temperature"}, min_p{"min_p"};
  Tensor<std::int32_t> tokens{"tokens"}, slots{"slots"}, remaining{"remaining"}, cursor{"cursor"},
      out{"out"}, top_k{"top_k"}, stop_ids{"stop_ids"};
  Tensor<std::int64_t> positions{"positions"}, streams{"streams"};
  Tensor<double> top_p{"top_p"};
  Tensor<std::uint64_t> best{"best"};  // of parts
  long vocab, parts = 0;

  Rows(const Case& given) : vocab(given.vocab) {
    logits = {"logits", static_cast<std::size_t>(given.shift), logits_of(given)};
    for (long r = 0; r < kRows; ++r) {
      const Parameters& one = kParameters[r % (kRows - 4)];
      temperature.values.push_back(given.part > 0 ? 0.0f : one.temperature);
      top_k.values.push_back(one.top_k);
      top_p.values.push_back(one.top_p);
      min_p.values.push_back(one.min_p);
      tokens.values.push_back(-7);
      slots.values.push_back(r == kRows - 4 ? -1 : static_cast<int>(r));
      remaining.values.push_back(r % 5 ? 9 : 1);
      cursor.values.push_back(static_cast<int>(r % 2));
      positions.values.push_back(3 * r);
      streams.values.push_back(static_cast<std::int64_t>(r * 0x9e3779b97f4a7c15u));
      stop_ids.values.push_back(-1);
      stop_ids.values.push_back(static_cast<int>(r % 3));
    }
    out.values.assign(2 * kRows, -9);
    if (given.part > 0) find_bests(given.part);
  }

  void find_bests(long part) {
    parts = (vocab + part - 1) / part;
    for (long r = 0; r < kRows; ++r) {
      for (long i = 0; i < vocab; ++i) {
        if (i % part == 0) best.values.push_back(0);
        const float logit = logits.values[static_cast<std::size_t>(r * vocab + i)] + 0.0f;
        const std::uint64_t key = cuda::ArgmaxKey::of(logit, static_cast<unsigned>(i)).key;
        best.values.back() = std::max(best.values.back(), key);
      }
    }
  }

  // Calls each(tensor, use) for all of them.
  template <class Each>
  void all(Each each) {
    using emulator::Use;
    each(logits, Use::read), each(temperature, Use::read), each(min_p, Use::read);
    each(top_k, Use::read), each(top_p, Use::read), each(streams, Use::read);
    each(stop_ids, Use::read), each(best, Use::read), each(tokens, Use::write),
        each(slots, Use::write);
    each(remaining, Use::write), each(cursor, Use::write), each(positions, Use::write);
    each(out, Use::write);
  }
  SampleArgs args() const {
    SampleArgs args;
    args.logits = logits.device, args.row_stride = vocab, args.vocab = vocab, args.rows = kRows;
    args.tokens = tokens.device, args.slots = slots.device, args.positions = positions.device;
    args.remaining = remaining.device, args.cursor = cursor.device, args.out = out.device;
    args.out_stride = kRows, args.steps = 2;
    args.temperature = temperature.device, args.top_k = top_k.device, args.top_p = top_p.device;
    args.min_p = min_p.device, args.streams = streams.device;
    args.stop_ids = stop_ids.device, args.stops = 2;
    args.best = best.device, args.parts = parts;
    return args;
  }
  std::vector<std::int64_t> changed() const {
    std::vector<std::int64_t> all(positions.device, positions.device + kRows);
    for (const auto* part : {&tokens, &slots, &remaining, &cursor, &out}) {
      const auto values = part->from_device();
      all.insert(all.end(), values.begin(), values.end());
    }
    return all;
  }
};

std::vector<std::int64_t> expected(const Case& given) {
  Rows rows(given);
  rows.all([](auto& tensor, emulator::Use) { tensor.device = tensor.values.data(); });
  const SampleArgs args = rows.args();
  const SampleKernels kernels = {&best_of, &first_place, &scaled_prob, &find_weights,
                                 &before,  &bin,         &holds,       &keep};
  RowSampler row(args, kernels);
  for (long r = 0; r < kRows; ++r) {
    if (args.is_active(r)) move_on(args, r, row.token(r));
  }
  return rows.changed();
}

template <int kThreads>
emulator::Launch streamed_launch(const SampleArgs& args) {
  return {"sample", static_cast<unsigned>(kRows),
          kThreads, static_cast<std::size_t>(cuda::streaming_shared_bytes<kThreads>()),
          false,    [=] { cuda::streaming_kernel<kThreads, 1>(args); }};
}

template <unsigned kTokens>
emulator::Launch small_launch(const SampleArgs& args) {
  if (args.vocab > cuda::kWarp * kTokens) differ("so many tokens have no room in a warp");
  constexpr unsigned kEach = cuda::kWarpKernelThreads / cuda::kWarp;
  return {"sample",
          static_cast<unsigned>((args.rows + kEach - 1) / kEach),
          cuda::kWarpKernelThreads,
          0,
          false,
          [=] { cuda::warp_kernel<kTokens>(args); }};
}
emulator::Launch launch_of(const Case& given, const SampleArgs& args) {
  if (given.part > 0) {
    constexpr unsigned kEach = cuda::kArgmaxThreads / cuda::kWarp;
    return {"sample",
            static_cast<unsigned>((args.rows + kEach - 1) / kEach),
            cuda::kArgmaxThreads,
            0,
            false,
            [=] { cuda::argmax_kernel(args); }};
  }
  if (given.each == 4) return small_launch<4>(args);
  if (given.each == 8) return small_launch<8>(args);
  if (given.each == 9) return small_launch<9>(args);
  if (given.each == 16) return small_launch<16>(args);
  if (given.each == 32) return small_launch<32>(args);
  if (given.each) differ("no kernel has so many tokens in a lane");
  if (given.streamed) {
    if (given.threads == 64) return streamed_launch<64>(args);
    if (given.threads == 128) return streamed_launch<128>(args);
    if (given.threads == 256) return streamed_launch<256>(args);
    if (given.threads == 512) return streamed_launch<512>(args);
    differ("no kernel has so many threads");
  }
  const unsigned threads = cuda::row_threads(given.vocab, static_cast<unsigned>(given.threads));
  std::size_t bytes = static_cast<std::size_t>(cuda::sample_shared_bytes(threads));
  const bool stored = given.stored;
  if (stored) bytes += static_cast<std::size_t>(cuda::stored_row_bytes(given.vocab, 1));
  return {"sample", static_cast<unsigned>(kRows), threads, bytes, false, [=] {
            if (stored) return cuda::sample_kernel<true, 1024, 1>(args);
            cuda::sample_kernel<false, 1024, 1>(args);
          }};
}

void check(const Case& given) {
  const std::vector<std::int64_t> want = expected(given);
  for (const int seed : given.seeds) {
    emulator::free_all();
    Rows rows(given);
    rows.all([](auto& tensor, emulator::Use use) { tensor.to_device(use); });
    const SampleArgs args = rows.args();
    emulator::launch(launch_of(given, args));
    emulator::run(static_cast<unsigned>(seed));
    if (emulator::detours() > given.given_up) {
      differ(std::to_string(emulator::detours()) + " rows were given up");
    }
    const std::vector<std::int64_t> got = rows.changed();
    for (std::size_t i = 0; i < want.size(); ++i) {
      if (got[i] == want[i]) continue;
      differ("seed " + std::to_string(seed) + ", array " + std::to_string(i / kRows) + ", row " +
             std::to_string(i % kRows) + ": " + std::to_string(got[i]) + " instead of " +
             std::to_string(want[i]));
    }
  }
}

// Between which scaled probabilities the bins say that a block's row's nucleus ends.
struct EdgesArgs {
  const float* logits;
  unsigned vocab;
  const float* octaves;
  const double* top_p;
  cuda::Edges* edges;
};
template <unsigned kThreads>
void edges_kernel(const EdgesArgs& args) {
  using namespace cuda;
  auto& shared = *reinterpret_cast<StreamingShared<kThreads>*>(memory);
  const unsigned r = blockIdx.x;
  const float* const logits = args.logits + r * args.vocab;
  const Row row = {logits, args.vocab, Row::is_aligned(logits), kThreads / kWarp};
  Block block(shared.block, kThreads / kWarp);
  ScaledProbHistogram<kThreads> bins(shared.bins, args.vocab, block, shared.results);
  bool counted = false;
  const float best =
      best_and_sections<true>(row, args.octaves[r], block, shared.sections, bins, counted);
  const ScaledProbRow scaled_probs(row, {best, args.octaves[r]});
  const Edges edges = StreamingSampler<kThreads>(scaled_probs, block, shared, bins, counted)
                          .edges_of_nucleus(args.top_p[r]);
  if (threadIdx.x == 0) args.edges[r] = edges;
}
// Nuclei that end just before or behind some token: its scaled probabilities must lie between the
// edges, as attempts are kept or rejected by these. Many lie at the border of a bin: some tokens
// are any, of which there are more than bins, some those that are nearest to one.
void check_edges(const Case& given, long rows) {
  constexpr unsigned kThreads = 128;
  std::mt19937 random(static_cast<unsigned>(given.vocab));
  const std::vector<float> all = logits_of(given);
  const auto vocab = static_cast<std::size_t>(given.vocab);
  Tensor<float> logits{"logits"}, octaves{"octaves"};
  Tensor<double> top_p{"top_p"};
  Tensor<cuda::Edges> edges{"edges"};
  std::vector<std::uint32_t> want;
  for (long r = 0; r < rows; ++r) {
    const float* const row = &all[static_cast<std::size_t>(r % (kRows - 4)) * vocab];
    logits.values.insert(logits.values.end(), row, row + vocab);
    octaves.values.push_back(octaves_of(0.15f + 0.01f * static_cast<float>(r % 151)));
    edges.values.push_back({});
    std::vector<float> distances(vocab);
    std::vector<std::int64_t> weights(vocab);
    find_weights(row, given.vocab, best_of(row, given.vocab), octaves.values.back(),
                 distances.data(), weights.data());
    std::vector<std::size_t> order(vocab);
    for (std::size_t i = 0; i < vocab; ++i) order[i] = i;
    std::stable_sort(order.begin(), order.end(),
                     [&](std::size_t x, std::size_t y) { return distances[x] < distances[y]; });
    std::uint64_t total = 0, before = 0;
    std::size_t weighty = 0;
    for (const std::int64_t weight : weights) {
      total += static_cast<std::uint64_t>(weight), weighty += weight > 0;
    }
    std::size_t last = random() % (weighty - 1);  // of the nucleus
    // How far scaled probabilities are from a border, in ulp, where they are to the best from the
    // first.
    const auto apart = [&](std::size_t i) {
      const auto low = static_cast<std::int16_t>(__float_as_uint(scaled_prob(distances[order[i]])));
      return std::abs(static_cast<int>(low));
    };
    for (std::size_t i = 0; r % 2 && i + 1 < weighty; ++i) {
      if (apart(i) < apart(last)) last = i;
    }
    for (std::size_t i = 0; i < last; ++i) {
      before += static_cast<std::uint64_t>(weights[order[i]]);
    }
    const auto own = static_cast<double>(weights[order[last]]);
    const double part = r % 2 ? own / 2 : r % 4 ? own : std::min(own, 1.0);
    const double wanted = static_cast<double>(before) + part;
    top_p.values.push_back(wanted / static_cast<double>(total));
    // Which it is the last of, but for how the quotient is rounded.
    const std::uint64_t limit = nucleus_limit(top_p.values.back(), total);
    std::size_t at = 0;
    for (std::uint64_t sum = 0;; ++at) {
      sum += static_cast<std::uint64_t>(weights[order[at]]);
      if (sum >= limit) break;
    }
    const float odd = scaled_prob(distances[order[at]]);
    want.push_back(__float_as_uint(odd));
  }
  emulator::free_all();
  logits.to_device(emulator::Use::read), octaves.to_device(emulator::Use::read);
  top_p.to_device(emulator::Use::read), edges.to_device(emulator::Use::write);
  const EdgesArgs args = {logits.device, static_cast<unsigned>(given.vocab), octaves.device,
                          top_p.device, edges.device};
  emulator::launch({"edges", static_cast<unsigned>(rows), kThreads,
                    sizeof(cuda::StreamingShared<kThreads>), false,
                    [=] { edges_kernel<kThreads>(args); }});
  emulator::run(0);
  for (long r = 0; r < rows; ++r) {
    const cuda::Edges found = edges.device[r];
    const std::uint32_t odd = want[static_cast<std::size_t>(r)];
    if (odd > found.above || odd <= found.listed) {
      differ("row " + std::to_string(r) + ": a nucleus ends at a scaled probability of " +
             std::to_string(odd) + ", not from " + std::to_string(found.listed) + " to " +
             std::to_string(found.above));
    }
  }
}

// Of scaled probabilities from 2**-45 to 1, of which those below 2**-38 weigh nothing.
template <bool kQuickDoubles>
std::uint64_t sum_of(const std::vector<float>& scaled_probs) {
  using Sum = cuda::ScaledProbSumOf<kQuickDoubles>;
  Sum sum;
  for (std::size_t i = 0; i < scaled_probs.size(); ++i)
    sum.add_if(i % 3 > 0, Sum::term(scaled_probs[i]));
  return sum.sum();
}
void check_sums(long rounds) {
  std::mt19937 random(0);
  std::uniform_real_distribution<float> octaves(0.0f, 45.0f);
  for (long round = 0; round < rounds; ++round) {
    std::vector<float> scaled_probs = {1.0f, 0.0f, 1.0f, 0x1p-38f, 0x1.fffffep-39f, 0x1p-126f};
    const float steep = 1.0f / static_cast<float>(1 + round % 8);
    while (scaled_probs.size() < cuda::kMostSummed) {
      scaled_probs.push_back(round == 0 ? 1.0f : std::exp2(-octaves(random) * steep));
    }
    std::uint64_t want = 0;
    for (std::size_t i = 0; i < scaled_probs.size(); ++i) {
      if (i % 3 > 0) want += static_cast<std::uint64_t>(scaled_probs[i] * kWeightOne);
    }
    if (sum_of<true>(scaled_probs) != want) differ("a sum of doubles");
    if (sum_of<false>(scaled_probs) != want) differ("a sum of pieces");
  }
}

}  // namespace
}  // namespace minserve

int main(int count, char** arguments) {
  using namespace minserve;
  Options options(count, arguments);
  Case given;
  given.kind = options.text("kind", "normal");
  given.vocab = options.number("vocab", 66);
  given.threads = options.number("threads", 128);
  given.shift = options.number("shift", 0);
  given.each = options.number("each", 0);
  given.part = options.number("part", 0);
  given.stored = options.number("stored", 0);
  given.streamed = options.number("streamed", 0);
  given.given_up = options.number("given-up", 0);
  given.seeds = options.numbers("seeds", "0,1");
  const long sums = options.number("sums", 0), edges = options.number("edges", 0);
  options.none_left();
  if (sums > 0) check_sums(sums);
  if (edges > 0) check_edges(given, edges);
  if (sums == 0 && edges == 0) check(given);
  std::puts("ok");
  return 0;
}
