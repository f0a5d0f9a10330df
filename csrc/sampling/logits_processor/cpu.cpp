// Processing rows of logits on the CPU, once per instruction set; all give the same bits.
#include "../../core/vec.h"
#include "logits_processor.h"

namespace minserve {
namespace MS_ISA {

void process_rows(const LogitsProcessorArgs& args, std::int64_t begin, std::int64_t end) {
  for (std::int64_t r = begin; r < end; ++r) process_piece(args, r, 0, args.vocab, 0, 1, [] {});
}

}  // namespace MS_ISA
}  // namespace minserve
