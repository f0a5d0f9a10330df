// Which tile config and split-K of a GEMM are chosen, over many shapes: prints what no kernel could
// run, and on which kernels a choice may fall: the usual one, that among the tiles of small batches
// alone, or the batch-invariant one.
//
// With shapes as arguments (channels inputs gates tokens, each), only the latter, for these.
#include <cstdio>
#include <cstdlib>
#include <set>
#include <string>
#include <tuple>

#include "gemm/args.h"
#include "gemm/heuristics_deterministic.h"

using namespace minserve;

namespace {

// Rule, tile config (a persistent one's with its split-K, which are other kernels), gates, split-K
// by blocks, serial split-K.
using Kind = std::tuple<std::string, std::string, int, bool, bool>;

struct Known {
  const char* name;
  int tokens, most_split_k;
  bool serial[4];  // whether it is there with serial split-K, by gates
};

Known known(TileConfig form) {
  switch (form) {
    case TileConfig::tokens_8:
      return {"tokens_8", 8, 8, {}};
    case TileConfig::tokens_16:
      return {"tokens_16", 16, 8, {}};
    case TileConfig::tokens_32:
      return {"tokens_32", 32, 8, {}};
    case TileConfig::tokens_64:
      return {"tokens_64", 64, 8, {}};
    case TileConfig::persistent_64_32:
      return {"persistent_64_32", 32, 1, {false, true, true, false}};
    case TileConfig::persistent_64_64:
      return {"persistent_64_64", 64, 4, {false, true, true, false}};
    case TileConfig::persistent_128_64:
      return {"persistent_128_64", 64, 2, {false, true, true, false}};
    case TileConfig::persistent_192_64:
      return {"persistent_192_64", 64, 2, {false, true, true, true}};
    case TileConfig::persistent_192_96:
      return {"persistent_192_96", 96, 1, {false, true, true, true}};
    case TileConfig::persistent_128_128:
      return {"persistent_128_128", 128, 2, {false, true, true, false}};
    case TileConfig::persistent_192_128:
      return {"persistent_192_128", 128, 1, {false, true, false, false}};
    case TileConfig::persistent_256_128:
      return {"persistent_256_128", 128, 1, {}};
  }
  return {"no form", 1, 0, {}};
}

long wrong = 0;
std::set<Kind> reached;

void reach(const char* rule, const GemmConfig& choice, std::int64_t gates) {
  std::string name = known(choice.tile).name;
  if (name.rfind("persistent", 0) == 0) name += "/" + std::to_string(choice.split_k);
  reached.insert(
      {rule, name, static_cast<int>(gates), choice.split_k > 1, choice.serial_split_k > 1});
}

void check(const char* rule, const GemmConfig& choice, std::int64_t channels, std::int64_t inputs,
           std::int64_t gates, std::int64_t tokens, bool also = true) {
  reach(rule, choice, gates);
  const Known form = known(choice.tile);
  const std::string name = form.name;
  const bool wide = name.rfind("persistent", 0) == 0;
  const std::int64_t steps = (inputs + 63) / 64;
  bool ok = also && choice.split_k >= 1 && choice.serial_split_k >= 1 &&
            form.tokens % choice.split_k == 0 && choice.split_k * choice.serial_split_k <= steps;
  if (choice.serial_split_k > 1) {
    const bool two_each = gates == 1 && choice.tile == TileConfig::persistent_64_64 &&
                          choice.serial_split_k == 2 &&
                          (choice.split_k == 2 || choice.split_k == 4);
    ok = ok && form.serial[gates] && (choice.split_k == 1 || two_each);
  } else {
    ok = ok && choice.split_k <= form.most_split_k;
  }
  if (wide) {  // three gates have a warpgroup each; steps have all inputs
    ok = ok && (gates < 3 || name.rfind("persistent_192", 0) == 0) &&
         (gates == 1 || choice.split_k == 1);
  }
  if (ok) return;
  ++wrong;
  std::printf(
      "%s: %lld channels, %lld inputs, %lld gates, %lld tokens: form %s, %d parts, %d turns\n",
      rule, static_cast<long long>(channels), static_cast<long long>(inputs),
      static_cast<long long>(gates), static_cast<long long>(tokens), form.name, choice.split_k,
      choice.serial_split_k);
}

// Whether epilogues that only small batches have take such a call.
bool is_small(std::int64_t gates, std::int64_t tokens) {
  return gates == 1 && tokens <= kMostSmallBatch;
}

}  // namespace

int main(int count, char** given) {
  long shapes = 0;
  for (int i = 1; i + 3 < count; i += 4, ++shapes) {
    const auto number = [&](int at) { return std::atoll(given[i + at]); };
    const std::int64_t gates = number(2);
    const SmallBatchHeuristic usual(number(0), number(1), gates, number(3));
    reach("usual", usual.choose(), gates);
    if (is_small(gates, number(3))) reach("small", usual.choose_small_batch(), gates);
    reach("fixed", BatchInvariantHeuristic(number(0), number(1), gates, number(3)).choose(), gates);
  }
  if (count == 1) {
    for (std::int64_t channels = 8; channels <= 140000; channels += channels / 7 / 8 * 8 + 8) {
      for (std::int64_t inputs = 8; inputs <= 20000; inputs += inputs / 7 / 8 * 8 + 8) {
        for (std::int64_t gates = 1; gates <= 3; ++gates) {
          const int parts = BatchInvariantHeuristic(channels, inputs, gates, 1).choose().split_k;
          for (std::int64_t tokens = 1; tokens <= 20000; tokens += tokens / 6 + 1, ++shapes) {
            const SmallBatchHeuristic usual(channels, inputs, gates, tokens);
            check("usual", usual.choose(), channels, inputs, gates, tokens);
            if (is_small(gates, tokens)) {
              const GemmConfig small = usual.choose_small_batch();
              const std::string tile = known(small.tile).name;
              check("small", small, channels, inputs, gates, tokens, tile.rfind("tokens_", 0) == 0);
            }
            const GemmConfig fixed =
                BatchInvariantHeuristic(channels, inputs, gates, tokens).choose();
            const bool whole =
                gates > 1 || channels <= BatchInvariantHeuristic::kOnePartRows || parts == 1;
            check("fixed", fixed, channels, inputs, gates, tokens,
                  fixed.split_k * fixed.serial_split_k == parts && whole);
          }
        }
      }
    }
  }
  std::printf("%ld shapes, %ld wrong\n", shapes, wrong);
  for (const auto& [rule, form, gates, shared, turned] : reached) {
    std::printf("%s %s %d gates%s%s\n", rule.c_str(), form.c_str(), gates, shared ? " shared" : "",
                turned ? " in turn" : "");
  }
  return wrong > 0;
}
