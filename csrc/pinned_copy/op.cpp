// copy_words_: checks, arguments, the choice of the device's kernel.
#include "pinned_copy.h"

#include <algorithm>

#include "../core/operators.h"

namespace minserve {

void copy_words_(const Tensor& to, const Tensor& source, std::int64_t first_zero,
                 std::int64_t zeros) {
  const Tensor& on_device = to.is_cpu() ? source : to;
  const Check check("copy_words_", on_device, to.is_cpu() ? "source" : "to");
  check.require(
      (source.scalar_type() == ScalarType::Int || source.scalar_type() == ScalarType::Long) &&
          source.dim() == 1 && source.is_contiguous(),
      "source must be contiguous int32 or int64 [count], got ", describe(source));
  check.require(to.scalar_type() == source.scalar_type() && to.dim() == 1 && to.is_contiguous() &&
                    to.size(0) == source.size(0),
                "to must be contiguous [", source.size(0), "] of source's dtype, got ",
                describe(to));
  check.require(first_zero >= 0 && zeros >= 0 && zeros <= source.size(0) - first_zero,
                "zeros must be among the ", source.size(0), " of source, got ", zeros, " from ",
                first_zero, " on");
  if (!to.is_cpu() && !source.is_cpu()) check.same_device(source, "source");
  check.require(!overlap(to, source), "to must not share memory with source");
  const std::int64_t words = bytes_of(source) / 4;
  CopyArgs args;
  args.to = static_cast<std::int32_t*>(to.mutable_data_ptr());
  args.source = static_cast<std::int32_t*>(source.mutable_data_ptr());
  args.count = source.size(0) * words;
  args.first_zero = first_zero * words;
  args.zeros = zeros * words;
  args.to_on_host = to.is_cpu();
  args.source_on_host = source.is_cpu();
  if (args.count == 0) return;
  if (on_device.is_cpu()) {
    std::copy(args.source, args.source + args.count, args.to);
    std::fill_n(args.source + args.first_zero, args.zeros, 0);
    return;
  }
#ifdef MINSERVE_CUDA
  cuda::copy_words(args, on_device.get_device_index(), current_stream(on_device));
#else
  no_cuda();
#endif
}

}  // namespace minserve
