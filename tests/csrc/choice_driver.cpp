// Which form of a linear map's kernel is chosen, over many shapes: prints what no kernel could run.
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

}  // namespace

int main() {
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
