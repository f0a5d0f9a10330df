// Runs csrc/sampling/logits_processor/kernel.cuh in the emulator: rows with every kind of record
// and mask, twice, as two steps are, compared with one thread that takes whole rows; every schedule
// must give the same.
#include "cases.h"

#include "sampling/logits_processor/kernel.cuh"

namespace minserve {
namespace {

constexpr long kRows = 8, kSlots = 6, kMasks = 2;

struct Case {
  long vocab, entries;
  std::vector<int> seeds;
};

struct Tensors {
  Tensor<float> logits{"logits"};
  Tensor<std::int32_t> tokens{"tokens"}, slots{"slots"}, records{"records"}, masks{"masks"},
      mask_of{"mask_of"}, entries{"entries"}, counts{"counts"};
  Tensor<std::int64_t> positions{"positions"};
  LogitsProcessorArgs args;

  // On the device the others' addresses are in the records.
  explicit Tensors(const Case& given) {
    std::mt19937 random(7);
    std::normal_distribution<float> normal(0.0f, 3.0f);
    const auto below = [&](long most) { return static_cast<std::int32_t>(random() % most); };
    const long vocab = given.vocab, words = (vocab + 31) / 32;
    for (long i = 0; i < kRows * vocab; ++i) logits.values.push_back(normal(random));
    logits.values[0] = NAN;
    for (long r = 0; r < kRows; ++r) {
      tokens.values.push_back(below(vocab));
      slots.values.push_back(static_cast<std::int32_t>(r == 6 ? -1 : r == 7 ? kSlots : r));
      positions.values.push_back(r % 3);
      mask_of.values.push_back(static_cast<std::int32_t>(r % 4) - 1);
    }
    for (long i = 0; i < kMasks * words; ++i) {
      masks.values.push_back(static_cast<std::int32_t>(random()));
    }
    for (long i = 0; i < kSlots * vocab; ++i) {
      counts.values.push_back(below(9) == 0 ? below(7) : 0);
    }
    // Half of the entries of a slot are biases of tokens that differ, the rest bans of some.
    for (long i = 0; i < kSlots * given.entries; ++i) {
      const long which = i % given.entries, biases = (given.entries + 1) / 2;
      const float value = which < biases ? normal(random) : -INFINITY;
      const long id = (which < biases ? which : which - biases) * 37 % vocab;
      entries.values.insert(entries.values.end(),
                            {static_cast<std::int32_t>(id), bits(value), which < biases ? 9 : 2});
    }
    logits.to_device(emulator::Use::write);
    counts.to_device(emulator::Use::write);
    for (auto* read : {&tokens, &slots, &masks, &mask_of, &entries})
      read->to_device(emulator::Use::read);
    positions.to_device(emulator::Use::read);
    for (long s = 0; s < kSlots; ++s) {
      const bool counted = s % 3 != 1, has_entries = s % 2 == 1 && given.entries > 0;
      add_address(counted ? counts.device + s * vocab : nullptr);
      add_address(has_entries ? entries.device + s * given.entries * kEntryWords : nullptr);
      for (const float penalty : {1.25f, 0.5f, -0.25f}) records.values.push_back(bits(penalty));
      records.values.push_back(static_cast<std::int32_t>(has_entries ? given.entries : 0));
    }
    records.to_device(emulator::Use::read);
    args.logits = logits.device, args.row_stride = vocab, args.rows = kRows, args.vocab = vocab;
    args.tokens = tokens.device, args.slots = slots.device, args.positions = positions.device;
    args.records = records.device, args.count = kSlots;
    args.masks = masks.device, args.mask_of = mask_of.device;
    args.masked = kMasks, args.mask_words = words;
  }

 private:
  static std::int32_t bits(float value) {
    std::int32_t word;
    std::memcpy(&word, &value, sizeof word);
    return word;
  }
  void add_address(const void* place) {
    const auto address = reinterpret_cast<std::uintptr_t>(place);
    records.values.push_back(static_cast<std::int32_t>(address));
    records.values.push_back(static_cast<std::int32_t>(address >> 32));
  }
};

void check(const Case& given) {
  emulator::free_all();
  Tensors serial(given);
  for (int step = 0; step < 2; ++step) {
    for (long r = 0; r < kRows; ++r) process_piece(serial.args, r, 0, given.vocab, 0, 1, [] {});
  }
  const std::vector<float> logits = serial.logits.from_device();
  const std::vector<std::int32_t> counts = serial.counts.from_device();
  for (const int seed : given.seeds) {
    emulator::free_all();
    Tensors both(given);
    const LogitsProcessorArgs args = both.args;
    const auto blocks = static_cast<unsigned>(kRows * cuda::pieces_of(given.vocab));
    for (int step = 0; step < 2; ++step) {
      emulator::launch({"logits processor", blocks, cuda::kLogitsProcessorThreads, 0, step > 0,
                        [=] { cuda::logits_processor_kernel(args); }});
    }
    emulator::run(static_cast<unsigned>(seed));
    same_bits(both.logits.from_device(), logits, " with seed " + std::to_string(seed));
    if (both.counts.from_device() != counts) differ("other counts");
  }
}

}  // namespace
}  // namespace minserve

int main(int count, char** arguments) {
  using namespace minserve;
  Options options(count, arguments);
  Case given;
  given.vocab = options.number("vocab", 66);
  given.entries = options.number("entries", 0);
  given.seeds = options.numbers("seeds", "0,1");
  options.none_left();
  check(given);
  std::puts("ok");
  return 0;
}
