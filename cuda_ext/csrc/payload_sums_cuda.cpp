// The ops of sealed records on CUDA: checks, device, stream, launch. Their schemas are
// payload_sums.cpp's. The slots lie on the device; the caller has checked them.
#include "payload_sums.h"

#include "cuda_binding.h"

namespace megatron_sparse {
namespace {

void add_payload_sums(const Tensor& message, const std::optional<Tensor>& slots, int64_t records,
                      int64_t* sums) {
  check_vector(message, "payload_sums: message", ScalarType::Byte, -1);
  check_alignment(message, 16, "payload_sums: message");
  PayloadSums call = {};
  call.message = const_cast<uint8_t*>(static_cast<const uint8_t*>(message.const_data_ptr()));
  call.bytes = message.numel();
  call.records = records;
  call.sums = sums;
  if (slots.has_value()) {
    check_vector(*slots, "payload_sums: slots", ScalarType::Long, records + 1);
    check_beside(*slots, message, "payload_sums: slots");
    call.slots = entries_of(*slots);
  }
  torch::stable::accelerator::DeviceGuard guard(message.get_device_index());
  launch_payload_sums(call, current_stream(message));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

void payload_sums_cuda(const Tensor& sums, const Tensor& message, std::optional<Tensor> slots) {
  check_vector(sums, "payload_sums: sums", ScalarType::Long, -1);
  check_beside(message, sums, "payload_sums: message");
  add_payload_sums(message, slots, sums.numel(), words_of(sums));
}

void seal_cuda(const Tensor& message, int64_t records, std::optional<Tensor> slots) {
  add_payload_sums(message, slots, records, nullptr);
}

}  // namespace
}  // namespace megatron_sparse

STABLE_TORCH_LIBRARY_IMPL(megatron_sparse, CUDA, m) {
  m.impl("payload_sums_", TORCH_BOX(&megatron_sparse::payload_sums_cuda));
  m.impl("seal_", TORCH_BOX(&megatron_sparse::seal_cuda));
}
