// The decoder on the CPU: checks of the tables; decode_records.h does the work.
#include <torch/csrc/stable/library.h>

#include "decode_records.h"
#include "decode_request.h"
#include "isa.h"
#include "parallel.h"

namespace megatron_sparse {
namespace {

Expected check_tables(const DecodeRequest& r) {
  const int64_t* offsets = check_offsets(r.segment_offsets, "decode: segment_offsets");
  const int64_t segment_count = r.segment_count();
  MS_CHECK(offsets[0] >= r.base && offsets[segment_count] - r.base <= r.acc.numel(),
           "decode: the segments do not lie in acc",
           "offsets from " << r.base << " to " << r.base + r.acc.numel(),
           offsets[0] << " to " << offsets[segment_count]);
  for (int64_t s = 0; s < segment_count; ++s) {
    MS_CHECK(offsets[s + 1] - offsets[s] <= kMaxSegmentNumel,
             "decode: segment " << s << " is too long", "at most 2^31 - 1 elements",
             offsets[s + 1] - offsets[s]);
  }
  return {offsets,
          segment_count,
          static_cast<int>(r.value_dtype),
          static_cast<uint32_t>(r.step),
          r.base,
          check_slots(r.slots, segment_count, "decode: slots")};
}

Tensor decode_cpu(const DecodeRequest& r) {
  const Expected expected = check_tables(r);
  std::vector<MessageBytes> messages;
  for (const Tensor& message : r.messages) {
    messages.push_back({static_cast<const uint8_t*>(message.const_data_ptr()), message.numel(),
                        r.sums_of(static_cast<int64_t>(messages.size()))});
  }
  float* acc = static_cast<float*>(r.acc.mutable_data_ptr());
  const std::vector<Status> statuses =
      r.is_sum ? sum_records(messages, expected, r.fresh, acc, kernels())
               : std::vector{decode_records(messages[0], expected, r.fresh, acc, kernels())};
  Tensor result = torch::stable::new_empty(r.segment_offsets, {4 * r.message_count()});
  int64_t* words = static_cast<int64_t*>(result.mutable_data_ptr());
  for (const Status& status : statuses) {
    for (const int64_t word : {int64_t{status.wrong}, status.segment, status.field, status.value}) {
      *words++ = word;
    }
  }
  return result;
}

}  // namespace
}  // namespace megatron_sparse

STABLE_TORCH_LIBRARY_IMPL(megatron_sparse, CPU, m) {
  m.impl("decode_", TORCH_BOX(&megatron_sparse::decode<megatron_sparse::decode_cpu>));
}
