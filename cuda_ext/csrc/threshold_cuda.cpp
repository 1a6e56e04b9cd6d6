// sample_threshold on CUDA: device, stream, launch. Its schema is library.cpp's.
//
// All tables are on the device, so the host does not wait; the caller has checked their content.
#include "cuda_binding.h"
#include "threshold_check.h"

namespace megatron_sparse {
namespace {

ThresholdResults sample_threshold_cuda(const Tensor& grad, std::optional<Tensor> residual,
                                       const Tensor& range_offsets, const Tensor& densities,
                                       int64_t samples, const Tensor& keys) {
  ThresholdArguments call =
      check_threshold(grad, residual, range_offsets, densities, samples, keys);
  torch::stable::accelerator::DeviceGuard guard(grad.get_device_index());
  const ThresholdResults results = make_results(call, densities, keys);
  const Tensor workspace =
      new_workspace(grad, threshold_workspace_bytes(call.range_count, call.numel, samples));
  call.workspace = workspace.mutable_data_ptr();
  launch_sample_threshold(call, current_stream(grad));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return results;
}

}  // namespace
}  // namespace megatron_sparse

STABLE_TORCH_LIBRARY_IMPL(megatron_sparse, CUDA, m) {
  m.impl("sample_threshold", TORCH_BOX(&megatron_sparse::sample_threshold_cuda));
}
