// Arguments of target_logprobs and report_logprobs_, and what they write. No torch in here.
//
// A report is int32 words: the bits of the target's log-probability; 1 where the target is the most
// likely token, else 0; then, of each of the best tokens, the best first, its id and the bits of
// its log-probability. Of equal logits the lowest id is better.
#pragma once

#include "../../core/cpu_isa.h"
#include "../../core/types.h"

namespace minserve {

struct LogprobsArgs {
  const float* logits = nullptr;  // [rows, vocab], rows row_stride apart
  std::int64_t row_stride = 0;
  std::int64_t rows = 0;
  std::int64_t vocab = 0;
  std::int32_t* reports = nullptr;        // [rows, words], or [steps, rows, words]
  std::int32_t top = 0;                   // how many best tokens a report has room for
  const std::int64_t* targets = nullptr;  // [rows]; else null, and all of these are given:
  // What sampling has written down, and how many of it have been reported.
  const std::int32_t* out = nullptr;  // [steps, rows], rows out_stride apart
  std::int64_t out_stride = 0;
  std::int64_t steps = 0;
  const std::int32_t* cursor = nullptr;  // [rows]
  std::int32_t* told = nullptr;          // [rows]
  const std::int32_t* tops = nullptr;    // [rows]: best tokens to report, negative for no report
};

constexpr std::int32_t kMostTop = 20;  // no more than a warp has threads

MS_HD std::int32_t words_of_report(std::int32_t top) {
  return 2 + 2 * top;
}

// What is asked for of row r.
struct LogprobsRequest {
  std::int32_t* report = nullptr;  // null: nothing
  std::int64_t target = 0;
  std::int32_t top = 0;

  MS_HD LogprobsRequest(const LogprobsArgs& args, std::int64_t r) {
    const std::int32_t words = words_of_report(args.top);
    if (args.targets) {
      report = args.reports + r * words;
      target = args.targets[r];
      top = args.top;
      return;
    }
    // Only a row that has sampled since the last call has moved its cursor.
    const std::int32_t wanted = args.tops[r], at = args.told[r];
    if (wanted < 0 || at < 0 || at >= args.steps || at >= args.cursor[r]) return;
    report = args.reports + (at * args.rows + r) * words;
    target = args.out[at * args.out_stride + r];
    top = wanted < args.top ? wanted : args.top;
  }
};

// Does rows [begin, end) on the CPU.
MS_DECLARE_PER_ISA(void logprob_rows(const LogprobsArgs& args, std::int64_t begin,
                                     std::int64_t end);)

#ifdef MINSERVE_CUDA
namespace cuda {
// Enqueues on the stream.
void logprobs(const LogprobsArgs& args, int device, void* stream);
}  // namespace cuda
#endif

}  // namespace minserve
