// prune_encode_records on CUDA: checks, device, stream, launch.
#include "prune_encode_check.h"

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
  const PruneArguments pruning = check_pruning(
      {grad, residual, range_offsets, thresholds, tie_chances, leak, key, value_dtype});
  torch::stable::accelerator::DeviceGuard guard(grad.get_device_index());
  return run_encoder(request, encode_workspace_bytes,
                     [&](const EncodeArguments& arguments, void* stream) {
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
