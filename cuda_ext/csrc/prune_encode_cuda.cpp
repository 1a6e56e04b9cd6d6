// prune_encode_records on CUDA: checks, device, stream, launch.
#include "encode_check.h"
#include "prune.h"

namespace megatron_sparse {
namespace {

Tensor prune_encode_records_cuda(const Tensor& grad, const Tensor& residual,
                                 const Tensor& range_offsets, const Tensor& thresholds, double leak,
                                 int64_t key, const Tensor& segment_offsets,
                                 const Tensor& segment_formats, int64_t value_dtype, int64_t step,
                                 int64_t block_size, const Tensor& out,
                                 std::optional<Tensor> capacity, std::optional<Tensor> slots,
                                 std::optional<Tensor> tie_chances) {
  const EncodeRequest request = {
      grad, segment_offsets, segment_formats, value_dtype, step, block_size, out, slots, capacity};
  check_encode(request);
  const PruneTypes types = check_prune(grad, residual, thresholds, tie_chances, leak, value_dtype);
  const auto device = grad.get_device_index();
  const auto here = [device](const Tensor& tensor) {
    return tensor.is_cuda() && tensor.get_device_index() == device;
  };
  MS_CHECK(here(residual) && here(range_offsets) && here(thresholds) &&
               (!tie_chances.has_value() || here(*tie_chances)),
           "prune_encode_records: a tensor is on the wrong device", "all on grad's CUDA device",
           "another");
  const int64_t range_count = thresholds.numel();
  // The content of range_offsets is on the device and is not checked: the kernel finds a range
  // inside the table for every element, for any content.
  check_vector(range_offsets, "prune_encode_records: range_offsets", ScalarType::Long,
               range_count + 1);
  MS_CHECK(range_count > 0 || grad.numel() == 0, "prune_encode_records: thresholds is empty",
           "one for each range", 0);

  torch::stable::accelerator::DeviceGuard guard(device);
  const PruneArguments pruning = {residual.mutable_data_ptr(),
                                  static_cast<const int64_t*>(range_offsets.const_data_ptr()),
                                  static_cast<const float*>(thresholds.const_data_ptr()),
                                  chances_of(tie_chances),
                                  range_count,
                                  static_cast<float>(leak),
                                  key,
                                  types.residual};
  return run_encoder(request, [&](const EncodeArguments& arguments, void* stream) {
    launch_prune_encode(arguments, pruning, stream);
  });
}

}  // namespace
}  // namespace megatron_sparse

STABLE_TORCH_LIBRARY_FRAGMENT(megatron_sparse, m) {
  m.def(
      "prune_encode_records(Tensor grad, Tensor(a!) residual, Tensor range_offsets, Tensor "
      "thresholds, "
      "float leak, int key, Tensor segment_offsets, Tensor segment_formats, int value_dtype, "
      "int step, int block_size, Tensor(b!) out, Tensor? capacity=None, "
      "Tensor? slots=None, Tensor? tie_chances=None) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(megatron_sparse, CUDA, m) {
  m.impl("prune_encode_records", TORCH_BOX(&megatron_sparse::prune_encode_records_cuda));
}
