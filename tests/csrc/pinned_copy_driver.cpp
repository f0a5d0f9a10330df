// Runs csrc/pinned_copy/kernel.cuh in the emulator: words are copied and some of them become zero,
// then all are copied again by a kernel that may begin before; every schedule must give the same.
#include "cases.h"

#include "pinned_copy/kernel.cuh"

namespace minserve {
namespace {

struct Case {
  long count, first_zero, zeros;
  unsigned blocks;
  std::vector<int> seeds;
};

void check(const Case& given) {
  for (const int seed : given.seeds) {
    emulator::free_all();
    Tensor<std::int32_t> source{"source", 1}, first{"first", 1}, second{"second", 1};
    for (long i = 0; i < given.count; ++i) source.values.push_back(static_cast<std::int32_t>(~i));
    first.values = second.values = std::vector<std::int32_t>(source.values.size(), 7);
    for (auto* tensor : {&source, &first, &second}) tensor->to_device(emulator::Use::write);
    CopyArgs args;
    args.to = first.device, args.source = source.device, args.count = given.count;
    args.first_zero = given.first_zero, args.zeros = given.zeros;
    CopyArgs again = args;
    again.to = second.device, again.zeros = 0;
    for (const CopyArgs& each : {args, again}) {
      emulator::launch({"copy of words", given.blocks, cuda::kCopyThreads, 0, true,
                        [=] { cuda::copy_words_kernel(each); }});
    }
    emulator::run(static_cast<unsigned>(seed));
    std::vector<std::int32_t> left = source.values;
    std::fill_n(left.begin() + given.first_zero, given.zeros, 0);
    if (first.from_device() != source.values) differ("other words arrived");
    if (source.from_device() != left) differ("other words were left");
    if (second.from_device() != left) differ("the next kernel read what was there before");
  }
}

}  // namespace
}  // namespace minserve

int main(int count, char** arguments) {
  using namespace minserve;
  Options options(count, arguments);
  Case given;
  given.count = options.number("count", 1000);
  given.first_zero = options.number("first", 0);
  given.zeros = options.number("zeros", 0);
  given.blocks = static_cast<unsigned>(options.number("blocks", 2));
  given.seeds = options.numbers("seeds", "0,1,2");
  options.none_left();
  check(given);
  std::puts("ok");
  return 0;
}
