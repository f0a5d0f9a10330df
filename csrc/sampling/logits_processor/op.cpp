// adjust_: checks, arguments, the choice of the device's kernel.
#include "../../core/operators.h"
#include "../parallel_rows.h"
#include "logits_processor.h"

namespace minserve {

void adjust_(const Tensor& logits, const Tensor& tokens_given, const Tensor& slots_given,
             const Tensor& positions_given, const Tensor& records, const MaybeTensor& masks_given,
             const MaybeTensor& mask_of_given) {
  const Check check("adjust_", logits, "logits");
  check.tensor(logits, "logits", ScalarType::Float, {-1, -1}, "[rows, vocab]");
  const std::int64_t rows = logits.size(0), vocab = logits.size(1);
  check.require(vocab >= 1 && vocab < (std::int64_t{1} << 24),
                "logits must have a vocabulary of 1 to 2**24 - 1 tokens, got ", describe(logits));
  check.require(logits.stride(1) == 1 || vocab == 1,
                "logits are changed in place, so rows must be contiguous, got stride ",
                logits.stride(1));
  check.tensor(tokens_given, "tokens", ScalarType::Int, {rows}, "[rows]");
  check.tensor(slots_given, "slots", ScalarType::Int, {rows}, "[rows]");
  check.tensor(positions_given, "positions", ScalarType::Long, {rows}, "[rows]");
  check.tensor(records, "records", ScalarType::Int, {-1, kRecordWords}, "[slots, 8]");
  check.require(
      records.stride(1) == 1 && (records.size(0) <= 1 || records.stride(0) == kRecordWords),
      "records must be contiguous, got strides ", records.stride(0), " and ", records.stride(1));
  const Tensor tokens = torch::stable::contiguous(tokens_given);
  const Tensor slots = torch::stable::contiguous(slots_given);
  const Tensor positions = torch::stable::contiguous(positions_given);

  LogitsProcessorArgs args;
  args.logits = static_cast<float*>(logits.mutable_data_ptr());
  args.row_stride = logits.stride(0);
  args.rows = rows;
  args.vocab = vocab;
  args.tokens = tokens.const_data_ptr<std::int32_t>();
  args.slots = slots.const_data_ptr<std::int32_t>();
  args.positions = positions.const_data_ptr<std::int64_t>();
  args.records = records.const_data_ptr<std::int32_t>();
  args.count = records.size(0);
  check.require(masks_given.has_value() == mask_of_given.has_value(),
                "masks and mask_of come together");
  Tensor masks = records, mask_of = records;  // kept until the launch
  if (masks_given) {
    const std::int64_t words = (vocab + 31) / 32;
    check.tensor(*masks_given, "masks", ScalarType::Int, {-1, -1}, "[masked, words]");
    check.require(masks_given->size(1) >= words, "masks must have a bit for each of ", vocab,
                  " tokens, got ", describe(*masks_given));
    check.tensor(*mask_of_given, "mask_of", ScalarType::Int, {rows}, "[rows]");
    masks = torch::stable::contiguous(*masks_given);
    mask_of = torch::stable::contiguous(*mask_of_given);
    args.masks = masks.const_data_ptr<std::int32_t>();
    args.mask_of = mask_of.const_data_ptr<std::int32_t>();
    args.masked = masks.size(0);
    args.mask_words = masks.size(1);
  }
  if (rows == 0) return;
  if (logits.is_cpu()) return by_rows(args, MS_BY_ISA(process_rows));
#ifdef MINSERVE_CUDA
  cuda::process_logits(args, logits.get_device_index(), current_stream(logits));
#else
  no_cuda();
#endif
}

}  // namespace minserve
