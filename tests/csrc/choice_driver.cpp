// Which form of a linear map's kernel is chosen, over many shapes: prints what no kernel could run,
// and on which of its forms a choice with sums in a fixed order may fall.
//
// With shapes as arguments (channels inputs gates tokens, each), only the latter, for these.
#include <cstdio>
#include <cstdlib>
#include <set>
#include <tuple>

#include "linear/fixed_choice.h"

using namespace minserve;

namespace {

using Kind = std::tuple<int, int, bool, bool>;  // form, gates, shared by blocks, taken in turn

bool has_parts(Form form) {  // forms that may share the inputs between blocks
  return form == Form::tokens_8 || form == Form::tokens_16 || form == Form::tokens_32 ||
         form == Form::tokens_64 || form == Form::tokens_64_deep;
}
bool has_turns(Form form, std::int64_t gates) {  // forms that are there with parts in turn
  return form == Form::tokens_32 || form == Form::tokens_64_deep ||
         (form == Form::tokens_64 && gates == 1) || (form == Form::wide_128_deep && gates < 3);
}

long wrong = 0;

void check(const char* rule, const Choice& choice, std::int64_t channels, std::int64_t inputs,
           std::int64_t gates, std::int64_t tokens, bool also = true) {
  constexpr int kTokens[] = {8, 16, 32, 64, 64, 8, 16, 32, 64, 128, 128, 256};
  const int form = static_cast<int>(choice.form), block = kTokens[form];
  const bool pairs = choice.form >= Form::pairs_8 && choice.form <= Form::pairs_64;
  const std::int64_t steps = (inputs + 63) / 64;
  const bool ok = also && choice.parts >= 1 && choice.parts <= 8 && block % choice.parts == 0 &&
                  choice.parts <= steps && (choice.parts == 1 || has_parts(choice.form)) &&
                  choice.turns >= 1 && choice.turns <= steps &&
                  (choice.turns == 1 || (choice.parts == 1 && has_turns(choice.form, gates))) &&
                  !(pairs && gates > 1);
  if (ok) return;
  ++wrong;
  std::printf(
      "%s: %lld channels, %lld inputs, %lld gates, %lld tokens: form %d, %d parts, %d turns\n",
      rule, static_cast<long long>(channels), static_cast<long long>(inputs),
      static_cast<long long>(gates), static_cast<long long>(tokens), form, choice.parts,
      choice.turns);
}

Kind kind_of(const Choice& choice, std::int64_t gates) {
  return {static_cast<int>(choice.form), static_cast<int>(gates), choice.parts > 1,
          choice.turns > 1};
}

}  // namespace

int main(int count, char** given) {
  std::set<Kind> reached;
  long shapes = 0;
  for (int i = 1; i + 3 < count; i += 4, ++shapes) {
    const auto number = [&](int at) { return std::atoll(given[i + at]); };
    reached.insert(
        kind_of(FixedChooser(number(0), number(1), number(2), number(3)).choose(), number(2)));
  }
  if (count == 1) {
    for (std::int64_t channels = 8; channels <= 140000; channels += channels / 7 / 8 * 8 + 8) {
      for (std::int64_t inputs = 8; inputs <= 20000; inputs += inputs / 7 / 8 * 8 + 8) {
        for (std::int64_t gates = 1; gates <= 3; ++gates) {
          const int parts = FixedChooser(channels, inputs, gates, 1).choose().parts;
          for (std::int64_t tokens = 1; tokens <= 20000; tokens += tokens / 6 + 1, ++shapes) {
            check("usual", Chooser(channels, inputs, gates, tokens).choose(), channels, inputs,
                  gates, tokens);
            const Choice fixed = FixedChooser(channels, inputs, gates, tokens).choose();
            check("fixed order", fixed, channels, inputs, gates, tokens,
                  fixed.parts * fixed.turns == parts);
            reached.insert(kind_of(fixed, gates));
          }
        }
      }
    }
  }
  std::printf("%ld shapes, %ld wrong\n", shapes, wrong);
  for (const auto& [form, gates, shared, turned] : reached) {
    std::printf("reached %d %d %d %d\n", form, gates, shared, turned);
  }
  return wrong > 0;
}
