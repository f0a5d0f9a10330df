// Which form of a linear map's kernel is chosen, over many shapes: prints what no kernel could run.
// Given any option, prints for each wide form and number of gates the least shape that takes it:
// "form gates channels inputs tokens".
#include <cstdio>

#include "linear/choice.h"

using namespace minserve;

namespace {

bool has_parts(Form form) {  // forms that may share the inputs between blocks
  return form == Form::tokens_8 || form == Form::tokens_16 || form == Form::tokens_32 ||
         form == Form::tokens_64 || form == Form::tokens_64_deep;
}

long wrong = 0;

void check(std::int64_t channels, std::int64_t inputs, std::int64_t gates, std::int64_t tokens) {
  const Choice choice = Chooser(channels, inputs, gates, tokens).choose();
  if (choice.form == Form::wide) {
    const WideCall call{channels, inputs, gates, tokens};
    if (choice.wide >= 0 && call.can_take(kWideForms[choice.wide])) return;
    ++wrong;
    std::printf("wide form %d\n", choice.wide);
    return;
  }
  constexpr int kTokens[] = {8, 16, 32, 64, 64, 8, 16, 32, 64, 128, 128, 256};
  const int form = static_cast<int>(choice.form), block = kTokens[form];
  const bool pairs = choice.form >= Form::pairs_8 && choice.form <= Form::pairs_64;
  const std::int64_t steps = (inputs + 63) / 64;
  const bool ok = choice.parts >= 1 && choice.parts <= 8 && block % choice.parts == 0 &&
                  choice.parts <= steps && (choice.parts == 1 || has_parts(choice.form)) &&
                  !(pairs && gates > 1);
  if (ok) return;
  ++wrong;
  std::printf("%lld channels, %lld inputs, %lld gates, %lld tokens: form %d in %d parts\n",
              static_cast<long long>(channels), static_cast<long long>(inputs),
              static_cast<long long>(gates), static_cast<long long>(tokens), form, choice.parts);
}

// Widths of which no tile has a multiple, and multiples of all; pieces of tokens likewise.
void print_examples() {
  for (int form = 0; form < kWideCount; ++form) {
    for (std::int64_t gates = 1; gates <= 3; ++gates) {
      std::int64_t least = -1, found[3] = {};
      for (std::int64_t channels = 128; channels <= 16384;
           channels += channels / 8 / 64 * 64 + 64) {
        for (std::int64_t inputs : {72, 200, 384, 768, 1152, 2056, 3080}) {
          for (std::int64_t tokens = 33; tokens <= 2100; tokens += tokens / 9 + 1) {
            const std::int64_t work = channels * inputs * tokens;
            if (least >= 0 && work >= least) continue;
            const Choice choice = Chooser(channels, inputs, gates, tokens).choose();
            if (choice.form != Form::wide || choice.wide != form) continue;
            least = work, found[0] = channels, found[1] = inputs, found[2] = tokens;
          }
        }
      }
      if (least < 0) continue;
      std::printf("%d %d %d %d %d\n", form, static_cast<int>(gates), static_cast<int>(found[0]),
                  static_cast<int>(found[1]), static_cast<int>(found[2]));
    }
  }
}

}  // namespace

int main(int count, char**) {
  if (count > 1) {
    print_examples();
    return 0;
  }
  long shapes = 0;
  for (std::int64_t channels = 8; channels <= 140000; channels += channels / 7 / 8 * 8 + 8) {
    for (std::int64_t inputs = 8; inputs <= 20000; inputs += inputs / 7 / 8 * 8 + 8) {
      for (std::int64_t gates = 1; gates <= 3; ++gates) {
        for (std::int64_t tokens = 1; tokens <= 20000; tokens += tokens / 6 + 1, ++shapes) {
          check(channels, inputs, gates, tokens);
        }
      }
    }
  }
  std::printf("%ld shapes, %ld wrong\n", shapes, wrong);
  return wrong > 0;
}
