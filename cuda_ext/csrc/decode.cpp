// decode_add_ and decode_sum_ on the CPU: checks of the arguments; decode_records.h does the work.
//
// A message's status is {code, segment, field, value}; it is added only if the code is 0.
#include <torch/csrc/stable/library.h>

#include "decode_records.h"
#include "isa.h"
#include "parallel.h"

namespace megatron_sparse {
namespace {

Expected check_decode(const Tensor& acc, const Tensor& segment_offsets, int64_t value_dtype,
                      int64_t step, int64_t base, const std::optional<Tensor>& slots) {
  check_vector(acc, "decode: acc", ScalarType::Float, -1);
  check_message_dtype(value_dtype, "decode: value_dtype");
  const int64_t* offsets = check_offsets(segment_offsets, "decode: segment_offsets");
  const int64_t segment_count = segment_offsets.numel() - 1;
  MS_CHECK(base >= 0 && base <= kMaxNumel, "decode: base is out of range", "0 to 2^40", base);
  MS_CHECK(offsets[0] >= base && offsets[segment_count] - base <= acc.numel(),
           "decode: the segments do not lie in acc",
           "offsets from " << base << " to " << base + acc.numel(),
           offsets[0] << " to " << offsets[segment_count]);
  for (int64_t s = 0; s < segment_count; ++s) {
    MS_CHECK(offsets[s + 1] - offsets[s] <= kMaxSegmentNumel,
             "decode: segment " << s << " is too long", "at most 2^31 - 1 elements",
             offsets[s + 1] - offsets[s]);
  }
  return {offsets,
          segment_count,
          static_cast<int>(value_dtype),
          static_cast<uint32_t>(step),
          base,
          check_slots(slots, segment_count, "decode: slots")};
}

MessageBytes check_message(const Tensor& message) {
  check_vector(message, "decode: message", ScalarType::Byte, -1);
  return {static_cast<const uint8_t*>(message.const_data_ptr()), message.numel()};
}

// Of the records of so many messages; null if they are not sealed.
const int64_t* check_sums(const std::optional<Tensor>& sums, int64_t messages,
                          const Expected& expected) {
  if (!sums.has_value()) return nullptr;
  check_vector(*sums, "decode: sums", ScalarType::Long, messages * expected.segment_count);
  return static_cast<const int64_t*>(sums->const_data_ptr());
}

Tensor decode_add_cpu(const Tensor& acc, const Tensor& message, const Tensor& segment_offsets,
                      int64_t value_dtype, int64_t step, int64_t base, bool fresh,
                      std::optional<Tensor> slots, std::optional<Tensor> sums) {
  const Expected expected = check_decode(acc, segment_offsets, value_dtype, step, base, slots);
  MessageBytes content = check_message(message);
  content.sums = check_sums(sums, 1, expected);
  const Status status = decode_records(content, expected, fresh,
                                       static_cast<float*>(acc.mutable_data_ptr()), kernels());
  return result_of(segment_offsets, {status.wrong, status.segment, status.field, status.value});
}

Tensor decode_sum_cpu(const Tensor& acc, const std::vector<Tensor>& messages,
                      const Tensor& segment_offsets, int64_t value_dtype, int64_t step,
                      int64_t base, bool fresh, std::optional<Tensor> slots,
                      std::optional<Tensor> sums) {
  const Expected expected = check_decode(acc, segment_offsets, value_dtype, step, base, slots);
  std::vector<MessageBytes> contents;
  for (const Tensor& message : messages) contents.push_back(check_message(message));
  const int64_t count = static_cast<int64_t>(contents.size());
  MS_CHECK(count > 0, "decode: there are no messages", "at least one", 0);
  const int64_t* found = check_sums(sums, count, expected);
  for (int64_t i = 0; found != nullptr && i < count; ++i) {
    contents[i].sums = found + i * expected.segment_count;
  }
  const std::vector<Status> statuses = sum_records(
      contents, expected, fresh, static_cast<float*>(acc.mutable_data_ptr()), kernels());
  Tensor result = torch::stable::new_empty(segment_offsets, {4 * count});
  int64_t* fields = static_cast<int64_t*>(result.mutable_data_ptr());
  for (const Status& status : statuses) {
    for (const int64_t field :
         {int64_t{status.wrong}, status.segment, status.field, status.value}) {
      *fields++ = field;
    }
  }
  return result;
}

}  // namespace
}  // namespace megatron_sparse

STABLE_TORCH_LIBRARY_IMPL(megatron_sparse, CPU, m) {
  m.impl("decode_add_", TORCH_BOX(&megatron_sparse::decode_add_cpu));
  m.impl("decode_sum_", TORCH_BOX(&megatron_sparse::decode_sum_cpu));
}
