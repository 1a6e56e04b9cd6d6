// The op of sealed records on CUDA: checks, device, stream, launch. Its schema is
// payload_sums.cpp's. The slots lie on the device; the caller has checked them.
#include "cuda_binding.h"
#include "payload_sums.h"

namespace megatron_sparse {
namespace {

void add_payload_sums_cuda(const Tensor& message, int64_t records, std::optional<Tensor> sums,
                           std::optional<Tensor> slots) {
  check_vector(message, "payload_sums: message", ScalarType::Byte, -1);
  check_alignment(message, 16, "payload_sums: message");
  const PayloadSums call = {static_cast<uint8_t*>(message.mutable_data_ptr()), message.numel(),
                            check_table(slots, "payload_sums: slots", records + 1, message),
                            records, check_table(sums, "payload_sums: sums", records, message)};
  torch::stable::accelerator::DeviceGuard guard(message.get_device_index());
  launch_payload_sums(call, current_stream(message));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace
}  // namespace megatron_sparse

STABLE_TORCH_LIBRARY_IMPL(megatron_sparse, CUDA, m) {
  m.impl("add_payload_sums_", TORCH_BOX(&megatron_sparse::add_payload_sums_cuda));
}
