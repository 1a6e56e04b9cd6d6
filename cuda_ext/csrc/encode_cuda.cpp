// encode_records on CUDA: checks, device, stream, launch.
//
// Needs no count and no size on the host: status, sizes and counts come back on the device.
#include "encode_check.h"

namespace megatron_sparse {
namespace {

Tensor encode_records_cuda(const Tensor& grad, const Tensor& segment_offsets,
                           const Tensor& segment_formats, int64_t value_dtype, int64_t step,
                           int64_t block_size, const Tensor& out, std::optional<Tensor> slots) {
  const EncodeRequest request = {
      grad, segment_offsets, segment_formats, value_dtype, step, block_size, out, slots, {}};
  check_encode(request);
  torch::stable::accelerator::DeviceGuard guard(grad.get_device_index());
  return run_encoder(
      request, encode_workspace_bytes,
      [](const EncodeArguments& arguments, void* stream) { launch_encode(arguments, stream); });
}

}  // namespace
}  // namespace megatron_sparse

STABLE_TORCH_LIBRARY_FRAGMENT(megatron_sparse, m) {
  m.def(
      "encode_records(Tensor grad, Tensor segment_offsets, Tensor segment_formats, "
      "int value_dtype, int step, int block_size, Tensor(a!) out, Tensor? slots=None) "
      "-> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(megatron_sparse, CUDA, m) {
  m.impl("encode_records", TORCH_BOX(&megatron_sparse::encode_records_cuda));
}
