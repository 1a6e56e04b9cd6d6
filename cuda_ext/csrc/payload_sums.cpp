// The ops of sealed records, and their CPU part; payload_sums.h describes the sums.
#include "payload_sums.h"

#include <torch/csrc/stable/library.h>

#include "check.h"
#include "record_checksum.h"

namespace megatron_sparse {
namespace {

void add_payload_sums(const Tensor& message, const std::optional<Tensor>& slots, int64_t records,
                      int64_t* sums) {
  check_vector(message, "payload_sums: message", ScalarType::Byte, -1);
  PayloadSums call = {};
  call.message = const_cast<uint8_t*>(static_cast<const uint8_t*>(message.const_data_ptr()));
  call.bytes = message.numel();
  call.slots = check_slots(slots, records, "payload_sums: slots");
  call.records = records;
  call.sums = sums;
  int64_t begin = 0;
  for (int64_t record = 0; record < records; ++record) {
    const PayloadPlace payload = find_payload(call, record, begin);
    begin = payload.at + payload.bytes;
    if (payload.bytes == 0) continue;
    uint8_t* target = call.target(record, payload.at);
    uint32_t sum;
    std::memcpy(&sum, target, sizeof sum);
    sum += mixed_sum(call.message + payload.at, payload.bytes / 4, 0);
    std::memcpy(target, &sum, sizeof sum);
  }
}

void payload_sums_cpu(const Tensor& sums, const Tensor& message, std::optional<Tensor> slots) {
  check_vector(sums, "payload_sums: sums", ScalarType::Long, -1);
  add_payload_sums(message, slots, sums.numel(), static_cast<int64_t*>(sums.mutable_data_ptr()));
}

void seal_cpu(const Tensor& message, int64_t records, std::optional<Tensor> slots) {
  add_payload_sums(message, slots, records, nullptr);
}

}  // namespace
}  // namespace megatron_sparse

STABLE_TORCH_LIBRARY_FRAGMENT(megatron_sparse, m) {
  m.def("payload_sums_(Tensor(a!) sums, Tensor message, Tensor? slots=None) -> ()");
  m.def("seal_(Tensor(a!) message, int records, Tensor? slots=None) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(megatron_sparse, CPU, m) {
  m.impl("payload_sums_", TORCH_BOX(&megatron_sparse::payload_sums_cpu));
  m.impl("seal_", TORCH_BOX(&megatron_sparse::seal_cpu));
}
