// decode_add_ on the CPU: checks of the arguments and threads; decode_records.h does the work.
//
// The status is {code, segment, field, value}; the accumulator is changed only if the code is 0.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "check.h"
#include "decode_records.h"
#include "isa.h"

namespace megatron_sparse {
namespace {

Tensor decode_add_cpu(const Tensor& acc, const Tensor& message, const Tensor& segment_offsets,
                      int64_t value_dtype, int64_t step, int64_t base, bool fresh,
                      std::optional<Tensor> slots) {
  check_vector(acc, "decode_add_: acc", ScalarType::Float, -1);
  check_vector(message, "decode_add_: message", ScalarType::Byte, -1);
  MS_CHECK(acc.is_cpu() && message.is_cpu(), "decode_add_: a tensor is on the wrong device",
           "all on the CPU", "another");
  check_message_dtype(value_dtype, "decode_add_: value_dtype");
  const int64_t* offsets = check_offsets(segment_offsets, "decode_add_: segment_offsets");
  const int64_t segment_count = segment_offsets.numel() - 1;
  MS_CHECK(base >= 0 && base <= kMaxNumel, "decode_add_: base is out of range", "0 to 2^40", base);
  MS_CHECK(offsets[0] >= base && offsets[segment_count] - base <= acc.numel(),
           "decode_add_: the segments do not lie in acc",
           "offsets from " << base << " to " << base + acc.numel(),
           offsets[0] << " to " << offsets[segment_count]);
  for (int64_t s = 0; s < segment_count; ++s) {
    MS_CHECK(offsets[s + 1] - offsets[s] <= kMaxSegmentNumel,
             "decode_add_: segment " << s << " is too long", "at most 2^31 - 1 elements",
             offsets[s + 1] - offsets[s]);
  }
  const Expected expected = {offsets,
                             segment_count,
                             static_cast<int>(value_dtype),
                             static_cast<uint32_t>(step),
                             base,
                             check_slots(slots, segment_count, "decode_add_: slots")};
  const Status status = decode_records(
      static_cast<const uint8_t*>(message.const_data_ptr()), message.numel(), expected, fresh,
      static_cast<float*>(acc.mutable_data_ptr()), kernels(),
      [](int64_t count, const auto& work) { torch::stable::parallel_for(0, count, 1, work); });
  Tensor result = torch::stable::new_empty(segment_offsets, {4});
  int64_t* fields = static_cast<int64_t*>(result.mutable_data_ptr());
  fields[0] = status.wrong;
  fields[1] = status.segment;
  fields[2] = status.field;
  fields[3] = status.value;
  return result;
}

}  // namespace
}  // namespace megatron_sparse

STABLE_TORCH_LIBRARY_IMPL(megatron_sparse, CPU, m) {
  m.impl("decode_add_", TORCH_BOX(&megatron_sparse::decode_add_cpu));
}
