// What sampling is, for host and device: the arguments, the row's parameters, the arithmetic that
// decides. No torch in here.
//
// A token that is `distance` octaves from the best is 2**-distance times as likely: distance =
// (best - logit) times octaves_of(temperature). All filters come down to one cut: tokens rank by
// (distance, id); top_k, top_p and min_p each keep the first of this order, so the kept ones are
// those that rank at or before a cut. A token's weight depends on its distance alone and is an
// integer, so sums of weights are exact in any order. Tokens of weight 0 are not sampled, hence
// where they rank does not matter: distances past kFarthest are as good as infinite. Rows without
// top_k first sample from all tokens (rejection.h), where a token may weigh something in its
// section that weighs nothing in the row; a top_p below 1 does not keep it.
#pragma once

#include "../core/cpu_isa.h"
#include "../core/types.h"

namespace minserve {

struct SampleArgs {
  const float* logits = nullptr;  // [rows, vocab], rows row_stride apart
  std::int64_t row_stride = 0;
  std::int64_t rows = 0;
  std::int64_t vocab = 0;
  std::int32_t* tokens = nullptr;
  std::int32_t* slots = nullptr;
  std::int64_t* positions = nullptr;
  std::int32_t* remaining = nullptr;
  std::int32_t* cursor = nullptr;
  std::int32_t* out = nullptr;  // [steps, rows], rows out_stride apart
  std::int64_t out_stride = 0;
  std::int64_t steps = 0;
  const float* temperature = nullptr;
  const std::int32_t* top_k = nullptr;
  const double* top_p = nullptr;
  const float* min_p = nullptr;
  const std::int64_t* streams = nullptr;
  const std::int32_t* stop_ids = nullptr;  // [rows, stops]
  std::int64_t stops = 0;
  // Instead of logits, where nothing but the best is sampled: that of parts of a row, [rows,
  // parts], as ArgmaxKey (core/reduce/argmax_key.cuh).
  const std::uint64_t* best = nullptr;
  std::int64_t parts = 0;

  // Whether row r samples: padding and rows that have ended do not, nor do those whose cursor
  // points outside of `out` (which the host path has refused).
  MS_HD bool is_active(std::int64_t r) const {
    const std::int32_t slot = slots[r], at = cursor[r];  // both asked for at once
    return slot >= 0 && at >= 0 && at < steps;
  }
};

// 2**-39 * 2**38 is below 1.
constexpr float kFarthest = 39.0f;
constexpr int kWeightBits = 38;                    // the best weighs 2**38
constexpr float kLeastTemperature = 1e-30f;        // keeps the quotient defined
constexpr double kExactDouble = 9007199254740992;  // 2**53: integers up to here are exact doubles
constexpr std::int32_t kExactTokens = 32768;       // whose weights sum to no more than that

// For each unit of a logit: one division, of log2(e).
MS_HD float octaves_of(float temperature) {
  return 1.44269504f / (temperature > kLeastTemperature ? temperature : kLeastTemperature);
}

// The last token that is kept, in the order of (distance, id). Distances are not negative, so their
// bits order them.
struct Cut {
  std::uint32_t distance = 0xffffffffu;
  std::uint32_t id = 0xffffffffu;

  MS_HD bool keeps(std::uint32_t bits, std::uint32_t token) const {
    return Cut{bits, token}.key() <= key();
  }
  MS_HD std::uint64_t key() const { return static_cast<std::uint64_t>(distance) << 32 | id; }
};

// splitmix64 (Steele, Lea, Flood, 2014), of which engine/runner/sampling/random_streams.py makes
// the streams.
MS_HD std::uint64_t random_bits(std::uint64_t stream, std::uint64_t position) {
  std::uint64_t x = stream + (position + 1) * 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}
// For the token at a position; after so many that were rejected another one, from a stream that
// begins with the first one's bits.
MS_HD double uniform_number(std::int64_t stream, std::int64_t position, int rejected = 0) {
  std::uint64_t x =
      random_bits(static_cast<std::uint64_t>(stream), static_cast<std::uint64_t>(position));
  if (rejected > 0) x = random_bits(x, static_cast<std::uint64_t>(rejected));
  return static_cast<double>(x >> 11) * 0x1p-53;
}

// The token sampled is the first, in id order, at which the sum of weights passes this.
MS_HD std::uint64_t sampled_weight(double number, std::uint64_t total) {
  // The product may round up to the total, which is one past the last weight.
  const auto target =
      static_cast<std::uint64_t>(number * static_cast<double>(static_cast<std::int64_t>(total)));
  return target < total ? target : total - 1;
}

// The nucleus is those tokens before which the better ones sum to less than this: the least integer
// that is, as a double, no less than top_p * total. At least 1, so that the best is in it.
MS_HD std::uint64_t nucleus_limit(double top_p, std::uint64_t total) {
  const double wanted = top_p * static_cast<double>(static_cast<std::int64_t>(total));
  if (!(wanted > 1.0)) return 1;
  std::int64_t limit = static_cast<std::int64_t>(wanted);
  if (static_cast<double>(limit) < wanted) ++limit;
  // Above 2**53 lesser integers round up to the same double.
  while (limit > 1 && static_cast<double>(limit - 1) >= wanted) --limit;
  return static_cast<std::uint64_t>(limit);
}

// Whether top_p takes tokens away from those that top_k left. As a double the sum before a token
// may equal the total, even with top_p = 1.
MS_HD bool has_nucleus(double top_p, bool has_top_k, std::uint64_t total) {
  return top_p < 1.0 || (has_top_k && total > static_cast<std::uint64_t>(kExactDouble));
}

// How a row is sampled, all read at once.
struct RowParameters {
  float temperature, min_p;
  std::int32_t top_k;
  double top_p;
  std::int64_t stream;

