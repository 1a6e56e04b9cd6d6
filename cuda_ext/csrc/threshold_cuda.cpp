// sample_threshold on CUDA: checks, device, stream, launch. Its schema is library.cpp's.
//
// All tables are on the device, so the host does not wait; the caller has checked their content.
#include <optional>
#include <tuple>

#include "cuda_binding.h"
#include "threshold_launch.h"

namespace megatron_sparse {
namespace {

std::tuple<Tensor, Tensor, Tensor> sample_threshold_cuda(const Tensor& grad,
                                                         std::optional<Tensor> residual,
                                                         const Tensor& range_offsets,
                                                         const Tensor& densities, int64_t samples,
                                                         const Tensor& keys) {
  check_flat(grad, "sample_threshold: grad");
  MS_CHECK(grad.is_cuda(), "sample_threshold: grad is on the wrong device", "cuda", "another");
  ThresholdArguments call = {};
  call.grad = grad.const_data_ptr();
  call.grad_dtype = dtype_code(grad, "sample_threshold: grad");
  call.numel = grad.numel();
  if (residual.has_value()) {
    check_flat(*residual, "sample_threshold: residual");
    check_beside(*residual, grad, "sample_threshold: residual");
    MS_CHECK(residual->numel() == grad.numel(), "sample_threshold: residual has the wrong length",
             grad.numel(), residual->numel());
    call.residual = residual->const_data_ptr();
    call.residual_dtype = dtype_code(*residual, "sample_threshold: residual");
  }
  call.range_count = densities.numel();
  check_vector(densities, "sample_threshold: densities", ScalarType::Float, -1);
  check_vector(keys, "sample_threshold: keys", ScalarType::Long, call.range_count);
  check_vector(range_offsets, "sample_threshold: range_offsets", ScalarType::Long,
               call.range_count + 1);
  check_beside(densities, grad, "sample_threshold: densities");
  check_beside(keys, grad, "sample_threshold: keys");
  check_beside(range_offsets, grad, "sample_threshold: range_offsets");
  MS_CHECK(samples >= 1 && samples < int64_t{1} << 31, "sample_threshold: samples is out of range",
           "1 to 2^31 - 1", samples);
  call.samples = samples;

  torch::stable::accelerator::DeviceGuard guard(grad.get_device_index());
  const Tensor thresholds = torch::stable::new_empty(densities, {call.range_count});
  const Tensor tie_chances = torch::stable::new_empty(densities, {call.range_count});
  const Tensor ties = torch::stable::new_empty(keys, {call.range_count});
  const Tensor workspace =
      new_workspace(grad, threshold_workspace_bytes(call.range_count, call.numel, samples));
  call.range_offsets = entries_of(range_offsets);
  call.densities = static_cast<const float*>(densities.const_data_ptr());
  call.keys = entries_of(keys);
  call.thresholds = static_cast<float*>(thresholds.mutable_data_ptr());
  call.tie_chances = static_cast<float*>(tie_chances.mutable_data_ptr());
  call.ties = static_cast<int64_t*>(ties.mutable_data_ptr());
  call.workspace = workspace.mutable_data_ptr();
  launch_sample_threshold(call, current_stream(grad));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return {thresholds, tie_chances, ties};
}

}  // namespace
}  // namespace megatron_sparse

STABLE_TORCH_LIBRARY_IMPL(megatron_sparse, CUDA, m) {
  m.impl("sample_threshold", TORCH_BOX(&megatron_sparse::sample_threshold_cuda));
}
