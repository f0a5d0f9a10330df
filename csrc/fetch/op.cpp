// fetch_: checks and arguments.
#include "fetch.h"

#include "../common/operators.h"

namespace minserve {

void fetch_(const Tensor& words, const Tensor& host, std::int64_t first_zero, std::int64_t zeros) {
  const Check check("fetch_", words, "words");
  check.require(words.scalar_type() == ScalarType::Int && words.dim() == 1 && words.is_contiguous(),
                "words must be contiguous int32 [count], got ", describe(words));
  check.require(host.is_cpu() && host.scalar_type() == ScalarType::Int && host.dim() == 1 &&
                    host.is_contiguous() && host.size(0) == words.size(0),
                "host must be contiguous int32 [", words.size(0), "] on the CPU, got ",
                describe(host));
  check.require(first_zero >= 0 && zeros >= 0 && zeros <= words.size(0) - first_zero,
                "zeros must be among the ", words.size(0), " words, got ", zeros, " from ",
                first_zero, " on");
  FetchArgs args;
  args.words = static_cast<std::int32_t*>(words.mutable_data_ptr());
  args.host = static_cast<std::int32_t*>(host.mutable_data_ptr());
  args.count = words.size(0);
  args.first_zero = first_zero;
  args.zeros = zeros;
  run_fetch(args, words);
}

}  // namespace minserve