  RowParameters() = default;
  MS_HD RowParameters(const SampleArgs& args, std::int64_t r)
      : temperature(args.temperature[r]),
        min_p(args.min_p[r]),
        top_k(args.top_k[r]),
        top_p(args.top_p[r]),
        stream(args.streams[r]) {}
};

// Where a row stands.
struct RowState {
  std::int32_t cursor, remaining;
  std::int64_t position;

  MS_HD RowState(const SampleArgs& args, std::int64_t r)
      : cursor(args.cursor[r]), remaining(args.remaining[r]), position(args.positions[r]) {}
};

// Writes down what row r sampled (negative: its logits are not finite) and moves the row on.
MS_HD void move_on(const SampleArgs& args, std::int64_t r, const RowState& state,
                   std::int32_t token, bool stops) {
  args.out[state.cursor * args.out_stride + r] = token;
  args.cursor[r] = state.cursor + 1;
  if (token < 0 || state.remaining <= 1 || stops) args.slots[r] = -1;
  if (token < 0) return;
  args.tokens[r] = token;
  args.positions[r] = state.position + 1;
  args.remaining[r] = state.remaining - 1;
}
MS_HD void move_on(const SampleArgs& args, std::int64_t r, std::int32_t token) {
  // All is read before anything is written, so that the reads are under way together.
  const RowState state(args, r);
  bool stops = false;
  for (std::int64_t s = 0; s < args.stops; ++s) {
    stops |= args.stop_ids[r * args.stops + s] == token;
  }
  move_on(args, r, state, token, stops);
}

// On the CPU: bins of distances, and neighbouring tokens whose weights have a sum of their own.
constexpr int kRowBins = 1024;
constexpr std::int64_t kPiece = 512;

// What the instruction sets are chosen for on the CPU; [vocab] each, vocab at least 1.
struct SampleKernels {
  // The best logit, NaN if there is one.
  float (*best)(const float* logits, std::int64_t vocab);
  // The first state of a logit, which is there.
  std::int64_t (*first)(const float* logits, std::int64_t vocab, float logit);
  // 2^-distance, as all of these have it; of up to 2 * kFarthest.
  float (*scaled_prob)(float distance);
  // (best - logit) * octaves, bounded by 2 * kFarthest, and the weights of these. Returns the
  // greatest distance up to kFarthest.
  float (*find_weights)(const float* logits, std::int64_t vocab, float best, float octaves,
                        float* distances, std::int64_t* weights);
  // The sum of the weights of those that rank before a cut.
  std::uint64_t (*before)(const float* distances, std::int64_t vocab, Cut cut,
                          const std::int64_t* weights);
  // The bin of each distance, of so many bins for each unit; what is further is in the last.
  void (*bin)(const float* distances, std::int64_t vocab, float scale, std::uint16_t* bins);
  // Whether one of the numbers is in the bin.
  bool (*holds)(const std::uint16_t* bins, std::int64_t count, std::uint16_t bin);
  // Weights that are not kept become 0; the sums of what is left, [pieces].
  void (*keep)(const float* distances, std::int64_t vocab, Cut cut, std::int64_t* weights,
               std::int64_t* sums);
};

MS_DECLARE_PER_ISA(SampleKernels sample_kernels();)

#ifdef MINSERVE_CUDA
// Both enqueue on the stream.
namespace cuda {
void sample(const SampleArgs& args, int device, void* stream);
void sample_argmax(const SampleArgs& args, int device, void* stream);
}  // namespace cuda
#endif

}  // namespace minserve
