// The op of sealed records, and its CPU part; payload_sums.h describes the sums.
#include "payload_sums.h"

#include <torch/csrc/stable/library.h>

#include "check.h"
#include "record_checksum.h"

namespace megatron_sparse {
namespace {

void add_payload_sums_cpu(const Tensor& message, int64_t records, std::optional<Tensor> sums,
                          std::optional<Tensor> slots) {
  check_vector(message, "payload_sums: message", ScalarType::Byte, -1);
  const PayloadSums call = {static_cast<uint8_t*>(message.mutable_data_ptr()), message.numel(),
                            check_slots(slots, records, "payload_sums: slots"), records,
                            check_table(sums, "payload_sums: sums", records, message)};
  int64_t begin = 0;
  for (int64_t record = 0; record < records; ++record) {
    const PayloadPlace payload = find_payload(call, record, begin);
    begin = payload.at + payload.bytes;
    if (payload.bytes == 0) continue;
    uint8_t* target = call.target(record, payload.at);
    const uint32_t sum =
        read_at<uint32_t>(target) + mixed_sum(call.message + payload.at, payload.bytes / 4, 0);
    std::memcpy(target, &sum, sizeof sum);
  }
}

}  // namespace
}  // namespace megatron_sparse

STABLE_TORCH_LIBRARY_FRAGMENT(megatron_sparse, m) {
  m.def(
      "add_payload_sums_(Tensor(a!) message, int records, Tensor(b!)? sums=None, "
      "Tensor? slots=None) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(megatron_sparse, CPU, m) {
  m.impl("add_payload_sums_", TORCH_BOX(&megatron_sparse::add_payload_sums_cpu));
}
